"""Runs a `Node` on real transports: one thread takes every input in turn and carries out what the node asks for.

Whatever may block has threads of its own (all-reduces, fetching, sending, applying updates) and posts what came of it.
The trainer's side is in `session.py`.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch import Tensor

from diloco.checkpoint.log.store import Store
from diloco.checkpoint.transfer.donor import Donor
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.messages import (
    Append,
    Begin,
    Cancel,
    CatchUp,
    Effect,
    FetchResult,
    Heartbeat,
    Message,
    Note,
    Reduce,
    Remember,
    Send,
)
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Ballot, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import encode
from diloco.elastic.runtime.applier import Applier, Run, Vectors, Version
from diloco.elastic.runtime.fetching import Snapshot, fetch_bytes, fetch_missed, fetch_state, tensor_of
from diloco.elastic.runtime.mailbox import Mailbox
from diloco.elastic.runtime.reducing import Attempt, Outcome, stall_after
from diloco.errors import (
    CodecError,
    ConfigError,
    DilocoError,
    MessageRefused,
    PlanRefused,
    RecordInvalid,
    TransferFailed,
    TransportError,
)

__all__ = ["Driver", "Network", "Run", "Version", "check"]

TICK_S = 0.05

log = logging.getLogger(__name__)

Input = Callable[[float], list[Effect]]
FETCH_ERRORS = (TransferFailed, TransportError, MessageRefused, CodecError, ValueError)  # also for what a peer wrote


@dataclass(frozen=True)
class Network:
    """`bulk` reuses connections, for all-reduces; `plain` is for everything that goes both ways."""

    plain: Transport
    bulk: Transport
    greeting: bytes
    admit: Callable[[str, bytes], None]


class Driver:
    def __init__(
        self,
        node: Node,
        run: Run,
        vectors: Vectors,
        network: Network,
        tell: Callable[[Note], None],
        store: Store | None = None,
    ) -> None:
        """`store` is where the log is kept; its owner closes it. None: in memory only."""
        self.node, self.run, self.network, self.tell = node, run, network, tell
        self.failure: BaseException | None = None
        self.addresses: dict[str, PeerAddress] = {}
        self.contribution: Callable[[Begin], Tensor] | None = None  # set by the trainer's side
        self.last_outcome: Outcome | None = None  # of an attempt that worked, with others
        self._stalls = 0  # since then
        self._bytes_reduced = 0
        self._attempts: dict[Ballot, Attempt] = {}
        self._inputs: queue.SimpleQueue[Input | None] = queue.SimpleQueue()
        self._ended = self._mending = False
        self.store = store or Store()
        self.applier = Applier(run, node.state, vectors, self.store, self._report_digest)
        self.changed, self.replica, self.log = self.applier.changed, self.applier.replica, self.applier.log
        self.library, self.records = self.applier.library, self.applier.records
        if node.held is not None and (item := self.store.item(node.held.record.payload)) is not None:
            self.applier.hold(node.held.record.payload, tensor_of(item.data))
        self.mailbox = Mailbox(network.plain, self, greeting=network.greeting, admit=network.admit)
        self.donor = Donor(
            network.plain,
            self.library,
            may_read=self.mailbox.admitted.__contains__,
            in_a_hurry=lambda: bool(self._attempts),
        )
        self._threads = [
            threading.Thread(target=self.guarded, args=(work,), name=name, daemon=True)
            for name, work in (("elastic", self._drive), ("apply", self.applier.apply_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def applied(self) -> RunState:
        """What the vectors contain."""
        return self.applier.applied

    @property
    def versions(self) -> list[Version]:
        return self.applier.versions

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

    def amend(self, amendment: Amendment) -> None:
        """Called from any thread."""
        self.post(lambda now: self.node.amend(amendment, now))

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
            if not isinstance(error, ConfigError):  # which says all there is to say
                log.exception("the driver failed")
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _drive(self) -> None:
        next_tick = time.monotonic()
        while True:
            try:
                if next_tick <= time.monotonic():  # also while inputs come faster than they are taken
                    raise queue.Empty
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
            case Remember(memory):
                self.store.remember(encode(memory))
            case Send(to, Heartbeat() as beat):  # promises nothing: a slow disk must not make an island seem dead
                self.mailbox.send(to, beat)
            case Send(to, message):
                self.store.then(partial(self.mailbox.send, to, message))
            case Reduce(begin):
                self._reduce(begin)
            case Cancel(ballot):
                if (attempt := self._attempts.get(ballot)) is not None:
                    attempt.cancel()
            case FetchResult():
                self._spawn(lambda: self._fetch(effect))
            case CatchUp():
                diverged, head = self.node.diverged, self.node.state.head.digest
                self._spawn(lambda: self._catch_up(effect.peer, head, anew=diverged))
            case Append(record):
                self.applier.append(record)
                if not self._mending:  # once: by the first commit, others are there, if any are
                    self._mending = True
                    self._spawn(self._mend)
            case Note():
                self.tell(effect)

    def _spawn(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self.guarded, args=(work,), daemon=True).start()

    # all-reduces

    def _reduce(self, begin: Begin) -> None:
        assert self.contribution is not None
        try:
            count = self.run.fragments.counts[begin.proposal.fragment]
            payload = self.contribution(begin)
            attempt = Attempt(begin, payload, count, self.network.bulk, self.addresses, self._reduced)
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
                self._stalls += outcome.stalled
                return self.node.reduce_failed(
                    begin.ballot, outcome.blamed, outcome.reason, now, refused=outcome.refused
                )
            if len(begin.members) > 1:  # alone, nothing was sent
                self.last_outcome, self._stalls = outcome, 0
            self.applier.hold(outcome.payload, outcome.result)
            return self.node.reduced(begin.ballot, outcome.payload, now)

        self.post(step)

    def _watch_attempts(self) -> None:
        silence_s = self.node.options.silence_s
        for attempt in self._attempts.values():
            attempt.watch(stall_after(silence_s, self.last_outcome, attempt.chunks, self._stalls))

    def _report_digest(self, state: RunState, digest: str) -> None:
        def step(now: float) -> list[Effect]:
            return self.node.report_digest(digest, now) if self.node.state.head == state.head else []

        self.post(step)

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
            self.applier.hold(record.payload, result)
            return self.node.fetched(record, now)

        self.post(step)

    def _catch_up(self, peer: str, head: str, *, anew: bool) -> None:
        """The records that were missed where that is less, else the whole state."""
        donors, sizes = self._donors(peer), dict.fromkeys(self.applier.vector_names, self.run.fragments.count)
        if peer not in donors:  # it was heard before its record came
            self.post(lambda now: self.node.catch_up_failed(peer, now))
            return
        try:
            missed = [] if anew else list(self._missed(peer, donors, head))
            if missed:
                self.post(lambda now: self._extend(missed, now))
                return
            network, genesis = self.network.plain, self.run.genesis_digest
            found = fetch_state(network, peer, donors, genesis, sizes, self.store.begun)
            snapshot = found.of(self.node.state.owner)
            self.post(lambda now: self._switch(snapshot, now))
        except FETCH_ERRORS as error:
            reason = str(error)
            self.tell(Note("behind", self.node.me, f"could not catch up yet: {reason}"))
            self.post(lambda now: self.node.catch_up_failed(peer, now))

    def _missed(
        self, peer: str, donors: Mapping[str, PeerAddress], since: str, **options: Any
    ) -> Iterator[tuple[Record, Tensor]]:
        """Never more than a whole state."""
        at_most = 4 * len(self.applier.vector_names) * self.run.fragments.count
        return fetch_missed(self.network.plain, peer, donors, since, self.run.result_bytes, at_most=at_most, **options)

    def _extend(self, missed: list[tuple[Record, Tensor]], now: float) -> list[Effect]:
        """By records: one after the other, as far as they follow what is here by now."""
        state = self.node.state
        try:
            for record, result in missed:
                if record.proposal.key == state.key:
                    state = state.after(record)
                    self.applier.hold(record.payload, result)
                    self.applier.append(record)
        except RecordInvalid as invalid:
            log.warning("%s was sent records that do not fit: %s", self.node.me, invalid)
        if len(missed) > 1:  # one is nothing: a round went on without this island
            size = sum(len(result) for _, result in missed)
            text = f"rounds {self.node.state.head.round + 1} to {state.head.round} from peers: {size} bytes"
            self.tell(Note("caught up", self.node.me, text))
        return self.node.caught_up(state, now, whole=False)

    def _switch(self, snapshot: Snapshot, now: float) -> list[Effect]:
        head, own = snapshot.state.head, self.node.state.head
        if head > own or (self.node.diverged and head >= own):
            self.applier.switch(snapshot)
            size = sum(snapshot.donors.values())
            text = f"the whole state of round {head.round} from peers: {size} bytes"
            self.tell(Note("caught up", self.node.me, text))
        return self.node.caught_up(snapshot.state, now)

    def _mend(self) -> None:
        """Records of long ago that are damaged here: others may have them."""
        asked = ""
        while (since := self.store.broken_after()) not in (None, asked):
            asked = since or ""
            for peer in (donors := self._donors("")):
                try:
                    for record, result in self._missed(peer, donors, asked, known=self.store.knows):
                        self.applier.mend(record, result)
                except FETCH_ERRORS as error:
                    log.warning("%s could not mend its log from %s: %s", self.node.me, peer, error)
                if self.store.broken_after() != asked:
                    break
        if asked:
            self.tell(Note("mended" if since is None else "not mended", self.node.me, "its log, from peers"))

    # the end

    def pause(self) -> None:
        """At once, and without a word to anybody. Also called by a signal's handler."""
        self.post(self.node.pause)

    def leave(self, timeout_s: float = 2.0) -> None:
        """Wait until the others have what this island has, say goodbye, and wait until that has gone out."""
        self._linger(2 * self.node.options.silence_s)
        said = threading.Event()

        def after_that(now: float) -> list[Effect]:
            self.store.then(said.set)
            return []

        self.post(self.node.leave)
        self.post(after_that)
        said.wait(timeout_s)
        self.mailbox.flush(timeout_s)

    def _linger(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.failure is None and not self.node.leaving:  # paused: it hears nobody
            views = self.node.peers.views
            alive = self.node.alive(time.monotonic())
            if all((head := views[peer].head) is not None and head >= self.node.state.head for peer in alive):
                return
            time.sleep(TICK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        for attempt in list(self._attempts.values()):
            attempt.cancel()
        self._inputs.put(None)
        self.applier.stop()
        for thread in self._threads:
            thread.join(5)
        self.mailbox.close()
        self.donor.close()


def check(driver: Driver) -> None:
    if isinstance(driver.failure, ConfigError):  # the run's settings do not work here
        raise driver.failure
    if driver.failure is not None:
        raise DilocoError(f"the network side of this island failed: {driver.failure!r}") from driver.failure
