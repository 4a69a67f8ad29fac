"""Events as islands tell them, made by hand."""


def told(kind: str, at: float = 0.0, **fields: object) -> dict[str, object]:
    return {"event": kind, "time": at, **fields}


def a_round(number: int, *contributors: str, at: float, step: int, digest: str = "") -> dict[str, object]:
    fields = {"contributors": list(contributors), "step": step, "digest": digest or f"digest {number}"}
    return told("round", at, round=number, **fields)
