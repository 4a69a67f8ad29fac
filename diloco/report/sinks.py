"""Emit each event of a run once: every event goes to every sink (file, terminal, trackers)."""

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from diloco.report.events import Event, EventsLost

EVENTS = "events.jsonl"  # in an island's folder


class Sink(Protocol):
    """Receive a run's events, as a file, a view or a tracker does."""

    def emit(self, event: Event) -> None:
        """Take one event; `events.py` has a dataclass for each kind."""

    def close(self) -> None: ...


class Events:
    """Pass every event on to all sinks, in the order in which they were attached."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def attach(self, sink: Sink) -> None:
        """Add a sink, which gets the events from now on."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Send an event to every sink."""
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        """Close all sinks: nothing may be emitted afterwards."""
        for sink in self._sinks:
            sink.close()


class JsonLines:
    """Write one JSON object per line, readable while the run continues.

    A full disk loses events and stops nothing: a `lost` event says how many once there is space again.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)  # what is cut off leaves no hole: each write goes to the end
        if not append:
            self._file.truncate(0)
        self._lost = 0
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Write the event, after a `lost` event if earlier ones could not be written. May be called on any thread."""
        with self._lock:
            if self._lost and self._write(EventsLost(time=event.time, events=self._lost)):
                self._lost = 0
            self._lost += not self._write(event)

    def _write(self, event: Event) -> bool:
        """Return whether the whole line was written; part of a line is cut off again."""
        line = json.dumps(event.plain()).encode() + b"\n"
        at = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) == len(line):
                return True
            self._file.truncate(at)
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._file.close()
