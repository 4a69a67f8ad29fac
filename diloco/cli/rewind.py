from pathlib import Path

from diloco.cli.log import say
from diloco.history.rewind import Branch, rewind


def rewind_command(run: str, number: int, out: Path | None, overrides: list[str]) -> None:
    branch = rewind(run, number, out, overrides)
    parent = branch.genesis.parent
    assert parent is not None
    say(f"{branch.folder} is a new run that begins with round {number} of {branch.source}, at step {parent.step}")
    say("\n".join(["next:", *what_next(branch)]))


def what_next(branch: Branch) -> list[str]:
    if branch.own_loop:
        go_on = [
            f"  the program of the run, with diloco.connect(…, dir={str(branch.folder)!r})",
            "      trains on from there",
        ]
    else:
        go_on = [f"  diloco run {branch.folder}/config.yaml --resume", "      trains on from there"]
    return [
        *go_on,
        f"  diloco log {branch.folder}",
        "      says where it comes from",
        f"{branch.source} is as it was. Stop it if it still runs; its tickets let nobody into the new run: islands of",
        "other machines join that with the ticket it prints, each in a new folder",
    ]
