"""What an island keeps of its run: the log, the vectors that follow from it, and results that are not committed yet.

Records are appended in order by the driver's thread and applied by a thread of the applier's own, which also pins the
versions that snapshots are written from. What peers may ask for is served from here.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.checkpoint.log.history import RoundHeader
from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.log.library import Item, Library, OuterLog, payload_name
from diloco.checkpoint.log.pinned import PinnedState
from diloco.checkpoint.log.replica import Replica
from diloco.checkpoint.log.segments import Ahead
from diloco.checkpoint.log.snapshot import SnapshotContents
from diloco.checkpoint.log.store import Store
from diloco.checkpoint.log.writing import make_way
from diloco.comm.codec.registry import codec_named
from diloco.comm.codec.rooms import CPU
from diloco.comm.codec.streams import beside_training, lock_pages
from diloco.elastic.protocol.ranges import Ranges
from diloco.elastic.protocol.record import EMPTY, LoggedRecord, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode, encode, to_plain
from diloco.elastic.runtime.fetching import FetchedState, StateManifest, entry_of
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.headers import header_of

KEEP_RECORDS = 1000  # for those who tell people what happened
LAST_RECORDS = 100  # that an island has in mind again when it comes back: the last round with contributions is there
DIGEST_EVERY = 10  # rounds between two digests of all vectors

log = logging.getLogger(__name__)
Vectors = Mapping[str, Tensor]
DigestReport = Callable[[RunState, str], None]


@dataclass(frozen=True)
class RunContext:
    """Hold what an island needs to know of its run besides its own identity."""

    genesis: bytes
    genesis_digest: str
    fragments: Fragments
    apply: Callable[[Vectors, Record, Tensor, Fragments], None]  # a committed update, into the outer state's vectors
    snapshot_every: int = 0  # updates; 0: only where there is no other way
    device: torch.device = CPU  # on which results are decoded and applied, and contributions added up

    def result_bytes(self, record: Record) -> int:
        """Return the size of a record's encoded result in bytes; 0 if it has no contributions."""
        proposal = record.proposal
        if not proposal.contributions:
            return 0
        return codec_named(proposal.settings.result_codec).size(self.fragments.counts[proposal.fragment])

    def wants_snapshot_of(self, state: RunState, record: Record) -> bool:
        """Return whether a snapshot is due here: at the same rounds on all islands with the same settings."""
        due = self.snapshot_every and state.updates % self.snapshot_every == 0
        return bool(due and record.proposal.contributions)


@dataclass(frozen=True)
class SnapshotMeta:
    """Hold what a snapshot has besides vectors: with it, whoever has the bytes of later records can replay them."""

    genesis: str
    state: RunState
    fragments: tuple[Ranges, ...]


class Applier:
    """Append committed records, apply them to the vectors, and serve both to peers."""

    def __init__(
        self, run: RunContext, state: RunState, vectors: Vectors, store: Store, report_digest: DigestReport
    ) -> None:
        """Start from a state; `report_digest` gets the vectors' digest every ten rounds, on a thread of its own."""
        self.run, self.store, self._report_digest = run, store, report_digest
        self.changed = threading.Condition()
        self.applied = state  # what the vectors contain
        self.applied_at: dict[int, float] = {}  # by the clock on the wall, each of the last rounds
        known = store.entries()
        last = (decode(LoggedRecord, entry.header).record for entry in known[-LAST_RECORDS:])
        self.records: deque[Record] = deque(last, maxlen=KEEP_RECORDS)
        self.headers: deque[RoundHeader] = deque(maxlen=KEEP_RECORDS)
        self.library = Library(self._make_item)
        self.library.put("genesis", run.genesis)
        self.library.put("fragments", encode(run.fragments.ranges))  # for a witness, which builds no model
        self.log = OuterLog(self.library, lambda payload: payload == EMPTY or store.has(payload))
        self.log.replace(known)
        self._complete_history(known, state)
        self.vector_names = tuple(sorted(vectors))
        for vector in vectors.values():
            lock_pages(vector, run.device)
        self.replica = Replica(vectors, self.library, state.head.digest, self._meta(state), folder=store.readable)
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)  # vectors that lie there are read beside training from now on
        self._logged = state
        self.still_held: Callable[[], Iterable[str]] = tuple  # payloads that the node has promised to hold
        self._results: dict[str, Tensor] = {EMPTY: torch.empty(0, dtype=torch.uint8)}
        self._to_apply: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._to_digest: queue.SimpleQueue[tuple[RunState, PinnedState] | None] = queue.SimpleQueue()
        if store.wants_snapshot:
            self._take_snapshot(state)

    # called by the driver's thread

    def hold(self, payload: str, result: Tensor, ahead: Ahead | None = None) -> None:
        """Store a result before *done* is sent, since whoever takes over as coordinator may ask for it. `ahead`: what
        of it was written as it came."""
        self._results[payload] = result
        if payload != EMPTY:
            view = memoryview(result.numpy())  # type: ignore[arg-type]
            self.library.put(payload_name(payload), view)
            self.store.put(payload, view, ahead)

    def append(self, logged: LoggedRecord) -> RunState:
        """Append a committed record to the log, and queue it to be applied; return the state after it.

        Its result must be held by now.
        """
        record, before = logged.record, self._logged
        state = self._logged = before.after(record)
        payload = self._results[record.payload]
        self._forget_results()
        entry = entry_of(logged)
        self.store.append(entry, rotate=self.run.wants_snapshot_of(state, record))
        header = header_of(logged, before.roster, state.head.tokens, self.run.result_bytes(record))
        self.headers.append(header)
        self.store.keep_headers([header])
        self.log.append(entry)
        self.records.append(record)
        self._to_apply.put(lambda: self._apply(record, payload, state))
        return state

    def _complete_history(self, known: Sequence[Entry], state: RunState) -> None:
        """Add headers of records that the log still has and the history lacks: a crash came between the two.

        The last ones are kept in mind.
        """
        whole = not any(self.store.lacks_header(entry.digest) for entry in known)
        records = [decode(LoggedRecord, entry.header) for entry in (known[-LAST_RECORDS:] if whole else known)]
        lacking = [self.store.lacks_header(each.record.digest) for each in records]
        total, roster = state.head.tokens - sum(each.record.proposal.tokens for each in records), tuple[str, ...]()
        for place, logged in enumerate(records):
            proposal = logged.record.proposal
            total += proposal.tokens
            header = header_of(logged, roster, total, self.run.result_bytes(logged.record))
            self.headers.append(header)
            if lacking[place]:  # where later ones are there, a line in the middle was damaged
                self.store.keep_headers([replace(header, added=not all(lacking[place:]))])
            roster = proposal.roster

    def holds(self, payload: str) -> bool:
        """Return whether a result is at hand."""
        return payload in self._results

    def mend(self, logged: LoggedRecord, result: Tensor) -> None:
        """Write a record of long ago that is damaged here, and its result; both are written when this returns.

        Also called on other threads than the driver's.
        """
        if logged.record.payload != EMPTY:
            self.store.put(logged.record.payload, memoryview(result.numpy()))  # type: ignore[arg-type]
        self.store.mend(entry_of(logged))
        done = threading.Event()
        self.store.then(done.set)
        done.wait()

    def switch(self, snapshot: FetchedState) -> None:
        """Replace log and vectors by a fetched state, all at once: nobody sees a state between two branches."""
        state = self._logged = snapshot.state
        self._forget_results()
        self.store.follow(state.head.digest, state.head.round)
        self.log.replace([])
        self.records.clear()
        self.headers.clear()

        def work() -> None:
            with self.replica.reading(), beside_training(self.run.device, after=True):
                self.replica.replace(snapshot.rooms, snapshot.check, state.head.digest, self._meta(state))
                self._announce(state)
            self._take_snapshot(state)

        self._to_apply.put(work)

    def _forget_results(self) -> None:
        keep = {EMPTY, *self.still_held()}
        self._results = {payload: result for payload, result in self._results.items() if payload in keep}

    def stop(self) -> None:
        """End `apply_all` once everything that is queued by now has been applied."""
        self._to_apply.put(None)

    # the thread that applies

    def apply_all(self) -> None:
        """Apply what is queued, in order, until `stop`. This is the body of the applying thread."""
        digesting = threading.Thread(target=self._digest_all, name="digest", daemon=True)
        digesting.start()
        while (work := self._to_apply.get()) is not None:
            work()
            del work  # with what it holds: a fetched state, on disk
        self._to_digest.put(None)
        digesting.join()

    def _digest_all(self) -> None:
        """Work out the digests of versions that are pinned: no update waits for that."""
        make_way()
        while (due := self._to_digest.get()) is not None:
            state, vectors = due
            try:
                digest = vectors.digest()
            except Exception as error:  # noqa: BLE001 -- the disk's, the device's: the next ones may be compared again
                log.warning("the vectors of round %d could not be compared: %s", state.head.round, error)
                continue
            finally:
                vectors.release()
            self.store.record_digest(state.head.digest, digest)
            self._report_digest(state, digest)

    def _apply(self, record: Record, payload: Tensor, state: RunState) -> None:
        def change(vectors: Vectors) -> None:
            if record.proposal.contributions:
                with beside_training(self.run.device, after=True):  # it may still read what changes
                    self.run.apply(vectors, record, payload, self.run.fragments)
            self._announce(state)

        changed = self.run.fragments.ranges[record.proposal.fragment] if record.proposal.contributions else ()
        self.replica.apply(change, state.head.digest, self._meta(state), changed)
        if self.run.wants_snapshot_of(state, record) or self.store.wants_snapshot:
            self._take_snapshot(state)
        if state.head.round % DIGEST_EVERY == 0:
            self._to_digest.put((state, self.replica.pin_now(once=True)))

    def _announce(self, state: RunState) -> None:
        """Publish a state together with its vectors: whoever reads them holds their lock."""
        with self.changed:
            self.applied = state
            self.applied_at[state.head.round] = time.time()
            self.applied_at.pop(state.head.round - KEEP_RECORDS, None)
            self.changed.notify_all()

    def _take_snapshot(self, state: RunState) -> None:
        """Pin the vectors for a snapshot, which the store writes later; called before anything else is applied."""
        if not self.store.keeps:
            return
        kept = SnapshotMeta(self.run.genesis_digest, state, self.run.fragments.ranges)
        head, vectors = state.head, self.replica.pin_now(once=True)
        self.store.snapshot(
            SnapshotContents(head.round, head.digest, (head.tokens, head.round), to_plain(kept), vectors)
        )

    # what peers may ask for, besides what lies in the library

    def _make_item(self, name: str) -> bytes | Item | None:
        kind, _, argument = name.partition("/")
        match kind:
            case "manifest":
                return self.replica.pin()
            case "pin":
                return b"here" if self.replica.pin(argument) else None
            case "state":
                return self.library.held(name) if self.replica.pin(argument.partition("/")[0]) else None
            case "digest":
                return None if (digest := self.replica.pinned_digest(argument)) is None else digest.encode()
            case "payload":
                return self.store.item(argument)
            case "history":
                return self.store.given_history()
            case "after":
                entries = self.log.after(argument)
                return None if entries is None else b"[" + b",".join(entry.header for entry in entries) + b"]"
        return None

    def _meta(self, state: RunState) -> bytes:
        sizes = tuple((name, self.run.fragments.count) for name in self.vector_names)
        return encode(StateManifest(state, sizes, self.run.genesis_digest))
