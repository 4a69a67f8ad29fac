"""Show several islands to the person who watches them: a live table under scrolling milestones, or plain lines."""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from diloco.report.board import Row
from diloco.report.console import LastingConsole
from diloco.report.events import Event, read_event
from diloco.units import format_count

RECENT_BYTES = 2 << 20
COLUMNS = ("island", "state", "step", "loss", "tokens/s", "round")


class LineTail:
    """Follow a file of JSON lines: wait for the file to appear, and for the end of each line."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> list[dict[str, Any]]:
        """Return the objects that were added since the last call.

        Lines that are no JSON are skipped: their writer was killed halfway.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                added = file.read()
        except FileNotFoundError:
            return []
        self._at += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            with suppress(ValueError):  # half a line: its writer was killed
                found.append(json.loads(line))
        return [one for one in found if isinstance(one, dict)]


class Tail(LineTail):
    """Follow a file of events."""

    def read(self) -> list[Event]:
        """Return the events that were added since the last call, without those that this version does not know."""
        return [event for line in self.lines() if (event := read_event(line)) is not None]


def recent_events(path: Path, last_bytes: int = RECENT_BYTES) -> list[Event]:
    """Return the events at the end of a file, as far back as so many bytes reach; none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - last_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found: list[Event] = []
    for line in lines:
        with suppress(ValueError):  # the first one may be half a line
            if (event := read_event(json.loads(line))) is not None:
                found.append(event)
    return found


class IslandsView:
    """Print milestones as plain lines, where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Print one line as it is, however long, and flush it."""
        self._console.print(line, soft_wrap=True, markup=False)

    def show(self, rows: Iterable[Row]) -> None:
        """Show nothing: a line for each island and step would be too many."""

    def close(self) -> None:
        pass


class LiveTable(IslandsView):
    """Keep a table of all islands below the milestones, in a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, transient=True, refresh_per_second=4)

    def show(self, rows: Iterable[Row]) -> None:
        """Replace the table by one of these rows; the first call starts the display."""
        self._live.update(table(rows))
        self._live.start()  # once; an empty one would leave empty lines

    def close(self) -> None:
        """Stop the display, which removes the table."""
        self._live.stop()


def open_islands_view(stream: TextIO | None = None) -> IslandsView:
    """Open a live table if the stream is a terminal, otherwise plain lines."""
    console = LastingConsole(file=stream or sys.stdout, highlight=False)
    return LiveTable(console) if console.is_terminal else IslandsView(console)


def table(rows: Iterable[Row]) -> Table:
    """Build the table for a terminal, with islands that died in red and those that left dimmed."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in ("island", "state") else "right")
    for row in rows:
        made.add_row(*cells(row), style={"gone": "red", "left": "dim", "starting": "yellow"}.get(row.state, ""))
    return made


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's texts in the order of COLUMNS; what is not known yet stays empty."""
    loss = "" if row.loss is None else f"{row.loss:.4f}"
    speed = "" if row.tokens_per_s is None else format_count(row.tokens_per_s)
    return row.name, row.state, str(row.step or ""), loss, speed, str(row.round or "")
