"""What an island's log says of its run: its rounds, whether all of it is whole, and the state of any round it covers.

Nothing is changed here, and the run may be training meanwhile.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diloco.checkpoint.log.history import RoundHeader
from diloco.checkpoint.log.journal import Journal, Trouble
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.segments import segment_paths
from diloco.checkpoint.log.snapshot import manifests, read_manifest, read_vectors, snapshots
from diloco.checkpoint.save.facts import FACTS
from diloco.checkpoint.save.saver import write_outer_save
from diloco.elastic.protocol.messages import Memory
from diloco.elastic.protocol.ranges import Ranges
from diloco.elastic.protocol.record import Head
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode
from diloco.elastic.runtime.applier import RunContext
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.headers import header_of
from diloco.elastic.runtime.restoring import ReplayPoint, kept_in, logged_of, newest_end, points_of, replay
from diloco.errors import SaveError, SnapshotDamaged
from diloco.run.folder import is_taken
from diloco.run.genesis import FILE, Genesis, read_genesis
from diloco.train.outer import apply_record

WRITING_S = 0.5  # what is torn for longer is not being written


def headers(log: Path) -> list[RoundHeader]:
    """List the rounds of the chain that leads to the newest one, oldest first, as far back as the log reaches.

    A log whose folder has a history (`diloco.history.rounds`) need not be read for that.
    """
    journal = Journal.read(log)
    best = max(points_of(log, journal), key=lambda point: point.precedence, default=None)
    logged = [logged_of(entry) for entry in journal.leading_to(best.end.head.digest)] if best is not None else []
    total = 0 if best is None else best.end.head.tokens - sum(each.record.proposal.tokens for each in logged)
    found, roster = list[RoundHeader](), tuple[str, ...]()
    for each in logged:
        proposal, place = each.record.proposal, journal.payloads.get(each.record.payload)
        total += proposal.tokens
        found.append(header_of(each, roster, total, place.length if place is not None else 0))
        roster = proposal.roster
    return found


@dataclass(frozen=True)
class Findings:
    """Hold the result of a verification: what was replayed and compared, and every problem in words."""

    first: int  # the rounds that were replayed
    last: int
    snapshots: int
    digests: int  # of states, that were compared
    problems: tuple[str, ...]


def verify(log: Path) -> Findings:
    """Read every byte of a log, replay everything, and compare every digest there is."""
    journal = _settled(log)
    problems = [str(trouble) for trouble in journal.troubles]
    if read_genesis(log) is None:
        problems.append(f"{FILE} is damaged or missing")
    for path in snapshots(log):
        try:
            manifest = read_manifest(path)
            if vectors_digest(read_vectors(path, manifest)) != manifest.state:
                raise SnapshotDamaged(f"{path} does not hold the state that it says")
            journal.states[manifest.version] = manifest.state  # what the log leads to must be that
        except SnapshotDamaged as damaged:
            problems.append(str(damaged))
    points = sorted(points_of(log, journal), key=lambda point: point.kept.state.head)
    replayed = [found for point in points if (found := _replay_checked(point, journal, problems))]
    problems += sorted({point.refused for point in points if point.refused})
    covered = [number for first, last, _ in replayed for number in (first, last)]
    compared = max((count for *_, count in replayed), default=0)
    return Findings(min(covered, default=0), max(covered, default=0), len(points), compared, tuple(problems))


def _settled(log: Path) -> Journal:
    """Read the journal, twice if its end is torn: a run that is training may be writing just now. The end of its last
    file is torn for as long as a result comes."""
    journal = Journal.read(log)
    if any(trouble.torn is not None for trouble in journal.troubles):
        time.sleep(WRITING_S)
        again, last = Journal.read(log), max(segment_paths(log)) if is_taken(log.parent) else None
        same = {_place(trouble) for trouble in journal.troubles if trouble.torn is None or trouble.path != last}
        again.troubles = [trouble for trouble in again.troubles if _place(trouble) in same]
        return again
    return journal


def _place(trouble: Trouble) -> tuple[Path, int | None, str]:
    return trouble.path, trouble.torn, "" if trouble.torn is not None else trouble.text


def _replay_checked(point: ReplayPoint, journal: Journal, problems: list[str]) -> tuple[int, int, int] | None:
    """Replay from a snapshot; return the first and last round, and how many digests were compared on the way."""
    told: list[str] = []
    try:
        vectors = read_vectors(point.path, point.manifest)
    except SnapshotDamaged:
        return None  # it was named
    state = replay(point, vectors, journal, _run(point), lambda what, text: told.append(text))
    problems += [text for text in told if text not in problems]
    if state is None:
        return None
    on_the_way = {record.digest for record in point.records} & journal.states.keys()
    return point.kept.state.head.round, state.head.round, len(on_the_way)


def _run(point: ReplayPoint) -> RunContext:
    return RunContext(b"", point.kept.genesis, Fragments(point.kept.fragments), apply_record)


def state_of(log: Path, number: int) -> tuple[RunState, dict[str, Tensor]]:
    """Return the state and the vectors after this round, replayed from a snapshot before it. Raise SaveError where the
    log does not lead there."""
    journal = Journal.read(log)
    points = list(points_of(log, journal))
    fitting = [point for point in points if point.kept.state.head.round <= number <= point.end.head.round]
    for point in sorted(fitting, key=lambda point: (point.precedence, point.kept.state.head), reverse=True):
        try:
            vectors = read_vectors(point.path, point.manifest)
        except SnapshotDamaged:
            continue  # an older one leads there too
        state = replay(point, vectors, journal, _run(point), lambda what, text: None, until=number)
        if state is not None and state.head.round == number:
            return state, vectors
    covered = [number for point in points for number in (point.kept.state.head.round, point.end.head.round)]
    known = f"it covers rounds {min(covered)} to {max(covered)}" if covered else "it covers none"
    removed = bool(covered) and number < min(covered)
    why = "earlier ones were removed (checkpoint.keep)" if removed else "diloco log --verify says what is damaged"
    raise SaveError(f"{log} does not lead to round {number}: {known}; {why}")


def newest_state(log: Path) -> RunState:
    """Return the state that the log leads to, without replaying its vectors."""
    if (state := newest_end(log)) is None:
        raise SaveError(f"{log} holds no snapshot that can be read: diloco log --verify says what is damaged")
    return state


def is_latched(log: Path) -> bool:
    """Return whether an island demands a quorum: it has the owner's latch, though no record may contain it yet."""
    memory = Journal.read(log).memory
    remembers = memory is not None and decode(Memory, memory).latch is not None
    return remembers or bool(newest_state(log).latch)


def _reaches(log: Path) -> tuple[bool, int, Head]:
    """Return how far a log leads."""
    points = points_of(log, Journal.read(log))
    return max((point.precedence for point in points), default=(False, -1, Head(-1, -1, "")))


def fragments_in(log: Path) -> tuple[Ranges, ...]:
    """Return how the vectors are divided into fragments, the same in every snapshot."""
    return next(kept_in(manifest, path).fragments for manifest, path in manifests(log))


def genesis_of(log: Path) -> Genesis:
    """Return what a run began with; raise SaveError if the file is damaged or missing."""
    genesis = read_genesis(log)
    if genesis is None:
        raise SaveError(f"{log / FILE} is damaged or missing: copy it from another island of the run")
    return genesis


def checkout(log: Path, number: int, out: Path) -> Path:
    """Write the state after a round to a new folder, as a save that `diloco export` and `diloco sample` can read."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SaveError(f"{out} already exists: name a new folder")
    genesis = genesis_of(log)
    state, vectors = state_of(log, number)
    config = genesis.configure({}).model_dump(mode="json")
    known = {"round": state.head.round, "outer_step": state.step, "data": genesis.data, "config": config}
    return write_outer_save(out, state.step, vectors, {**dict.fromkeys(FACTS), **known, "step": state.step})


def furthest(logs: list[Path]) -> Path:
    """Return the log that leads furthest, among those of a run's islands."""
    return max(logs, key=_reaches)
