"""Compute from what a soak did when rounds were possible, how many there were, and how soon they came back. Pure.

Rounds are possible while a *linked quorum* exists: islands that run, that all reach each other in both directions, and
that are a quorum of the roster of the last committed round. Times are seconds since the faults began.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, permutations

from diloco.elastic.protocol.record import quorum

HEAL_S = 30.0  # the limit: a shorter wait that something else ended proves nothing


@dataclass(frozen=True)
class Moment:
    """Describe which islands could work, and which links were cut, from a time on until the next moment."""

    at_s: float
    able: frozenset[str]
    cut: frozenset[tuple[str, str]] = frozenset()  # sender, receiver


@dataclass(frozen=True)
class Commit:
    """Describe a round of the final chain; it happened when the first island reported it."""

    at_s: float
    round: int
    contributors: tuple[str, ...]
    roster: tuple[str, ...]  # of the next round


@dataclass(frozen=True)
class Span:
    """Hold a stretch of time during which there was a linked quorum."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.end_s - self.begin_s

    def overlap(self, begin_s: float, end_s: float) -> float:
        """Return for how many seconds it lies between these times."""
        return max(0.0, min(self.end_s, end_s) - max(self.begin_s, begin_s))


@lru_cache(maxsize=4096)
def linked_quorum(
    able: frozenset[str], cut: frozenset[tuple[str, str]], roster: tuple[str, ...], merge: bool, least: int
) -> bool:
    """Return whether `least` islands or more can decide together; with `merge` any can, else a quorum has to."""
    there = sorted(able if merge else able & set(roster))
    for size in range(len(there), least - 1, -1):
        for group in combinations(there, size):
            if (merge or quorum(roster, group)) and not any(pair in cut for pair in permutations(group, 2)):
                return True
    return False


def quorum_spans(
    moments: Sequence[Moment], commits: Sequence[Commit], founder: str, end_s: float, *, merge: bool, least: int = 2
) -> list[Span]:
    """List when there was a linked quorum, from 0 to the end; `founder` is the roster before the first commit."""
    changes = {*(moment.at_s for moment in moments), *(commit.at_s for commit in commits)}
    times = sorted({0.0, end_s, *(at_s for at_s in changes if 0 < at_s < end_s)})
    spans: list[Span] = []
    for begin_s, until_s in pairwise(times):
        moment = [each for each in moments if each.at_s <= begin_s][-1:]
        roster = ([each.roster for each in commits if each.at_s <= begin_s] or [(founder,)])[-1]
        if moment and linked_quorum(moment[0].able, moment[0].cut, roster, merge, least):
            if spans and spans[-1].end_s == begin_s:
                spans[-1] = Span(spans[-1].begin_s, until_s)
            else:
                spans.append(Span(begin_s, until_s))
    return spans


def heal_times(moments: Sequence[Moment], commits: Sequence[Commit], spans: Sequence[Span]) -> list[float]:
    """List how long the next commit took after each change of the world that left, or brought, a linked quorum.

    Where the quorum was lost before a commit, the wait counts if it was longer than HEAL_S, with the length it had.
    """
    at = [commit.at_s for commit in commits]
    waits: list[float] = []
    for span in spans:
        changes = [moment.at_s for moment in moments if span.begin_s < moment.at_s < span.end_s]
        for changed_s in [span.begin_s, *changes]:
            place = bisect_left(at, changed_s)
            committed = place < len(at) and at[place] <= span.end_s
            wait_s = (at[place] if committed else span.end_s) - changed_s
            if committed or wait_s > HEAL_S:
                waits.append(wait_s)
    return waits


def longest_gap(commits: Sequence[Commit], spans: Sequence[Span]) -> float:
    """Return the longest time without a commit while there was a linked quorum without a break."""
    longest = 0.0
    for span in spans:
        inside = [commit.at_s for commit in commits if span.begin_s <= commit.at_s <= span.end_s]
        marks = [span.begin_s, *inside, span.end_s]
        longest = max([longest, *(later - earlier for earlier, later in pairwise(marks))])
    return longest


def rounds_per_s(commits: Sequence[Commit], spans: Sequence[Span]) -> float:
    """Return the rounds with contributions per second of time with a linked quorum; 0 without such a time."""
    seconds = sum(span.seconds for span in spans)
    inside = [commit for commit in commits if any(span.begin_s <= commit.at_s <= span.end_s for span in spans)]
    return sum(bool(commit.contributors) for commit in inside) / seconds if seconds else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all does not exceed; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
