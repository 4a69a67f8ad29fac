"""Run islands without a model as real processes over real sockets: what breaks them is real, and quick to repeat.

The parent's side is a `Crew`: it hears what happens (begins, commits, notes) over a pipe, and may kill or stop any
island, order it to die at a given moment, or replace it. Each process is a `Worker` and obeys the parent's commands.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.bench.bare import DIGEST, VECTORS, BareConfig, BareIsland
from diloco.bench.processes import LinkRate, Processes, WorkerMessage
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.comm.codec.registry import warm_up
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress
from diloco.elastic.protocol.messages import Append, Collect, Commit, Effect, Reduce, Send
from diloco.elastic.protocol.record import LoggedRecord
from diloco.elastic.runtime.driver import Driver, among_friends, open_island
from diloco.elastic.runtime.fetching import FetchedState, entry_of, fetch_state
from diloco.elastic.runtime.reducing import Attempt
from diloco.elastic.runtime.restoring import Origin, restore
from diloco.errors import TransferFailed, TransportError

HELLO_S = 300.0  # a busy machine may take minutes to compile the codecs
STAND_STILL_S = 30.0
PHASES = ("collect", "reduce", "commit")


@dataclass(frozen=True)
class Event:
    """Describe what an island reports to the parent: when, which island, which kind, and its data."""

    at: float  # CLOCK_MONOTONIC, the same for all processes of a machine
    island: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


class Crew:
    """Start, command and watch islands, on the parent's side."""

    def __init__(self, setting: BareConfig, processes: Processes) -> None:
        self.setting = setting
        self.events: list[Event] = []
        self._processes = processes
        self._addresses: dict[str, PeerAddress] = {}

    def start(self, *names: str, founders: tuple[str, ...] = ()) -> None:
        """Start new islands, or new lives of dead ones; all that live are introduced to each other."""
        self.prepare(*names)
        self.admit(*names, founders=founders)

    def prepare(self, *names: str) -> None:
        """Start only the processes of these islands, and wait until each has reported its address."""
        since = time.monotonic()
        for name in names:
            self._processes.start(name, serve, name, self.setting)
        for name in names:
            self._addresses[name] = self.told(name, "hello", since).data["address"]

    def admit(self, *names: str, founders: tuple[str, ...] = ()) -> None:
        """Introduce all islands that live to each other, and let these begin to train.

        `founders` is the roster of a new run; an island that is not in it fetches the state, unless its disk has one.
        """
        for name in self.alive():
            self.send(name, "know", self._addresses)
        for name in names:
            self.send(name, "start", founders)

    def alive(self) -> list[str]:
        """List the islands whose processes run, stopped ones included."""
        return [name for name, worker in self._processes.workers.items() if worker.is_alive()]

    def send(self, name: str, command: str, argument: Any = None) -> None:
        """Send a command with its argument to an island's process."""
        self._processes.pipes[name].send((command, argument))

    def signal(self, name: str, number: int) -> None:
        """Send a Unix signal to an island's process, and return at once."""
        pid = self._processes.workers[name].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self, name: str) -> None:
        """Kill an island with SIGKILL, wait until it is dead, and forget its address."""
        self.signal(name, signal.SIGKILL)
        self.join(name)
        del self._addresses[name]

    def join(self, name: str, timeout_s: float = 30.0) -> None:
        """Wait until an island's process is dead; one that still lives after the timeout fails an assertion."""
        worker = self._processes.workers[name]
        worker.join(timeout_s)
        assert not worker.is_alive(), f"{name} should be dead"
        self._processes.pipes.pop(name, None)

    def expect(
        self, wanted: Callable[[Event], bool], timeout_s: float = HELLO_S, *, since: float | None = None
    ) -> Event:
        """Return the first event that is wanted, at or after `since`; by default, from now on.

        It may have come already. Raises TimeoutError, with the last events, if it does not come.
        """
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
        """Take in what the islands report, waiting for at most so long; dead ones report nothing more."""
        self.events += [said for _, said in self._processes.hear(timeout_s) if isinstance(said, Event)]

    def await_commits(self, number: int, names: Iterable[str], timeout_s: float = HELLO_S) -> None:
        """Wait until each of these islands has committed this round, or a later one."""
        missing = set(names)

        def committed(event: Event) -> bool:
            if event.kind == "commit" and event.data["round"] >= number:
                missing.discard(event.island)
            return not missing

        self.expect(committed, timeout_s, since=0.0)

    def newest(self) -> int:
        """Return the last round that any island has committed; 0: none."""
        self.hear(0)
        return max((event.data["round"] for event in self.events if event.kind == "commit"), default=0)

    def reports(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Ask islands, all that live by default, for their state and digest, and return the answers by name."""
        names, since = names or tuple(self.alive()), time.monotonic()
        for name in names:
            self.send(name, "report")
        return {name: self.told(name, "report", since).data for name in names}

    def stand_still(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Stop training on these islands, and return their reports once all are at the same head."""
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

    def told(self, name: str, kind: str, since: float) -> Event:
        """Return the first event of this kind that this island reported, at or after `since`."""
        return self.expect(lambda event: (event.island, event.kind) == (name, kind), since=since)


@contextmanager
def crew(setting: BareConfig, names: tuple[str, ...]) -> Iterator[Crew]:
    """Start islands that found a run together; leaving the `with` statement ends them all."""
    with Processes() as processes:
        team = Crew(setting, processes)
        team.start(*names, founders=names)
        yield team


class Worker:
    """Run one island in a process of its own, and report to the parent."""

    def __init__(self, name: str, setting: BareConfig, pipe: Connection) -> None:
        self.name, self.setting, self.pipe = name, setting, pipe
        self.direct = DirectTransport(name, "127.0.0.1")
        self.plain = LinkRate(setting.bits_per_s, setting.delay_s).shape(self.direct)
        self.addresses: dict[str, PeerAddress] = {}
        self.island: BareIsland | None = None
        self.die_at = ""
        self.die_into = inf
        self._lock = threading.Lock()

    def report(self, kind: str, **data: Any) -> None:
        """Send an event to the parent, stamped with the monotonic clock. May be called on any thread."""
        with self._lock:
            self.pipe.send(Event(time.monotonic(), self.name, kind, data))

    def obey(self, command: str, argument: Any) -> None:
        """Carry out one command of the parent: know, start, die, die into, report or stop."""
        match command:
            case "know":
                self.addresses = {peer: address for peer, address in argument.items() if peer != self.name}
                self.direct.allow(self.addresses.values())
                if self.island is not None:
                    self.island.driver.know(self.addresses)
            case "start":
                threading.Thread(target=self._live_guarded, args=(argument,), daemon=True).start()
            case "die":
                self.die_at = argument
            case "die into":
                self.die_into = argument
            case "report":
                assert self.island is not None
                self.report("report", **self.island.report())
            case "stop":
                assert self.island is not None
                self.island.stopping.set()

    @property
    def received_bytes(self) -> int:
        """Return the bytes that have come through this island's link so far; 0 if it has none."""
        return self.plain.link.down.passed_bytes if isinstance(self.plain, ShapedTransport) else 0

    def _live_guarded(self, roster: tuple[str, ...]) -> None:
        """Run the island's life on its thread; the parent raises any error."""
        try:
            self._live(roster)
        except BaseException:  # noqa: BLE001 -- a thread's outermost frame; the parent raises it
            with self._lock:
                self.pipe.send(WorkerMessage("failed", traceback.format_exc()))

    def _live(self, roster: tuple[str, ...]) -> None:
        """Begin with the island's own disk, or as a founder with zeros, or with a state from the others; then train.

        The disk counts first where it holds something.
        """
        store, kept = None, None
        if self.setting.folder:
            store = DiskStore(Path(self.setting.folder) / self.name, lambda what, text: self.report(what, text=text))
            kept = restore(store.folder, store.journal, self.setting.run, store.report)
        origin = kept or (self.setting.beginning(roster) if self.name in roster else self._fetch())
        if store is not None:
            store.begin(DIGEST, origin.state.head.digest, origin.state.head.round, known=kept is not None)
        driver = open_island(
            self.setting.run, origin, self.setting.options, among_friends(self.plain),
            incarnation=time.time_ns() // 1000, store=store, driver=partial(Watched, self),
            report=lambda note: self.report("note", note=(note.kind, note.peer, note.text)),
        )  # fmt: skip
        driver.node.own.bytes_per_s = int((self.setting.bits_per_s or 0) / 8)
        self.island = BareIsland(self.setting, driver)
        self.island.driver.know(self.addresses)
        self.island.train()

    def _fetch(self) -> Origin:
        """Fetch the state from any peer that has it, for as long as it takes."""
        sizes = dict.fromkeys(VECTORS, self.setting.count)
        while True:
            for peer in list(self.addresses):
                started = time.monotonic()
                try:
                    snapshot = fetch_state(self.plain, peer, self.addresses, DIGEST, sizes)
                except (TransferFailed, TransportError) as error:
                    self.report("refused", reason=str(error))
                    continue
                seconds, number = time.monotonic() - started, snapshot.state.head.round
                self.report("fetched", round=number, donors=snapshot.donors, seconds=seconds)
                return Origin(snapshot.state, snapshot.vectors())
            time.sleep(0.05)


class Watched(Driver):
    """Drive an island as always, but report to the parent what is done, and die where that was ordered."""

    def __init__(self, worker: Worker, *parts: Any) -> None:
        self.worker = worker
        super().__init__(*parts)

    def _extend(self, missed: list[tuple[LoggedRecord, Tensor]], now: float) -> list[Effect]:
        updates = sum(bool(logged.record.proposal.contributions) for logged, _ in missed)
        size = sum(len(entry_of(logged).header) + len(result) for logged, result in missed)
        self.worker.report("caught up", bytes=size, updates=updates)
        return super()._extend(missed, now)

    def _switch(self, snapshot: FetchedState, now: float) -> list[Effect]:
        self.worker.report("caught up", bytes=sum(snapshot.donors.values()), updates=None)
        return super()._switch(snapshot, now)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reduce(begin):
                self.worker.report("begin", round=begin.key.round, members=begin.members, ballot=tuple(begin.ballot))
            case Append(record):
                number, islands, received = (
                    record.proposal.key.round,
                    record.proposal.islands,
                    self.worker.received_bytes,
                )
                self.worker.report("commit", round=number, islands=islands, received=received)
        if self.worker.die_at and phase_of(effect) == self.worker.die_at:
            if self.worker.die_at == "reduce":  # in the middle of it
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        super()._carry_out(effect)
        if isinstance(effect, Reduce) and self.worker.die_into < inf:
            threading.Thread(target=self._die_within, args=(self._attempts[effect.begin.ballot],), daemon=True).start()

    def _die_within(self, attempt: Attempt) -> None:
        """Kill this process once the ordered share of an attempt's bytes has come through its link."""
        plan = attempt.reduction.level.plan
        own = sum(chunk.hi - chunk.lo for chunk in plan.chunks(plan.members.index(self.node.me)))
        means = plan.result_codec.size(plan.count) - plan.result_codec.size(own)
        expected = (len(plan.members) - 1) * plan.codec.size(own) + means
        before = self.worker.received_bytes
        while self.worker.received_bytes - before < self.worker.die_into * expected:
            time.sleep(0.002)
        self.worker.report("dies", round=attempt.begin.key.round)
        os.kill(os.getpid(), signal.SIGKILL)


def phase_of(effect: Effect) -> str:
    """Name the moment at which an island can be ordered to die: collect, reduce or commit; empty for the rest."""
    match effect:
        case Send(_, Collect()):
            return "collect"
        case Reduce():
            return "reduce"
        case Append() | Send(_, Commit()):
            return "commit"
    return ""


def serve(pipe: Connection, name: str, setting: BareConfig) -> None:
    """Carry out the parent's commands one after the other, for as long as the process lives."""
    warm_up()
    worker = Worker(name, setting, pipe)
    worker.report("hello", address=worker.direct.address("127.0.0.1"))
    while True:
        worker.obey(*pipe.recv())
