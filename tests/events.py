"""Events as islands tell them, made by hand."""

from dataclasses import MISSING, fields

from diloco.report.events import KINDS, Event, Round


def told(kind: str, at: float = 0.0, **given: object) -> Event:
    """An event of which only some fields matter; the others are empty."""
    needed = {each.name for each in fields(KINDS[kind]) if each.default is MISSING and each.default_factory is MISSING}
    empty = dict.fromkeys(needed - {"contributors"}, 0) | dict.fromkeys(needed & {"contributors"}, ())
    return KINDS[kind](time=at, **{**empty, **given})  # type: ignore[arg-type]


def a_round(
    number: int, *contributors: str, at: float = 0.0, step: int, digest: str = "", islands: int = 1, **given: object
) -> Round:
    return Round(
        time=at, round=number, contributors=contributors, step=step, digest=digest or f"digest {number}",
        islands=islands, **given,
    )  # type: ignore[arg-type] # fmt: skip
