"""`diloco rewind`."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.shared import Overrides, RunName, say


def rewind(
    run: RunName,
    round: Annotated[int, typer.Argument(metavar="ROUND", min=0, help="diloco log lists them.", show_default=False)],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The new run's folder; RUN-round-ROUND if not given.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Start a new run from an earlier round of one with others.

    It has that round's parameters, momentum, clock and consumed samples, and other settings where --set gives them.
    The old run stays as it is.
    """
    from diloco.history.rewind import rewind

    branch = rewind(run, round, out, set_ or [])
    parent = branch.genesis.parent
    assert parent is not None
    if branch.own_loop:
        resume = f"  the program of the run, with diloco.connect(…, dir={str(branch.folder)!r})"
    else:
        resume = f"  diloco run {branch.folder}/config.yaml --resume"
    say(
        f"{branch.folder} is a new run that begins with round {round} of {branch.source}, at step {parent.step}",
        "next:",
        resume,
        "      trains on from there",
        f"  diloco log {branch.folder}",
        "      says where it comes from",
        f"{branch.source} is as it was. Stop it if it still runs; its tickets let nobody into the new run: islands of",
        "other machines join that with the ticket it prints, each in a new folder",
    )
