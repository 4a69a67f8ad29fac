"""`diloco restore`."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.log import describe
from diloco.cli.shared import say


def restore(
    url: Annotated[str, typer.Argument(metavar="URL", help="What checkpoint.remote was, or a run's folder there.")],
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.", show_default=False)],
) -> None:
    """Restore a run's folder from its copy at checkpoint.remote.

    Brings back the newest snapshot and the log since; every byte is checked. Keys are never copied: take part again
    with a ticket, or make a new run of it by diloco rewind.
    """
    from diloco.history.restore import restore_run

    folder, findings = dir.resolve(), restore_run(url, dir, lambda what, text: say(f"{what}: {text}"))
    say(
        describe(str(dir), findings),
        "next:",
        f"  diloco join TICKET --dir {folder}",
        "      takes part in the run again, if it still goes on somewhere",
        f"  diloco rewind {folder} {findings.last}",
        "      makes a new run of it that goes on from there: the old run's key is not in the copy, and need not be",
    )
    raise SystemExit(bool(findings.problems))
