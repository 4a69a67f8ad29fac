"""Islands without a model, as real processes over real sockets: what breaks them is real, and quick to repeat.

Each has a driver, mutual TLS, a vector of given length and a trainer that only offers a fixed displacement. The parent
hears what happens (begins, commits, notes) over a pipe, and may kill, stop, tell to die at a given moment, or replace
any of them.
"""

import hashlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from diloco.comm.codec import warm_up
from diloco.comm.direct import DirectTransport
from diloco.comm.pooled import PooledTransport
from diloco.comm.transport import PeerAddress
from diloco.elastic.driver import Driver, Network, Run
from diloco.elastic.fetching import fetch_state
from diloco.elastic.fragments import Fragments
from diloco.elastic.ledger import Ledger
from diloco.elastic.mailbox import greet
from diloco.elastic.messages import Append, Collect, Commit, Effect, Note, Reduce, Send
from diloco.elastic.node import Node, Options
from diloco.elastic.ranges import first, size
from diloco.elastic.record import Contribution, Head, Settings
from diloco.elastic.session import Session
from diloco.elastic.state import RunState
from diloco.elastic.work import Trained
from diloco.errors import TransferFailed, TransportError
from diloco.outer import apply_record

CODEC = "int8"
GENESIS = b"a run without a model"
TOKENS = 1000
HELLO_S = 120.0
STAND_STILL_S = 30.0
PHASES = ("collect", "reduce", "commit")


@dataclass(frozen=True)
class Setting:
    count: int = 25_000_000
    silence_s: float = 5.0
    pace_s: float = 0.3  # of a phase
    partition: str = "merge"
    samples: int = 4  # of a phase
    limit: int | None = None  # of the whole run


@dataclass(frozen=True)
class Event:
    at: float  # CLOCK_MONOTONIC, the same for all processes of a machine
    island: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
    return Settings(0.7, 0.9, CODEC), state.step + bool(contributions)


def genesis_state(roster: tuple[str, ...], limit: int | None) -> RunState:
    ledger = Ledger(epoch=limit or 1 << 40, limit=limit)
    return RunState(Head(0, 0, hashlib.sha256(GENESIS).hexdigest()), roster, ledger)


class Worker:
    """Inside the process."""

    def __init__(self, name: str, setting: Setting, pipe: Connection) -> None:
        self.name, self.setting, self.pipe = name, setting, pipe
        self.plain = DirectTransport(name, "127.0.0.1")
        self.addresses: dict[str, PeerAddress] = {}
        self.driver: Driver | None = None
        self.die_at = ""
        self.phases = 0
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    def tell(self, kind: str, **data: Any) -> None:
        with self._lock:
            self.pipe.send(Event(time.monotonic(), self.name, kind, data))

    def serve(self) -> None:
        """Commands of the parent, one after the other."""
        self.tell("hello", address=self.plain.address("127.0.0.1"))
        while True:
            command, argument = self.pipe.recv()
            match command:
                case "know":
                    self._know(argument)
                case "start":
                    threading.Thread(target=self._run, args=(argument,), daemon=True).start()
                case "die":
                    self.die_at = argument
                case "report":
                    self.tell("report", **self._report())
                case "stop":
                    self.stopping.set()
                case "end":
                    return

    def _know(self, addresses: dict[str, PeerAddress]) -> None:
        self.addresses = {peer: address for peer, address in addresses.items() if peer != self.name}
        self.plain.allow(self.addresses.values())
        if self.driver is not None:
            self.driver.know(self.addresses)

    def _run(self, roster: tuple[str, ...]) -> None:
        """A founder begins with zeros, a newcomer with what the others have."""
        count = self.setting.count
        state = genesis_state(roster, self.setting.limit)
        vectors = {"parameters": torch.zeros(count), "momentum": torch.zeros(count)}
        if self.name not in roster:
            state, vectors = self._fetch(count)
        fragments = Fragments.whole(count)
        run = Run(GENESIS, hashlib.sha256(GENESIS).hexdigest(), fragments, apply_record)
        options = Options(
            decide, silence_s=self.setting.silence_s, partition=self.setting.partition, want=2 * self.setting.samples
        )
        node = Node(self.name, state, options, now=time.monotonic(), incarnation=time.time_ns() // 1000)
        network = Network(self.plain, PooledTransport(self.plain), b"", lambda peer, greeting: None)
        driver = Watched(node, run, vectors, network, self)
        self.driver = driver
        driver.know(self.addresses)
        self.tell("started", round=state.head.round)
        self._train(Session(driver, fragments, CODEC))

    def _fetch(self, count: int) -> tuple[RunState, dict[str, torch.Tensor]]:
        sizes, genesis = {"parameters": count, "momentum": count}, hashlib.sha256(GENESIS).hexdigest()
        while True:
            for address in list(self.addresses.values()):
                with suppress(TransportError):
                    greet(self.plain, address, b"")
            for peer in list(self.addresses):
                try:
                    snapshot = fetch_state(self.plain, peer, self.addresses, genesis, sizes)
                except (TransferFailed, TransportError) as error:
                    self.tell("refused", reason=str(error))
                    continue
                self.tell("fetched", round=snapshot.state.head.round, donors=snapshot.donors)
                return snapshot.state, snapshot.vectors
            time.sleep(0.05)

    def _train(self, session: Session) -> None:
        base, displacement = torch.empty(self.setting.count), torch.randn(self.setting.count)
        while not self.stopping.is_set():
            batch = first(session.available(()), self.setting.samples)
            if size(batch) or session.owes():
                self.stopping.wait(self.setting.pace_s)
                self.phases += bool(size(batch))
                session.start(0, displacement, Trained(TOKENS if size(batch) else 0, batch))
                session.finish(0, self.stopping.is_set)
            else:
                session.wait(0.05)
            if session.poll():
                session.take(0, base)

    def _report(self) -> dict[str, Any]:
        assert self.driver is not None
        driver = self.driver
        state = driver.applied
        return {
            "head": state.head, "digest": driver.replica.digest(), "phases": self.phases, "state": state,
            "incarnation": driver.node.incarnation,
            "records": [entry.header for entry in driver.log.entries()],
        }  # fmt: skip


class Watched(Driver):
    """A driver that tells the parent what it does, and dies where it is told to."""

    def __init__(self, node: Node, run: Run, vectors: Any, network: Network, worker: Worker) -> None:
        self.worker = worker
        super().__init__(node, run, vectors, network, self._tell_note)

    def _tell_note(self, note: Note) -> None:
        self.worker.tell("note", note=(note.kind, note.peer, note.text))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reduce(begin):
                self.worker.tell("begin", round=begin.key.round, members=begin.members, ballot=tuple(begin.ballot))
            case Append(record):
                self.worker.tell("commit", round=record.proposal.key.round, islands=record.proposal.islands)
        if self.worker.die_at and phase_of(effect) == self.worker.die_at:
            if self.worker.die_at == "reduce":  # in the middle of it
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        super()._carry_out(effect)


def phase_of(effect: Effect) -> str:
    match effect:
        case Send(_, Collect()):
            return "collect"
        case Reduce():
            return "reduce"
        case Append() | Send(_, Commit()):
            return "commit"
    return ""


def _work(name: str, setting: Setting, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warm_up()
    Worker(name, setting, pipe).serve()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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
            process = self._context.Process(target=_work, args=(name, self.setting, theirs), daemon=True)
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
