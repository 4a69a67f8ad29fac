"""A process that is an island without a model, and does what its parent (`crew.py`) tells it over a pipe."""

import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.bench.bare import DIGEST, VECTORS, BareIsland, Setting
from diloco.bench.peers import Line
from diloco.bench.processes import Failed
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.comm.codec.registry import warm_up
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.transport import PeerAddress
from diloco.elastic.protocol.messages import Append, Collect, Commit, Effect, Note, Reduce, Send
from diloco.elastic.protocol.record import Record
from diloco.elastic.runtime.driver import Driver, among_friends
from diloco.elastic.runtime.fetching import Snapshot, entry_of, fetch_state
from diloco.elastic.runtime.mailbox import greet
from diloco.elastic.runtime.restoring import Origin, restore
from diloco.errors import TransferFailed, TransportError

PHASES = ("collect", "reduce", "commit")


@dataclass(frozen=True)
class Event:
    at: float  # CLOCK_MONOTONIC, the same for all processes of a machine
    island: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


class Worker:
    def __init__(self, name: str, setting: Setting, pipe: Connection) -> None:
        self.name, self.setting, self.pipe = name, setting, pipe
        self.direct = DirectTransport(name, "127.0.0.1")
        self.plain = Line(setting.bits_per_s).shape(self.direct)
        self.addresses: dict[str, PeerAddress] = {}
        self.island: BareIsland | None = None
        self.die_at = ""
        self._lock = threading.Lock()

    def tell(self, kind: str, **data: Any) -> None:
        with self._lock:
            self.pipe.send(Event(time.monotonic(), self.name, kind, data))

    def obey(self, command: str, argument: Any) -> None:
        match command:
            case "know":
                self._know(argument)
            case "start":
                threading.Thread(target=self._live_guarded, args=(argument,), daemon=True).start()
            case "die":
                self.die_at = argument
            case "report":
                assert self.island is not None
                self.tell("report", **self.island.report())
            case "stop":
                assert self.island is not None
                self.island.stopping.set()

    def _know(self, addresses: dict[str, PeerAddress]) -> None:
        self.addresses = {peer: address for peer, address in addresses.items() if peer != self.name}
        self.direct.allow(self.addresses.values())
        if self.island is not None:
            self.island.driver.know(self.addresses)

    def _live_guarded(self, roster: tuple[str, ...]) -> None:
        try:
            self._live(roster)
        except BaseException:  # noqa: BLE001 -- a thread's outermost frame; the parent raises it
            with self._lock:
                self.pipe.send(Failed(traceback.format_exc()))

    def _live(self, roster: tuple[str, ...]) -> None:
        """Begin with what this island's own disk has, or, if it has none, as a founder with zeros, else with what the
        others have."""
        store, origin = self._open_store()
        known = origin is not None
        if origin is None:
            origin = self.setting.beginning(roster) if self.name in roster else self._fetch()
        head = origin.state.head
        if store is not None:
            store.begin(DIGEST, head.digest, head.round, known=known)
        self.island = BareIsland(
            self.setting, origin, among_friends(self.plain), incarnation=time.time_ns() // 1000, store=store,
            tell=self._tell_note, driver=partial(Watched, self),
        )  # fmt: skip
        self.island.driver.know(self.addresses)
        self.island.train()

    def _tell_note(self, note: Note) -> None:
        self.tell("note", note=(note.kind, note.peer, note.text))

    def _open_store(self) -> tuple[DiskStore | None, Origin | None]:
        if not self.setting.folder:
            return None, None
        store = DiskStore(Path(self.setting.folder) / self.name, lambda what, text: self.tell(what, text=text))
        return store, restore(store.folder, store.journal, self.setting.run, store.tell)

    def _fetch(self) -> Origin:
        sizes = dict.fromkeys(VECTORS, self.setting.count)
        while True:
            for address in list(self.addresses.values()):
                with suppress(TransportError):
                    greet(self.plain, address, b"")
            for peer in list(self.addresses):
                started = time.monotonic()
                try:
                    snapshot = fetch_state(self.plain, peer, self.addresses, DIGEST, sizes)
                except (TransferFailed, TransportError) as error:
                    self.tell("refused", reason=str(error))
                    continue
                seconds, number = time.monotonic() - started, snapshot.state.head.round
                self.tell("fetched", round=number, donors=snapshot.donors, seconds=seconds)
                return Origin(snapshot.state, snapshot.vectors)
            time.sleep(0.05)


class Watched(Driver):
    """A driver that tells the parent what it does, and dies where it is told to."""

    def __init__(self, worker: Worker, *parts: Any) -> None:
        self.worker = worker
        super().__init__(*parts)

    def _extend(self, missed: list[tuple[Record, Tensor]], now: float) -> list[Effect]:
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


def serve(pipe: Connection, name: str, setting: Setting) -> None:
    """Do what the parent says, one command after the other, for as long as it lives."""
    warm_up()
    worker = Worker(name, setting, pipe)
    worker.tell("hello", address=worker.direct.address("127.0.0.1"))
    while True:
        worker.obey(*pipe.recv())
