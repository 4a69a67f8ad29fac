"""Restoring an island from its own disk: a snapshot that is whole, and the log replayed from there.

Of several snapshots the one counts whose log leads furthest; one that is damaged is set aside, and an older one, with
more of the log, gives the same state.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from diloco.checkpoint.log.journal import Entry, Journal
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.snapshot import Manifest, manifests, read_manifest, read_vectors, set_aside, snapshots
from diloco.elastic.protocol.messages import Memory
from diloco.elastic.protocol.record import EMPTY, Head, Latch, LoggedRecord, Record, quorum
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode, from_plain
from diloco.elastic.runtime.applier import RunContext, SnapshotMeta, Vectors
from diloco.elastic.runtime.fetching import tensor_of
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import MessageRefused, RecordInvalid, SaveError, SnapshotDamaged

Report = Callable[[str, str], None]


@dataclass(frozen=True)
class Origin:
    """Hold where an island begins: the agreed state at that point, the vectors, and an earlier life's promises."""

    state: RunState
    vectors: dict[str, Tensor]
    memory: Memory | None = None
    lineage: dict[str, bool] = field(default_factory=dict)  # the last records: whether each had a quorum


@dataclass(frozen=True)
class ReplayPoint:
    """Describe a snapshot, and where its log leads.

    `refused` says why it leads no further, although there is another record. `latched`: it leads to the record that the
    owner's latch names, or beyond it with a quorum. `void`: the snapshot itself lies beyond it without one.
    """

    manifest: Manifest
    path: Path
    kept: SnapshotMeta
    records: tuple[Record, ...]
    end: RunState
    refused: str = ""
    latched: bool = False
    void: bool = False

    @property
    def precedence(self) -> tuple[bool, int, Head]:
        """Return by what it is compared with others: who leads to the state that the run goes on from comes last."""
        return not self.void, self.end.rank(latched=self.latched), self.end.head


def restore(
    folder: Path, journal: Journal, run: RunContext, report: Report, device: torch.device | str = "cpu"
) -> Origin | None:
    """Return the furthest state that a folder's snapshots and log lead to, with its vectors on this device.

    None if there is nothing, or nothing that is whole. Damaged snapshots are reported and set aside.
    """
    for path in snapshots(folder):
        with _setting_aside(path, report):
            read_manifest(path)
    points = sorted(points_of(folder, journal), key=_rank)
    for point in reversed(points):
        if point.kept.genesis != run.genesis_digest:
            raise SaveError(f"{folder} holds the log of another run: choose another folder")
        with _setting_aside(point.path, report):
            vectors = read_vectors(point.path, point.manifest, device)
            state = replay(point, vectors, journal, run, report)
            if state is not None:
                return Origin(state, vectors, memory_of(journal, report, state.head.round), lineage_of(point, journal))
            del vectors  # before an older one is read
    return None


def read_back(folder: Path | None, run: RunContext, report: Report) -> Origin | None:
    """Return what a start from a folder would begin with now, while it is written to; None if nothing is kept there."""
    return None if folder is None else restore(folder, Journal.read(folder), run, report)


def _rank(point: "ReplayPoint") -> tuple[tuple[bool, int, Head], Head]:
    """Return how far a snapshot leads."""
    return point.precedence, point.kept.state.head


@contextmanager
def _setting_aside(path: Path, report: Report) -> Iterator[None]:
    try:
        yield
    except SnapshotDamaged as damaged:
        report("damaged", str(damaged))
        set_aside(path)


def points_of(folder: Path, journal: Journal) -> Iterator[ReplayPoint]:
    """Yield each readable snapshot of a folder, with the records of the log that can follow it.

    Records after the latched one that no quorum has stored are in no history: a late write may have brought them back.
    """
    latch = decode(Memory, journal.memory).latch if journal.memory is not None else None
    for manifest, path in manifests(folder):
        kept = kept_in(manifest, path)
        records, state, refused = [], kept.state, ""
        latched, void = _is_latched(state, latch, journal)
        for entry in journal.chain(manifest.version):
            try:
                logged = logged_of(entry)
                record = logged.record
                if latched and not state.is_decided(record.proposal.amendment, logged.stored_by):
                    raise RecordInvalid("no quorum has stored it")
                state = state.after(record)
            except (MessageRefused, RecordInvalid) as error:  # as written by a diloco that had other rules
                refused = f"the record of round {entry.round} ({entry.digest[:12]}) cannot be used: {error}"
                break
            records.append(record)
            latched = latched or (latch is not None and not void and entry.digest == latch.head.digest)
        yield ReplayPoint(manifest, path, kept, tuple(records), state, refused, latched, void)


def newest_end(folder: Path) -> RunState | None:
    """Return the state that a log leads to, without its vectors; None where no snapshot can be read."""
    best = max(points_of(folder, Journal.read(folder)), key=lambda point: point.precedence, default=None)
    return None if best is None else best.end


def _is_latched(state: RunState, latch: Latch | None, journal: Journal) -> tuple[bool, bool]:
    """Return whether a snapshot's state is in the latched history, and whether it is in none.

    Neither is known of one whose log does not reach back to the latched record.
    """
    if state.latch or latch is None:
        return bool(state.latch), False
    if state.head.digest == latch.head.digest:
        return True, False
    leading = journal.leading_to(state.head.digest)
    places = [place for place, entry in enumerate(leading) if entry.digest == latch.head.digest]
    if not places:
        return False, False
    for before, after in pairwise(map(logged_of, leading[places[0] :])):
        if not _is_decided(before.record, after):
            return False, True
    return True, False


def _is_decided(parent: Record, logged: LoggedRecord) -> bool:
    """Return whether a quorum of its parent's roster has stored a record, or the owner's signature stands for it."""
    proposal = logged.record.proposal
    kept = () if proposal.amendment is None else proposal.amendment.kept(proposal.key)
    present = logged.stored_by
    return set(kept) <= set(present) if kept else quorum(parent.proposal.roster, present)


def kept_in(manifest: Manifest, path: Path) -> SnapshotMeta:
    """Return what a snapshot holds besides vectors; raise SaveError if another version of diloco wrote it."""
    try:
        kept: SnapshotMeta = from_plain(SnapshotMeta, manifest.meta)
    except MessageRefused as refused:
        raise SaveError(f"{path}/manifest.json is of another version of diloco ({refused}): use that one") from None
    return kept


def logged_of(entry: Entry) -> LoggedRecord:
    """Decode the record of a log entry, and raise MessageRefused if it is not what its digests say."""
    logged = decode(LoggedRecord, entry.header)
    if logged.record.digest != entry.digest or logged.record.payload != entry.payload:
        raise MessageRefused(f"the record of round {entry.round} is not what its digest says")
    return logged


def lineage_of(point: ReplayPoint, journal: Journal) -> dict[str, bool]:
    """Return whether each of the last records had a quorum of its parent's roster, oldest first."""
    state, lineage = point.kept.state, {point.kept.state.head.digest: True}
    for entry in journal.chain(point.manifest.version):
        logged = logged_of(entry)
        lineage[entry.digest] = state.is_decided(logged.record.proposal.amendment, logged.stored_by)
        if entry.digest == point.end.head.digest:
            break
        state = state.after(logged.record)
    return lineage


def replay(
    point: ReplayPoint, vectors: Vectors, journal: Journal, run: RunContext, report: Report, *, until: int | None = None
) -> RunState | None:
    """Apply the records after a snapshot to its vectors, in place, and return the state that they lead to.

    It stops after round `until`, or where a result's bytes are missing. None if the vectors become other ones than the
    island had at the time.
    """
    state, fragments = point.kept.state, Fragments(point.kept.fragments)
    for record in point.records:
        number = record.proposal.key.round
        payload = journal.payload(record.payload)
        if payload is None or (until is not None and number > until):
            break
        if record.proposal.contributions:
            run.apply(vectors, record, tensor_of(payload), fragments)
        state = state.after(record)
        expected = journal.states.get(state.head.digest)
        if expected is not None and vectors_digest(vectors) != expected:
            report("damaged", f"{point.path.name}: replayed to round {number}, it gives another state than there was")
            return None
    return state


def memory_of(journal: Journal, report: Report, at: int = 0) -> Memory | None:
    """Return the promises and the result that an earlier life of this island held; None if there was none.

    A result whose bytes are lost is left out, with a report if its round is still to be decided where the log leads to
    round `at`: others have it. The log keeps no bytes of rounds long past.
    """
    if journal.memory is None:
        return None
    memory = decode(Memory, journal.memory)
    vows = []
    for vow in memory.vows:
        whole = vow.held is None or vow.held.record.payload == EMPTY or journal.has(vow.held.record.payload)
        if not whole and vow.head.round >= at:  # the disk refused it, or it is damaged
            report("result lost", f"that of round {vow.head.round + 1}, which this island held: others have it")
        vows.append(vow if whole else replace(vow, held=None))
    return replace(memory, vows=tuple(vows))
