"""Follow what islands report in their files, and print what several of them report as plain lines."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco.report.board import Row
from diloco.report.events import Event, read_event

RECENT_BYTES = 2 << 20
NICE = 10  # of a process that only looks: islands on the same machine go first


def give_way() -> None:
    """Lower the priority of this process and of what it starts; where the kernel can, let it interrupt nobody."""
    os.nice(max(0, NICE - os.nice(0)))
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


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
        self._console.print(line, soft_wrap=True, markup=False, emoji=False)

    def hear(self, island: str, event: Event) -> None:
        """Take an event of one island; lines about what matters come by `say`."""

    def show(self, rows: Iterable[Row]) -> None:
        """Show nothing: a line for each island and step would be too many."""

    def close(self) -> None:
        pass
