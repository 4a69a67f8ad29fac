"""Islands without a model, as real processes over real sockets: what breaks them is real, and quick to repeat.

The parent hears what happens (begins, commits, notes) over a pipe, and may kill, stop, tell to die at a given moment,
or replace any of them. What they do is in `crew_member.py`.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from diloco.bench.bare import Setting
from diloco.bench.crew_member import Event, serve
from diloco.bench.processes import Processes
from diloco.comm.transport.transport import PeerAddress

HELLO_S = 120.0
STAND_STILL_S = 30.0


class Crew:
    """The parent's side."""

    def __init__(self, setting: Setting, processes: Processes) -> None:
        self.setting = setting
        self.events: list[Event] = []
        self._processes = processes
        self._addresses: dict[str, PeerAddress] = {}

    def start(self, *names: str, founders: tuple[str, ...] = ()) -> None:
        """Start new islands, or new lives of dead ones; all that live are introduced to each other."""
        self.prepare(*names)
        self.admit(*names, founders=founders)

    def prepare(self, *names: str) -> None:
        """Start their processes only."""
        since = time.monotonic()
        for name in names:
            self._processes.start(name, serve, name, self.setting)
        for name in names:
            self._addresses[name] = self._told(name, "hello", since)["address"]

    def admit(self, *names: str, founders: tuple[str, ...] = ()) -> None:
        for name in self.alive():
            self.send(name, "know", self._addresses)
        for name in names:
            self.send(name, "start", founders)

    def alive(self) -> list[str]:
        return [name for name, worker in self._processes.workers.items() if worker.is_alive()]

    def send(self, name: str, command: str, argument: Any = None) -> None:
        self._processes.pipes[name].send((command, argument))

    def signal(self, name: str, number: int) -> None:
        pid = self._processes.workers[name].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.join(name)
        del self._addresses[name]

    def join(self, name: str, timeout_s: float = 30.0) -> None:
        worker = self._processes.workers[name]
        worker.join(timeout_s)
        assert not worker.is_alive(), f"{name} should be dead"
        self._processes.pipes.pop(name, None)

    def expect(
        self, wanted: Callable[[Event], bool], timeout_s: float = HELLO_S, *, since: float | None = None
    ) -> Event:
        """Return the first event of this kind after this moment, which may have come already; by default, from now."""
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
        """Take in what they say; who has died says nothing more."""
        self.events += [said for _, said in self._processes.hear(timeout_s) if isinstance(said, Event)]

    def await_commits(self, number: int, names: Iterable[str], timeout_s: float = HELLO_S) -> None:
        """Wait until each of them has committed that round, or a later one."""
        for name in names:

            def committed(event: Event, name: str = name) -> bool:
                return (event.island, event.kind) == (name, "commit") and event.data["round"] >= number

            self.expect(committed, timeout_s, since=0.0)

    def newest(self) -> int:
        """Return the last round that anybody has committed."""
        self.hear(0)
        return max((event.data["round"] for event in self.events if event.kind == "commit"), default=0)

    def reports(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in names or self.alive():
            since = time.monotonic()
            self.send(name, "report")
            found[name] = self._told(name, "report", since)
        return found

    def stand_still(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Return their reports, once they have stopped training and are all at the same head."""
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


@contextmanager
def crew(setting: Setting, names: tuple[str, ...]) -> Iterator[Crew]:
    with Processes() as processes:
        team = Crew(setting, processes)
        team.start(*names, founders=names)
        yield team
