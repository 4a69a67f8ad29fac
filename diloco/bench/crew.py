"""Islands without a model, as real processes over real sockets: what breaks them is real, and quick to repeat.

The parent hears what happens (begins, commits, notes) over a pipe, and may kill, stop, tell to die at a given moment,
or replace any of them. What they do is in `crew_member.py`.
"""

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from diloco.bench.crew_member import Event, Setting, work
from diloco.comm.transport.transport import PeerAddress

HELLO_S = 120.0
STAND_STILL_S = 30.0


class Crew:
    """The parent's side."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.events: list[Event] = []
        self._context = mp.get_context("spawn")
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Connection] = {}
        self._addresses: dict[str, PeerAddress] = {}

    def start(self, *names: str, founders: tuple[str, ...] = ()) -> None:
        """New islands, or new lives of dead ones; all that live are introduced to each other."""
        self.prepare(*names)
        self.admit(*names, founders=founders)

    def prepare(self, *names: str) -> None:
        """Their processes only."""
        since = time.monotonic()
        for name in names:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=work, args=(name, self.setting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes[name], self._pipes[name] = process, ours
        for name in names:
            self._addresses[name] = self._told(name, "hello", since)["address"]

    def admit(self, *names: str, founders: tuple[str, ...] = ()) -> None:
        for name in self.alive():
            self._pipes[name].send(("know", self._addresses))
        for name in names:
            self._pipes[name].send(("start", founders))

    def alive(self) -> list[str]:
        return [name for name, process in self._processes.items() if process.is_alive()]

    def send(self, name: str, command: str, argument: Any = None) -> None:
        self._pipes[name].send((command, argument))

    def signal(self, name: str, number: int) -> None:
        os.kill(self._processes[name].pid, number)

    def end(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.join(name)
        del self._addresses[name]

    def join(self, name: str, timeout_s: float = 30.0) -> None:
        self._processes[name].join(timeout_s)
        assert not self._processes[name].is_alive(), f"{name} should be dead"
        self._pipes.pop(name, None)

    def expect(
        self, wanted: Callable[[Event], bool], timeout_s: float = HELLO_S, *, since: float | None = None
    ) -> Event:
        """The first event of this kind after this moment, which may have come already; by default, from now on."""
        since = time.monotonic() if since is None else since
        seen, deadline = 0, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self.events[seen:]:
                if event.at >= since and wanted(event):
                    return event
            seen = len(self.events)
            self.hear(max(0.0, deadline - time.monotonic()))
        last = [(event.island, event.kind, event.data.get("round")) for event in self.events[-12:]]
        raise TimeoutError(f"it did not happen; the last events: {last}")

    def hear(self, timeout_s: float) -> None:
        ready = wait(list(self._pipes.values()), timeout_s)
        for name, pipe in list(self._pipes.items()):
            if pipe in ready:
                try:
                    self.events.append(pipe.recv())
                except (EOFError, OSError):  # it is dead
                    del self._pipes[name]

    def reports(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in names or self.alive():
            since = time.monotonic()
            self.send(name, "report")
            found[name] = self._told(name, "report", since)
        return found

    def stand_still(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Their reports, once they have stopped training and are all at the same head."""
        names = names or tuple(self.alive())
        for name in names:
            self.send(name, "stop")
        deadline = time.monotonic() + STAND_STILL_S
        while True:
            reports = self.reports(names)
            heads = {name: report["head"] for name, report in reports.items()}
            if len(set(heads.values())) == 1:
                return reports
            if time.monotonic() > deadline:
                raise TimeoutError(heads)
            time.sleep(0.1)

    def _told(self, name: str, kind: str, since: float) -> dict[str, Any]:
        return self.expect(lambda event: (event.island, event.kind) == (name, kind), since=since).data

    def close(self) -> None:
        for process in self._processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.join(10)


@contextmanager
def crew(setting: Setting, names: tuple[str, ...]) -> Iterator[Crew]:
    team = Crew(setting)
    try:
        team.start(*names, founders=names)
        yield team
    finally:
        team.close()
