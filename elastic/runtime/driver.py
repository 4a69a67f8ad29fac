"""The driver runs a `Node` on real transports: one thread takes every input in turn and carries out the node's effects.

Whatever may block has threads of its own (all-reduces, fetching, sending, applying updates) and posts its outcome. The
trainer's side is in `session.py`.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import Tensor

from diloco import errors
from diloco.checkpoint.log.room import bytes_of, check_of
from diloco.checkpoint.log.store import Store
from diloco.checkpoint.transfer.donor import Donor
from diloco.comm.reduce.pages import PageStore
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.transport import Addresses, PeerAddress, Transport
from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.record import Amendment, Ballot, Head, LoggedRecord, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import encode
from diloco.elastic.runtime.applier import Applier, RunContext, Vectors
from diloco.elastic.runtime.fetching import FetchedState, fetch_bytes, fetch_missed, fetch_state, tensor_of
from diloco.elastic.runtime.headers import take_history
from diloco.elastic.runtime.mailbox import Input, Mailbox, Network
from diloco.elastic.runtime.reducing import Attempt, Outcome, reduction_of, stall_after
from diloco.elastic.runtime.restoring import Origin, read_back

__all__ = ["Driver", "Network", "RunContext", "among_friends", "check", "open_island"]

TICK_S = 0.05
MEND_AFTER_S = (0.0, 1.0, 5.0)  # peers that have just started as well may give nothing at first
EVICTED = "the run's owner has taken this island out (diloco evict): with another folder (--dir) it can join anew"

log = logging.getLogger(__name__)

Report = Callable[[msg.Note], None]
# also for what a peer wrote
FETCH_ERRORS = (errors.TransferFailed, errors.TransportError, errors.MessageRefused, errors.CodecError, ValueError)

TELLING = (errors.ConfigError, errors.Evicted, errors.IdentityError)


class Driver:
    """Run an island's node: feed it messages and time, and carry out the effects that it asks for."""

    def __init__(
        self, node: Node, run: RunContext, vectors: Vectors, network: Network, report: Report, store: Store | None
    ) -> None:
        """Start the threads. `store` is where the log is kept, its owner closes it; None: in memory only."""
        self.node, self.run, self.network, self.report = node, run, network, report
        self.failure: BaseException | None = None
        self.addresses: dict[str, PeerAddress] = {}
        self.contribution: Callable[[msg.Begin], Tensor] | None = None  # set by the trainer's side
        self.last_outcome: Outcome | None = None  # of an attempt that worked, with others
        self._stalls = 0  # since then
        self._bytes_reduced = self._bytes_came = 0
        self._attempts: dict[Ballot, Attempt] = {}
        self.pages = PageStore()  # of attempts at the round that is next
        self._inputs: queue.SimpleQueue[Input | None] = queue.SimpleQueue()
        self._ended = self._mending = False
        self.store = store or Store()
        self.applier = Applier(run, node.state, vectors, self.store, self._report_digest)
        self.changed, self.replica, self.log = self.applier.changed, self.applier.replica, self.applier.log
        self.library, self.records = self.applier.library, self.applier.records
        self._unsaved: dict[str, Head] = {}  # by digest: heads that may not be durable yet
        self._moved_chunks = 0
        self._restore_held()
        self.applier.still_held = self._still_held
        self.store.on_durable = self._durable
        self.mailbox = Mailbox(network, node, self.post)
        self.donor = Donor(network.plain, self.library, in_a_hurry=lambda: bool(self._attempts))
        self._threads = [
            threading.Thread(target=self.guarded, args=(work,), name=name, daemon=True)
            for name, work in (("elastic", self._drive), ("apply", self.applier.apply_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def applied(self) -> RunState:
        """Return the state that the vectors contain; the node may be at a later one already."""
        return self.applier.applied

    def know(self, addresses: Addresses) -> None:
        """Add peers that the directory lists, with their addresses. Called on any thread."""
        others = {peer: address for peer, address in addresses.items() if peer != self.node.me}
        self.addresses = {**self.addresses, **others}
        self.mailbox.know(others)
        self.post(partial(self.node.know, others))

    def keep_only(self, peers: Container[str]) -> None:
        """Speak to nobody but these any more, until `know` brings others. Called on any thread."""
        self.addresses = {peer: address for peer, address in self.addresses.items() if peer in peers}
        self.mailbox.keep_only(peers)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent for rounds so far: all-reduces, failed ones too, and control messages."""
        return self._bytes_reduced + self.mailbox.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Return the bytes received for rounds so far: all-reduces and control messages."""
        return self._bytes_came + self.mailbox.bytes_received

    def post(self, step: Input) -> None:
        """Queue an input for the driver's thread, which calls it with the time. Called on any thread."""
        self._inputs.put(step)

    def amend(self, amendment: Amendment) -> None:
        """Hand a change of settings to the node, which brings it to rounds. Called on any thread."""
        self.post(partial(self.node.amend, amendment))

    @property
    def prolonging(self) -> Amendment | None:
        """Return the owner's next change of settings if the run would not be over with it. Called on any thread."""
        own = self.node.own
        coming = own.next_amendment
        return coming if coming is not None and own.prolongs(coming) else None

    @property
    def is_behind(self) -> bool:
        """Tell whether this island catches up, or knows of a member whose log is longer. Called on any thread."""
        own = self.node.own
        heads = [view.head for view in list(own.peers.views.values()) if view.heard and view.head is not None]
        return own.catching_up is not None or any(head.round > own.state.head.round for head in heads)

    @property
    def hears_all(self) -> bool:
        """Tell whether every other member of the roster has been heard in this life. Called on any thread."""
        own = self.node.own
        views = dict(own.peers.views)
        return all(peer == own.me or (peer in views and views[peer].heard) for peer in own.state.roster)

    # the loop

    def guarded(self, work: Callable[[], None]) -> None:
        """Run the work of a thread and keep its error: whoever waits for the driver gets it."""
        try:
            work()
        except BaseException as error:
            if not isinstance(error, errors.ConfigError):  # which says all there is to say
                log.exception("the driver failed")
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the island with this error: whoever waits for the driver gets it. Called on any thread."""
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

    def _carry_out(self, effect: msg.Effect) -> None:
        match effect:
            case msg.Remember(memory):
                self.store.remember(encode(memory))
                self.store.then(partial(self.post, self.node.remembered))
            case msg.Send(to, msg.Heartbeat() as beat):
                # promises nothing: a slow disk must not make an island seem dead
                self.mailbox.send(to, beat)
            case msg.Send(to, message) if to == self.node.me:
                self.store.then(partial(self.post, partial(self.node.receive, to, message)))
            case msg.Send(to, message):
                self.store.then(partial(self.mailbox.send, to, message))
            case msg.Reduce(begin):
                self._reduce(begin)
            case msg.Cancel(ballot):
                if (attempt := self._attempts.get(ballot)) is not None:
                    attempt.cancel()
            case msg.FetchResult(holder, record):
                self._spawn(partial(self._fetch, holder, record))
            case msg.CatchUp(peer):
                head = self.node.state.head.digest
                self._spawn(partial(self._catch_up, peer, head, anew=self.node.own.diverged))
            case msg.GoBack(digest):  # the latch is on disk before: what is read back heeds it
                self.store.then(partial(self._spawn, partial(self._go_back, digest)))
            case msg.Append(record, stored_by, phases):
                self._append(LoggedRecord(record, stored_by, int(1000 * time.time()), phases))
                if not self._mending:  # once: by the first commit, others are there, if any are
                    self._mending = True
                    self._spawn(self._mend)
            case msg.Moved():
                self.pages.clear()
                self._restore_held()
                if self.node.me in self.node.state.evicted:
                    self.fail(errors.Evicted(EVICTED))
            case msg.Note():
                self.report(effect)

    def _append(self, logged: LoggedRecord) -> None:
        state = self.applier.append(logged)
        self._unsaved[state.head.digest] = state.head
        self.store.await_durable(state.head.digest)

    def _durable(self, version: str) -> None:
        """Inform the node that the folder gives back this head, and so everything before it. Called by the store."""
        if (head := self._unsaved.get(version)) is not None:
            for digest in list(self._unsaved):
                self._unsaved.pop(digest, None)  # the store calls this on two threads
                if digest == version:
                    break
            self.post(partial(self.node.stored, head))

    def _still_held(self) -> list[str]:
        """Return the payloads of all results that the node has stored for this head or another one."""
        own = self.node.own
        held = (own.held, *(vow.held for vow in own.vows.values()))
        return [one.record.payload for one in held if one is not None]

    def _restore_held(self) -> None:
        """Get the result that the node holds from the disk: an earlier life stored it, or it comes round again."""
        if (held := self.node.own.held) is None or self.applier.holds(held.record.payload):
            return
        if (item := self.store.item(held.record.payload)) is None:
            return
        try:
            self.applier.hold(held.record.payload, tensor_of(item.data))
        except OSError as error:  # its file is gone or damaged by now: others have the result
            log.warning("the result of round %d cannot be read again: %s", held.record.proposal.key.round, error)

    def _spawn(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self.guarded, args=(work,), daemon=True).start()

    # all-reduces

    def _reduce(self, begin: msg.Begin) -> None:
        assert self.contribution is not None
        try:
            count = self.run.fragments.counts[begin.proposal.fragment]
            own = self.contribution(begin)
            network, device = self.network.bulk, self.run.device
            reduction = reduction_of(begin, own, count, network, self.addresses, self.pages, device)
        except errors.PlanRefused as refused:
            unknown = [peer for peer in begin.members if peer != self.node.me and peer not in self.addresses]
            blamed = unknown[0] if unknown else begin.ballot.coordinator
            self.post(partial(self.node.reduce_failed, begin.ballot, blamed, str(refused)))
            return
        self._attempts[begin.ballot] = Attempt(begin, reduction, self._reduced, self.store)

    def _reduced(self, begin: msg.Begin, outcome: Outcome) -> None:
        def step(now: float) -> list[msg.Effect]:
            self._attempts.pop(begin.ballot, None)
            self._bytes_reduced += outcome.bytes_sent
            self._bytes_came += outcome.bytes_received
            if outcome.result is None:
                self._stalls += outcome.stalled
                return self.node.reduce_failed(
                    begin.ballot, outcome.blamed, outcome.reason, now, refused=outcome.refused, local=outcome.local,
                    kept=outcome.kept,
                )  # fmt: skip
            if len(begin.members) > 1:  # alone, nothing was sent
                self.last_outcome, self._stalls = replace(outcome, result=None), 0  # its memory serves the next round
            self.applier.hold(outcome.payload, outcome.result, outcome.ahead)
            return self.node.reduced(begin.ballot, outcome.payload, now)

        self.post(step)

    def _watch_attempts(self) -> None:
        silence_s = self.node.own.options.silence_s
        for attempt in self._attempts.values():
            attempt.watch(stall_after(silence_s, self.last_outcome, attempt.chunks, self._stalls))
        moved = sum(attempt.received for attempt in self._attempts.values())
        if moved != self._moved_chunks:
            self._moved_chunks = moved
            self.post(self.node.moved)

    def _report_digest(self, state: RunState, digest: str) -> None:
        def step(now: float) -> list[msg.Effect]:
            return self.node.report_digest(digest, now) if self.node.state.head == state.head else []

        self.post(step)

    # fetching

    def _donors(self, first: str) -> dict[str, PeerAddress]:
        alive = self.node.liveness.alive(time.monotonic())
        order = [first, *sorted(alive - {first})]
        return {peer: self.addresses[peer] for peer in order if peer in self.addresses}

    def _fetch(self, holder: str, record: Record) -> None:
        try:
            size = self.run.result_bytes(record)
            result = fetch_bytes(self.network.plain, {holder: self.addresses[holder]}, record.payload, size)
        except (errors.TransferFailed, errors.TransportError, KeyError, errors.CodecError) as error:
            self.post(partial(self.node.fetch_failed, holder, record, str(error)))
            return

        def step(now: float) -> list[msg.Effect]:
            self.applier.hold(record.payload, result)
            return self.node.fetched(record, now)

        self.post(step)

    def _catch_up(self, peer: str, head: str, *, anew: bool) -> None:
        """Fetch the records that were missed, or the whole state where that is less."""
        donors, sizes = self._donors(peer), dict.fromkeys(self.applier.vector_names, self.run.fragments.count)
        if peer not in donors:  # it was heard before its record came
            self.post(partial(self.node.catch_up_failed, peer))
            return
        try:
            missed = [] if anew else list(self._missed(peer, donors, head))
            if missed:
                self.post(partial(self._extend, missed))
                return
            network, genesis = self.network.plain, self.run.genesis_digest
            found = fetch_state(network, peer, donors, genesis, sizes, self.store.download)
            self.post(partial(self._switch, found.of(self.node.state.owner)))
        except FETCH_ERRORS as error:
            self.note("behind", f"could not catch up yet: {error}")
            self.post(partial(self.node.catch_up_failed, peer))

    def take_history(self, head: str, donors: Iterable[str]) -> None:
        """Fetch the headers that led to a state, in the background, from whoever gave it, else from others."""
        order = dict.fromkeys([*donors, *self.addresses])
        known = {peer: self.addresses[peer] for peer in order if peer in self.addresses}
        work = partial(take_history, self.network.plain, known, head, self.store)
        threading.Thread(target=work, name="history", daemon=True).start()

    def _missed(
        self, peer: str, donors: Addresses, since: str, **options: Any
    ) -> Iterator[tuple[LoggedRecord, Tensor]]:
        """Fetch the records after `since` with their results, unless they are more bytes than a whole state."""
        at_most = 4 * len(self.applier.vector_names) * self.run.fragments.count
        return fetch_missed(self.network.plain, peer, donors, since, self.run.result_bytes, at_most=at_most, **options)

    def _go_back(self, digest: str) -> None:
        """Read this island's own log again, up to where the owner's latch makes records void."""
        origin = read_back(self.store.readable, self.run, self.note)
        if origin is None or origin.state.head.digest != digest:
            self.post(partial(self.node.cannot_go_back, digest))
            return

        def step(now: float) -> list[msg.Effect]:
            if self.node.member.undoing.is_wanted(digest):
                rooms = {name: bytes_of(vector) for name, vector in origin.vectors.items()}
                self._take_over(FetchedState(origin.state, rooms, check_of(rooms), {}))
            return self.node.went_back(origin.state, now)

        self.post(step)

    def note(self, kind: str, text: str) -> None:
        """Report to people what has happened to this island. Called on any thread."""
        self.report(msg.Note(kind, self.node.me, text))

    def _take_over(self, found: FetchedState) -> None:
        head = found.state.head
        self._unsaved[head.digest] = head
        self.applier.switch(found)
        self.store.await_durable(head.digest)

    def _extend(self, missed: list[tuple[LoggedRecord, Tensor]], now: float) -> list[msg.Effect]:
        """Append fetched records one after the other, as far as they follow what this island has by now."""
        state, followed_by = self.node.state, dict[str, bool]()
        try:
            for logged, result in missed:
                record = logged.record
                if record.proposal.key == state.key:
                    decided = state.is_decided(record.proposal.amendment, logged.stored_by)
                    if (state.latch or self.node.own.rank) and not decided:
                        raise errors.RecordInvalid(f"no quorum has stored round {record.proposal.key.round}")
                    state = state.after(record)
                    followed_by[record.digest] = decided
                    self.applier.hold(record.payload, result)
                    self._append(logged)
        except errors.RecordInvalid as invalid:
            log.warning("%s was sent records that do not fit: %s", self.node.me, invalid)
        if len(missed) > 1 and state != self.node.state:  # one is nothing: a round went on without this island
            size = sum(len(result) for _, result in missed)
            text = f"rounds {self.node.state.head.round + 1} to {state.head.round} from peers: {size} bytes"
            self.note("caught up", text)
        return self.node.caught_up(state, now, whole=False, followed_by=followed_by)

    def _switch(self, snapshot: FetchedState, now: float) -> list[msg.Effect]:
        head, own = snapshot.state.head, self.node.state.head
        if self.node.would_move_to(snapshot.state) or (self.node.own.diverged and head >= own):
            self._take_over(snapshot)
            self.take_history(head.digest, snapshot.donors)
            size = sum(snapshot.donors.values())
            text = f"the whole state of round {head.round} from peers: {size} bytes"
            self.note("caught up", text)
        return self.node.caught_up(snapshot.state, now)

    def _mend(self) -> None:
        """Fetch records of long ago that are damaged here: other islands may have them, if not all at once."""
        if self.store.broken_after() is None:
            return
        for pause_s in MEND_AFTER_S:
            time.sleep(pause_s)
            asked = ""
            while (since := self.store.broken_after()) not in (None, asked) and not self._ended:
                asked = since or ""
                self._mend_after(asked)
            if since is None or self._ended:
                break
        self.note("mended" if since is None else "not mended", "its log, from peers")

    def _mend_after(self, since: str) -> None:
        """Fetch the records after a damaged one from the first peer that has them."""
        for peer in (donors := self._donors("")):
            try:
                for logged, result in self._missed(peer, donors, since, known=self.store.knows):
                    self.applier.mend(logged, result)
            except FETCH_ERRORS as error:
                log.warning("%s could not mend its log from %s: %s", self.node.me, peer, error)
            if self.store.broken_after() != since:
                break

    # the end

    def pause(self) -> None:
        """Stop taking part at once, without a message to anybody. Also called by a signal handler."""
        self.post(self.node.pause)

    def leave(self, timeout_s: float = 2.0) -> None:
        """Wait until the others have what this island has, say goodbye, and wait until that has been sent."""
        self._linger(2 * self.node.own.options.silence_s)
        said = threading.Event()

        def after_that(now: float) -> list[msg.Effect]:
            self.store.then(said.set)
            return []

        self.post(self.node.leave)
        self.post(after_that)
        said.wait(timeout_s)
        self.mailbox.flush(timeout_s)

    def _linger(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        views, own = self.node.peers.views, self.node.own
        while time.monotonic() < deadline and self.failure is None and not own.leaving:  # paused: it hears nobody
            alive = self.node.liveness.alive(time.monotonic())
            if all((head := views[peer].head) is not None and head >= own.state.head for peer in alive):
                return
            time.sleep(TICK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all-reduces and end the threads. The store stays open for its owner to close."""
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
    """Raise the error that ended one of the driver's threads, if one has ended so."""
    if isinstance(driver.failure, TELLING):  # they say all there is to say
        raise driver.failure
    if driver.failure is not None:
        raise errors.DilocoError(f"the network side of this island failed: {driver.failure!r}") from driver.failure


def ignore(_: object) -> None:
    """Do nothing with the argument: the default for callbacks that nobody has set."""


def open_island(
    run: RunContext,
    origin: Origin,
    options: Options,
    network: Network,
    *,
    incarnation: int = 1,
    store: Store | None = None,
    report: Report = ignore,
    prepare: Callable[[Node], None] = ignore,
    driver: Callable[..., Driver] = Driver,
) -> Driver:
    """Start an island and return its driver, which a `with` statement closes.

    `report` gets what people should know; `prepare` may change the node before it takes part in anything.
    """
    now, me = time.monotonic(), network.plain.identity
    node = Node(
        me, origin.state, options, now=now, incarnation=incarnation, memory=origin.memory, lineage=origin.lineage
    )
    prepare(node)
    return driver(node, run, origin.vectors, network, report, store)


def among_friends(transport: Transport) -> Network:
    """Return a network whose islands let everybody in who can reach them."""
    return Network(transport, PooledTransport(transport))
