"""An island without a model: a driver, mutual TLS, a vector, and a trainer that only offers a fixed displacement.

It lives in a process of its own, and does what its parent (`crew.py`) tells it over a pipe.
"""

import hashlib
import multiprocessing as mp
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.store import Store
from diloco.comm.codec.registry import warm_up
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.link import Link, Paths
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Append, Collect, Commit, Effect, Note, Reduce, Send
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.options import Decide
from diloco.elastic.protocol.ranges import first, size
from diloco.elastic.protocol.record import Contribution, Head, Record, Settings
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, Network, Run
from diloco.elastic.runtime.fetching import Snapshot, entry_of, fetch_state
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.mailbox import greet
from diloco.elastic.runtime.restoring import Restored, restore
from diloco.elastic.runtime.session import Session
from diloco.elastic.runtime.work import Trained
from diloco.errors import TransferFailed, TransportError
from diloco.train.outer import apply_record

GENESIS = b"a run without a model"
TOKENS = 1000
PHASES = ("collect", "reduce", "commit")


@dataclass(frozen=True)
class Setting:
    count: int = 25_000_000
    silence_s: float = 5.0
    pace_s: float = 0.3  # of a phase
    partition: str = "merge"
    samples: int = 4  # of a phase
    limit: int | None = None  # of the whole run
    codec: str = "int8"
    bits_per_s: float | None = None  # of each island's link, both ways; None: as fast as the machine goes
    folder: str = ""  # where islands keep their logs; none: in memory


@dataclass(frozen=True)
class Event:
    at: float  # CLOCK_MONOTONIC, the same for all processes of a machine
    island: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def decider(codec: str) -> Decide:
    def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
        return Settings(0.7, 0.9, codec), state.step + bool(contributions)

    return decide


def genesis_state(roster: tuple[str, ...], limit: int | None) -> RunState:
    ledger = Ledger(epoch=limit or 1 << 40, limit=limit)
    return RunState(Head(0, 0, hashlib.sha256(GENESIS).hexdigest()), roster, ledger)


class Worker:
    """Inside the process."""

    def __init__(self, name: str, setting: Setting, pipe: Connection) -> None:
        self.name, self.setting, self.pipe = name, setting, pipe
        self.direct = DirectTransport(name, "127.0.0.1")
        self.plain: Transport = self.direct
        if setting.bits_per_s is not None:
            self.plain = ShapedTransport(self.direct, Link(setting.bits_per_s, setting.bits_per_s), Paths())
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
        self.tell("hello", address=self.direct.address("127.0.0.1"))
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
        self.direct.allow(self.addresses.values())
        if self.driver is not None:
            self.driver.know(self.addresses)

    def _run(self, roster: tuple[str, ...]) -> None:
        """A founder begins with zeros, a newcomer with what its own disk or the others have."""
        count, setting = self.setting.count, self.setting
        fragments = Fragments.whole(count)
        run = Run(GENESIS, hashlib.sha256(GENESIS).hexdigest(), fragments, apply_record)
        store, own = self._open_store(run)
        if own is not None:
            state, vectors = own.state, own.vectors
        elif self.name in roster:
            state = genesis_state(roster, setting.limit)
            vectors = {"parameters": torch.zeros(count), "momentum": torch.zeros(count)}
        else:
            state, vectors = self._fetch(count)
        if isinstance(store, DiskStore):
            store.begin(run.genesis_digest, state.head.digest, state.head.round, known=own is not None)
        options = Options(
            decider(setting.codec), silence_s=setting.silence_s, partition=setting.partition, want=2 * setting.samples
        )
        incarnation, memory = time.time_ns() // 1000, own.memory if own is not None else None
        node = Node(self.name, state, options, now=time.monotonic(), incarnation=incarnation, memory=memory)
        network = Network(self.plain, PooledTransport(self.plain), b"", lambda peer, greeting: None)
        driver = Watched(node, run, vectors, network, self, store)
        self.driver = driver
        driver.know(self.addresses)
        self.tell("started", round=state.head.round)
        self._train(Session(driver, fragments, setting.codec))

    def _open_store(self, run: Run) -> tuple[Store, Restored | None]:
        if not self.setting.folder:
            return Store(), None
        store = DiskStore(Path(self.setting.folder) / self.name, lambda what, text: self.tell(what, text=text))
        return store, restore(store.folder, store.journal, run, store.tell)

    def _fetch(self, count: int) -> tuple[RunState, dict[str, torch.Tensor]]:
        sizes, genesis = {"parameters": count, "momentum": count}, hashlib.sha256(GENESIS).hexdigest()
        while True:
            for address in list(self.addresses.values()):
                with suppress(TransportError):
                    greet(self.plain, address, b"")
            for peer in list(self.addresses):
                started = time.monotonic()
                try:
                    snapshot = fetch_state(self.plain, peer, self.addresses, genesis, sizes)
                except (TransferFailed, TransportError) as error:
                    self.tell("refused", reason=str(error))
                    continue
                seconds, donors = time.monotonic() - started, snapshot.donors
                self.tell("fetched", round=snapshot.state.head.round, donors=donors, seconds=seconds)
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

    def __init__(self, node: Node, run: Run, vectors: Any, network: Network, worker: Worker, store: Store) -> None:
        self.worker = worker
        super().__init__(node, run, vectors, network, self._tell_note, store)

    def _tell_note(self, note: Note) -> None:
        self.worker.tell("note", note=(note.kind, note.peer, note.text))

    def _extend(self, missed: list[tuple[Record, torch.Tensor]], now: float) -> list[Effect]:
        updates = sum(bool(record.proposal.contributions) for record, _ in missed)
        size = sum(len(entry_of(record).header) + len(result) for record, result in missed)
        self.worker.tell("caught up", bytes=size, updates=updates)
        return super()._extend(missed, now)

    def _switch(self, snapshot: Snapshot, now: float) -> list[Effect]:
        self.worker.tell("caught up", bytes=sum(snapshot.donors.values()), updates=None)
        return super()._switch(snapshot, now)

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


def work(name: str, setting: Setting, pipe: Connection) -> None:
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
