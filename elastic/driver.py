"""Runs a `Node` on real transports: one thread takes every input in turn and carries out what the node asks for.

Whatever may block has threads of its own (all-reduces, fetching, sending, applying updates) and posts what came of it.
The trainer's side is in `session.py`.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.checkpoint.donor import Donor
from diloco.checkpoint.library import Library
from diloco.checkpoint.log import OuterLog, payload_name
from diloco.checkpoint.replica import Replica, vector_name, vectors_digest
from diloco.comm.codec import codec_named
from diloco.comm.transport import PeerAddress, Transport
from diloco.elastic.fetching import (
    Manifest,
    Missed,
    Snapshot,
    entry_of,
    fetch_bytes,
    fetch_missed,
    fetch_state,
)
from diloco.elastic.fragments import Fragments
from diloco.elastic.mailbox import Mailbox
from diloco.elastic.messages import (
    Append,
    Begin,
    Cancel,
    CatchUp,
    Effect,
    FetchResult,
    Message,
    Note,
    Reduce,
    Send,
)
from diloco.elastic.node import Node
from diloco.elastic.record import EMPTY, Ballot, Record
from diloco.elastic.reducing import Attempt, Outcome, stall_after
from diloco.elastic.state import RunState
from diloco.elastic.wire import encode
from diloco.errors import (
    CodecError,
    DilocoError,
    MessageRefused,
    PlanRefused,
    RecordInvalid,
    TransferFailed,
    TransportError,
)

TICK_S = 0.02
KEEP_RECORDS = 1000  # for those who tell people what happened
DIGEST_EVERY = 10  # rounds between two digests of all vectors

log = logging.getLogger(__name__)

Input = Callable[[float], list[Effect]]
Vectors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Run:
    """What an island needs to know of its run besides who it is."""

    genesis: bytes
    genesis_digest: str
    fragments: Fragments
    apply: Callable[[Vectors, Record, Tensor, Fragments], None]  # a committed update, into the outer state's vectors

    def result_bytes(self, record: Record) -> int:
        proposal = record.proposal
        if not proposal.contributions:
            return 0
        return codec_named(proposal.settings.result_codec).size(self.fragments.counts[proposal.fragment])


class Version(NamedTuple):
    """The last update of a fragment."""

    digest: str
    step: int  # the run's clock after it


@dataclass(frozen=True)
class Network:
    """`bulk` reuses connections, for all-reduces; `plain` is for everything that goes both ways."""

    plain: Transport
    bulk: Transport
    greeting: bytes
    admit: Callable[[str, bytes], None]


class Driver:
    def __init__(self, node: Node, run: Run, vectors: Vectors, network: Network, tell: Callable[[Note], None]) -> None:
        self.node, self.run, self.network, self.tell = node, run, network, tell
        self.failure: BaseException | None = None
        self.addresses: dict[str, PeerAddress] = {}
        self.applied = node.state  # what the vectors contain
        self.versions = [Version(node.state.head.digest, node.state.step)] * len(run.fragments)
        self.changed = threading.Condition()
        self.contribution: Callable[[Begin], Tensor] | None = None  # set by the trainer's side
        self.last_outcome: Outcome | None = None
        self.records: deque[Record] = deque(maxlen=KEEP_RECORDS)
        self._bytes_reduced = 0
        self.library = Library(self._make_item)
        self.library.put("genesis", run.genesis)
        self.log = OuterLog(self.library)
        self._vector_names = tuple(sorted(vectors))
        self.replica = Replica(vectors, self.library, node.state.head.digest, self._meta(node.state))
        self._logged = node.state
        self._results: dict[str, Tensor] = {EMPTY: torch.empty(0, dtype=torch.uint8)}
        self._attempts: dict[Ballot, Attempt] = {}
        self._inputs: queue.SimpleQueue[Input | None] = queue.SimpleQueue()
        self._to_apply: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = False
        self.mailbox = Mailbox(network.plain, self, greeting=network.greeting, admit=network.admit)
        self.donor = Donor(network.plain, self.library, may_read=self.mailbox.admitted.__contains__)
        self._threads = [
            threading.Thread(target=self.guarded, args=(work,), name=name, daemon=True)
            for name, work in (("elastic", self._drive), ("apply", self._apply_all))
        ]
        for thread in self._threads:
            thread.start()

    def know(self, addresses: Mapping[str, PeerAddress]) -> None:
        """Peers that the directory lists. Called from any thread."""
        others = {peer: address for peer, address in addresses.items() if peer != self.node.me}
        self.addresses = {**self.addresses, **others}
        self.mailbox.know(others)
        self.post(lambda now: self.node.know(others, now))

    @property
    def bytes_sent(self) -> int:
        """For rounds: all-reduces, failed ones too, and control messages."""
        return self._bytes_reduced + self.mailbox.bytes_sent

    def post(self, step: Input) -> None:
        self._inputs.put(step)

    # what the mailbox hears

    def heard(self, peer: str, message: Message) -> None:
        self.post(lambda now: self.node.receive(peer, message, now))

    def gone(self, peer: str) -> None:
        self.post(lambda now: self.node.closed(peer, now))

    def refuse(self, peer: str, reason: str) -> None:
        self.post(lambda now: self.node.ban(peer, reason, now))

    # the loop

    def guarded(self, work: Callable[[], None]) -> None:
        """A thread that dies is noticed: whoever waits for it gets its error."""
        try:
            work()
        except BaseException as error:
            log.exception("the driver failed")
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _drive(self) -> None:
        next_tick = time.monotonic()
        while True:
            try:
                step = self._inputs.get(timeout=max(0.0, next_tick - time.monotonic()))
            except queue.Empty:
                next_tick = time.monotonic() + TICK_S
                self._watch_attempts()
                step = self.node.tick
            if step is None:
                return
            for effect in step(time.monotonic()):
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self.mailbox.send(to, message)
            case Reduce(begin):
                self._reduce(begin)
            case Cancel(ballot):
                if (attempt := self._attempts.get(ballot)) is not None:
                    attempt.cancel()
            case FetchResult():
                self._spawn(lambda: self._fetch(effect))
            case CatchUp():
                doubtful, head = self.node.doubtful, self.node.state.head.digest
                self._spawn(lambda: self._catch_up(effect.peer, head, anew=doubtful))
            case Append(record):
                self._append(record)
            case Note():
                self.tell(effect)

    def _spawn(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self.guarded, args=(work,), daemon=True).start()

    # all-reduces

    def _reduce(self, begin: Begin) -> None:
        assert self.contribution is not None
        try:
            attempt = Attempt(
                begin,
                self.contribution(begin),
                self.run.fragments.counts[begin.proposal.fragment],
                self.network.bulk,
                self.addresses,
                self._reduced,
            )
        except PlanRefused as refused:
            reason = str(refused)
            unknown = [peer for peer in begin.members if peer != self.node.me and peer not in self.addresses]
            blamed = unknown[0] if unknown else begin.ballot.coordinator
            self.post(lambda now: self.node.reduce_failed(begin.ballot, blamed, reason, now))
            return
        self._attempts[begin.ballot] = attempt

    def _reduced(self, begin: Begin, outcome: Outcome) -> None:
        def step(now: float) -> list[Effect]:
            self._attempts.pop(begin.ballot, None)
            self._bytes_reduced += outcome.bytes_sent
            if outcome.result is None:
                return self.node.reduce_failed(
                    begin.ballot, outcome.blamed, outcome.reason, now, refused=outcome.refused
                )
            self.last_outcome = outcome
            self._store(outcome.payload, outcome.result)
            return self.node.reduced(begin.ballot, outcome.payload, now)

        self.post(step)

    def _store(self, payload: str, result: Tensor) -> None:
        """Before *done* is said: whoever takes over may ask for it."""
        self._results[payload] = result
        self.library.put(payload_name(payload), memoryview(result.numpy()))  # type: ignore[arg-type]

    def _watch_attempts(self) -> None:
        for attempt in self._attempts.values():
            plan = attempt.reduction.plan
            chunks = max(len(plan.chunks(i)) for i in range(len(plan.members)))
            attempt.watch(stall_after(self.node.options.silence_s, self.last_outcome, chunks))

    # the log and the vectors

    def _append(self, record: Record) -> None:
        state = self._logged = self._logged.after(record)
        payload = self._results[record.payload]
        self._results = {EMPTY: self._results[EMPTY]}
        self.log.append(entry_of(record))
        self.records.append(record)
        self._to_apply.put(lambda: self._apply(record, payload, state))

    def _apply(self, record: Record, payload: Tensor, state: RunState) -> None:
        def change(vectors: Vectors) -> None:
            if record.proposal.contributions:
                self.run.apply(vectors, record, payload, self.run.fragments)
                self._announce(state, [record.proposal.fragment])
            else:
                self._announce(state, [])

        self.replica.apply(change, state.head.digest, self._meta(state))
        if state.head.round % DIGEST_EVERY == 0:
            self._vouch(state)

    def _announce(self, state: RunState, fragments: Iterable[int]) -> None:
        """Together with the vectors: whoever reads them holds their lock."""
        with self.changed:
            self.applied = state
            for fragment in fragments:
                self.versions[fragment] = Version(state.head.digest, state.step)
            self.changed.notify_all()

    def _vouch(self, state: RunState) -> None:
        digest = self.replica.digest()

        def step(now: float) -> list[Effect]:
            return self.node.vouch(digest, now) if self.node.state.head == state.head else []

        self.post(step)

    def _apply_all(self) -> None:
        while (work := self._to_apply.get()) is not None:
            work()

    def _meta(self, state: RunState) -> bytes:
        sizes = tuple((name, self.run.fragments.count) for name in self._vector_names)
        return encode(Manifest(state, sizes, self.run.genesis_digest))

    # fetching

    def _donors(self, first: str) -> dict[str, PeerAddress]:
        alive = self.node.alive(time.monotonic())
        order = [first, *sorted(alive - {first})]
        return {peer: self.addresses[peer] for peer in order if peer in self.addresses}

    def _fetch(self, effect: FetchResult) -> None:
        record, holder = effect.record, effect.holder
        try:
            size = self.run.result_bytes(record)
            result = fetch_bytes(self.network.plain, {holder: self.addresses[holder]}, record.payload, size)
        except (TransferFailed, TransportError, KeyError, CodecError) as error:
            reason = str(error)
            self.post(lambda now: self.node.fetch_failed(holder, record, reason, now))
            return

        def step(now: float) -> list[Effect]:
            self._store(record.payload, result)
            return self.node.fetched(record, now)

        self.post(step)

    def _catch_up(self, peer: str, head: str, *, anew: bool) -> None:
        """The records that were missed where possible, else the whole state."""
        transport, donors = self.network.plain, self._donors(peer)
        try:
            if peer not in donors:
                raise TransferFailed(f"{peer} has no address")
            missed = None if anew else fetch_missed(transport, peer, donors, head, self.run.result_bytes)
            if missed is not None and missed.records:
                self.post(lambda now: self._extend(missed, now))
                return
            sizes = dict.fromkeys(self._vector_names, self.run.fragments.count)
            snapshot = fetch_state(transport, peer, donors, self.run.genesis_digest, sizes)
            self.post(lambda now: self._switch(snapshot, now))
        except (TransferFailed, TransportError, MessageRefused, CodecError, ValueError) as error:  # what a peer wrote
            reason = str(error)
            self.tell(Note("behind", peer, f"could not catch up: {reason}"))
            self.post(lambda now: self.node.catch_up_failed(peer, now))

    def _extend(self, missed: Missed, now: float) -> list[Effect]:
        """By records: one after the other, as far as they follow what is here by now."""
        state = self.node.state
        try:
            for record, result in missed.records:
                if record.proposal.key == state.key:
                    state = state.after(record)
                    self._store(record.payload, result)
                    self._append(record)
        except RecordInvalid as invalid:
            log.warning("%s was sent records that do not fit: %s", self.node.me, invalid)
        return self.node.caught_up(state, now, whole=False)

    def _switch(self, snapshot: Snapshot, now: float) -> list[Effect]:
        """All at once: nobody ever sees a state between two branches."""
        state = snapshot.state
        better = state.head > self.node.state.head or (self.node.doubtful and state.head >= self.node.state.head)
        if better:
            self._logged = state
            self._results = {EMPTY: self._results[EMPTY]}
            self.log.replace([])
            self.records.clear()

            def work() -> None:
                with self.replica.reading():
                    self.replica.replace(snapshot.vectors, state.head.digest, self._meta(state))
                    self._announce(state, range(len(self.run.fragments)))

            self._to_apply.put(work)
        return self.node.caught_up(state, now)

    def _make_item(self, name: str) -> bytes | None:
        """What peers may ask for besides what lies in the library."""
        kind, _, argument = name.partition("/")
        match kind:
            case "manifest":
                return self.replica.pin()
            case "pin":
                return b"here" if self.replica.pin(argument) else None
            case "digest":
                return self._pinned_digest(argument)
            case "after":
                entries = self.log.after(argument)
                return None if entries is None else b"[" + b",".join(entry.header for entry in entries) + b"]"
        return None

    def _pinned_digest(self, version: str) -> bytes | None:
        items = {name: self.library.get(vector_name(version, name)) for name in self._vector_names}
        vectors = {
            name: torch.frombuffer(bytearray(item.data), dtype=torch.float32)
            for name, item in items.items()
            if item is not None
        }
        return vectors_digest(vectors).encode() if len(vectors) == len(items) else None

    # the end

    def leave(self, timeout_s: float = 2.0) -> None:
        """Wait until the others have what this island has, say goodbye, and wait until that has gone out."""
        self._linger(2 * self.node.options.silence_s)
        said = threading.Event()

        def step(now: float) -> list[Effect]:
            said.set()
            return self.node.leave(now)

        self.post(step)
        said.wait(timeout_s)
        self.mailbox.flush(timeout_s)

    def _linger(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.failure is None:
            views = self.node.peers.views
            alive = self.node.alive(time.monotonic())
            if all((head := views[peer].head) is not None and head >= self.node.state.head for peer in alive):
                return
            time.sleep(TICK_S)

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        for attempt in list(self._attempts.values()):
            attempt.cancel()
        self._inputs.put(None)
        self._to_apply.put(None)
        for thread in self._threads:
            thread.join(5)
        self.mailbox.close()
        self.donor.close()


def check(driver: Driver) -> None:
    if driver.failure is not None:
        raise DilocoError(f"the network side of this island failed: {driver.failure!r}") from driver.failure
