"""Judge what a soak has observed: what was lost or counted twice, how rounds went on, what grew. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from diloco.bench.report import Check
from diloco.bench.soak_proc import Usage
from diloco.bench.soak_timeline import (
    HEAL_S,
    Commit,
    Moment,
    Span,
    heal_times,
    longest_gap,
    percentile,
    quorum_spans,
    rounds_per_s,
)  # fmt: skip
from diloco.elastic.protocol.ranges import Range, Ranges, minus, normal, size

LAST_ROUNDS = 5  # with work: who contributed to them is alive then
LEAST_SHARE = 0.5  # of the rounds per second without faults
TOGETHER_S = 60.0
MIB = 2**20
ALLOWED = {"descriptors": 24, "threads": 16, "resident_mib": 64, "files": 16, "temporary": 4}  # growth in one quarter
SAMPLED_S = 15.0  # how far a life's first and last sample may be from the ends of the second half


@dataclass(frozen=True)
class Told:
    """Hold what an island reported of a round: with this it called the round durable."""

    at_s: float
    island: str
    round: int
    digest: str  # of the chain
    contributors: tuple[str, ...]


class SeenWork(NamedTuple):
    """Say which life of an island contributed to a record, and on which samples it had trained."""

    island: str
    incarnation: int
    samples: Ranges


@dataclass(frozen=True)
class SeenRecord:
    """Hold what the bench has read of a record in an island's log."""

    round: int
    digest: str
    parent: str
    roster: tuple[str, ...]
    work: tuple[SeenWork, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Hold what one life of an island used at a time."""

    at_s: float
    island: str
    life: int
    usage: Usage


@dataclass
class Observation:
    """Collect all that a soak did and saw. Times are seconds since the faults began."""

    founder: str
    seconds: float  # for which faults came
    end_s: float = 0.0  # when they were together; work of undone rounds may have been waited for after that
    together_s: float | None = None  # from the last heal until a round of all islands; None: there was none
    moments: list[Moment] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    records: dict[str, SeenRecord] = field(default_factory=dict)  # of any log, by their digests
    head: str = ""  # the digest of the survivors' furthest record
    samples_twice: int = 0
    digests_equal: bool = False
    samples: list[Sample] = field(default_factory=list)
    sockets_left: int = 0
    faults: list[tuple[float, str]] = field(default_factory=list)  # what was done, in words
    refusals: list[tuple[float, str]] = field(default_factory=list)  # islands that ended with an error message
    crashes: list[tuple[float, str]] = field(default_factory=list)  # islands that ended otherwise, or did not end
    lives: set[tuple[str, int]] = field(default_factory=set)  # of islands that are in the rounds in the end


def chain_to(records: Mapping[str, SeenRecord], head: str) -> list[SeenRecord]:
    """List the records that lead to a head, oldest first, as far back as they are known."""
    chain: list[SeenRecord] = []
    while (record := records.get(head)) is not None:
        chain.append(record)
        head = record.parent
    return chain[::-1]


def lost_rounds(told: Sequence[Told], chain: Sequence[SeenRecord]) -> tuple[list[Told], list[Told]]:
    """Return the rounds that were called durable and are not in the chain; and those before its first known record.

    Each round is there once, as first reported.
    """
    first = {each.digest: each for each in sorted(told, key=lambda each: each.at_s, reverse=True)}
    known, begins = {record.digest for record in chain}, chain[0].round if chain else 0
    missing = [each for each in first.values() if each.digest not in known]
    lost = [each for each in missing if each.round >= begins]
    return sorted(lost, key=lambda each: each.at_s), [each for each in missing if each.round < begins]


def lives_in(chain: Sequence[SeenRecord]) -> set[tuple[str, int]]:
    """Return the lives of islands that have contributed to the last rounds."""
    return {each[:2] for record in [record for record in chain if record.work][-LAST_ROUNDS:] for each in record.work}


def work_lost(
    records: Mapping[str, SeenRecord], chain: Sequence[SeenRecord], lives: Collection[tuple[str, int]]
) -> int:
    """Return how many samples are behind contributions of these lives to any record that the chain contains in no
    round. What others had trained has died with them."""
    contained: dict[tuple[str, int], list[Range]] = {life: [] for life in lives}
    trained: dict[tuple[str, int], list[Range]] = {life: [] for life in lives}
    for found, those in ((contained, chain), (trained, records.values())):
        for each in (each for record in those for each in record.work if each[:2] in found):
            found[each[:2]].extend(each.samples)
    return sum(size(minus(normal(trained[life]), normal(contained[life]))) for life in lives)


def commits_of(told: Sequence[Told], chain: Sequence[SeenRecord]) -> list[Commit]:
    """List the rounds of the chain that somebody has reported, with the time of the first report."""
    first = {each.digest: each for each in sorted(told, key=lambda each: each.at_s, reverse=True)}
    rounds = [(first[record.digest], record) for record in chain if record.digest in first]
    commits = [Commit(each.at_s, each.round, each.contributors, record.roster) for each, record in rounds]
    return sorted(commits, key=lambda commit: (commit.at_s, commit.round))


def growth(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Return by how much the last quarter is above the third one: the worst of the islands that lived through both.

    Empty where none did.
    """
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        if seconds / 2 <= sample.at_s <= seconds:
            lives.setdefault((sample.island, sample.life), []).append(sample)
    grown: dict[str, float] = {}
    for life in lives.values():
        if life[0].at_s > seconds / 2 + SAMPLED_S or life[-1].at_s < seconds - SAMPLED_S:
            continue
        quarters: tuple[list[Usage], list[Usage]] = [], []
        for sample in life:
            quarters[sample.at_s >= 0.75 * seconds].append(sample.usage)
        if all(quarters):
            before, after = map(_medians, quarters)
            grown = {name: max(grown.get(name, -1e9), after[name] - before[name]) for name in after}
    return grown


def _medians(usages: Sequence[Usage]) -> dict[str, float]:
    names = ("descriptors", "threads", "files", "temporary")
    return {
        **{name: float(median(getattr(usage, name) for usage in usages)) for name in names},
        "resident_mib": median(usage.resident_bytes for usage in usages) / MIB,
    }


@dataclass(frozen=True)
class Verdict:
    """Hold what follows from an observation: checks, and what the report shows beside them."""

    checks: list[Check]
    commits: list[Commit]
    spans: list[Span]
    lost: list[Told]
    per_s: float  # while faults came
    heals: list[float]
    gap_s: float


def judge(seen: Observation, *, merge: bool, quiet_per_s: float | None) -> Verdict:
    """Check an observation. `quiet_per_s` are the rounds per second without faults; None if that is not compared.

    With `merge`, a cut network may undo rounds and train on samples twice: that is counted, but has no limit.
    """
    chain = chain_to(seen.records, seen.head)
    lost, unchecked = lost_rounds(seen.told, chain)
    commits = commits_of(seen.told, chain)
    spans = quorum_spans(seen.moments, commits, seen.founder, seen.end_s, merge=merge)
    under_fire = [Span(span.begin_s, min(span.end_s, seen.seconds)) for span in spans if span.begin_s < seen.seconds]
    per_s, heals = rounds_per_s(commits, under_fire), heal_times(seen.moments, commits, spans)
    later = sum(bool(commit.contributors) and commit.at_s > seen.seconds for commit in commits)
    checks = []
    if not merge:
        checks.append(Check("soak.rounds_lost", len(lost), 0, "lower"))
        checks.append(Check("soak.samples_twice", seen.samples_twice, 0, "lower"))
    checks += [
        Check("soak.work_lost", work_lost(seen.records, chain, seen.lives), 0, "lower"),
        Check("soak.rounds_unchecked", len(unchecked), 0, "lower"),
        Check("soak.digests_equal", float(seen.digests_equal), 1, "higher"),
        Check("soak.rounds_after_heal", later, 1, "higher"),
        Check("soak.together", float(seen.together_s is not None and seen.together_s <= TOGETHER_S), 1, "higher"),
        Check("soak.heal_p95_s", percentile(heals, 0.95), HEAL_S, "lower"),
        Check("soak.crashes", len(seen.crashes), 0, "lower"),
        Check("soak.sockets_left", seen.sockets_left, 0, "lower"),
    ]
    if quiet_per_s:
        checks.append(Check("soak.rounds_share", per_s / quiet_per_s, LEAST_SHARE, "higher"))
    grown = growth(seen.samples, seen.seconds)
    checks += [Check(f"soak.{name}_grown", grown[name], ALLOWED[name], "lower") for name in ALLOWED if name in grown]
    return Verdict(checks, commits, spans, lost, per_s, heals, longest_gap(commits, spans))
