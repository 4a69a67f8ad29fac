"""Declare `diloco dashboard` and `diloco report`: a run as a web page, live or in a file."""

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import RunName, say
from diloco.cli.status import OneRun, is_ticket, read_watch_ticket

if TYPE_CHECKING:
    from diloco.dashboard.feed import Source
    from diloco.report.live import Show

Host = Annotated[
    str, typer.Option(help="Address to listen at; any but 127.0.0.1 puts a token into the page's address.")
]
WebPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="TCP port to listen at (default: 7117, or a free one).")
]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Show the run as a web page meanwhile, on this machine.")]


def dashboard(run: OneRun = None, host: Host = "127.0.0.1", port: WebPort = None) -> None:
    """Show a run as a web page, live.

    Loss, islands, rounds, links, the log, and what holds the run up. It only reads, from this machine's files or, by a
    ticket whose right is watch, from afar. Ctrl-C ends it; the run goes on.
    """
    from diloco.dashboard.feed import Feed
    from diloco.dashboard.server import need_dashboard, open_door, serve

    need_dashboard()
    source = _source(run)
    door = open_door(host, port)
    say(f"dashboard: {door.url} (Ctrl-C ends it, not the run)")
    serve(Feed(source), door)


def _source(run: str | None) -> "Source":
    from diloco.history import present

    if run is not None and is_ticket(run):
        from diloco.dashboard.afar import WatchedRun

        return WatchedRun(read_watch_ticket(run))
    from diloco.dashboard.local import LocalRun

    name = run or present.only_run()
    present.find_islands(name)
    return LocalRun(present.folder_of(name))


def report(
    run: RunName,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write (default: report.html in the run's folder).")
    ] = None,
) -> None:
    """Write a run's report: one HTML file that needs nothing else.

    What `diloco simulate` writes of a simulation: loss, islands, timeline, links and the log, of a run that trains or
    has ended.
    """
    from diloco.dashboard.still import write_report
    from diloco.history import present

    present.find_islands(run)
    folder = present.folder_of(run)
    path = write_report(folder, out or folder / "report.html")
    say(f"report: {path} (open it in a browser)")


def show_beside(folder: Path, show: "Show" = "auto") -> None:
    """Show the run in a folder as a web page until this process ends, and say where.

    Of an island's processes only the one that was started first does so.
    """
    from diloco.dashboard.beside import Beside

    if "DILOCO_MEETING" in os.environ or os.environ.get("RANK", "0") != "0":
        return
    beside = Beside(folder, "127.0.0.1", None)
    atexit.register(beside.close)
    say(f"dashboard: {beside.url}", show=show)
