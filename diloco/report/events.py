"""What happens in a run, told once: every event goes to every sink (file, terminal, trackers)."""

import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

Event = dict[str, Any]


class Sink(Protocol):
    def emit(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Events:
    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def attach(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def emit(self, kind: str, **fields: Any) -> None:
        event = {"event": kind, "time": time.time(), **fields}
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class JsonLines:
    """One JSON object a line, readable while the run goes on. Numbers that JSON lacks (NaN, infinity) become null.

    A disk that is full loses events, and ends nothing: how many is told when there is space again.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab" if append else "wb", buffering=0)
        self._lost = 0
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if self._lost and self._write({"event": "lost", "time": event["time"], "events": self._lost}):
                self._lost = 0
            self._lost += not self._write(event)

    def _write(self, event: Event) -> bool:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in event.items()}
        line = json.dumps(finite).encode() + b"\n"
        at = self._file.tell()
        try:
            if self._file.write(line) == len(line):
                return True
            self._file.truncate(at)
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._file.close()
