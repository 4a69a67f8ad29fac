"""Simulate the all-reduces of a world: who has joined, who was lost, and what each member hears of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from diloco.elastic.protocol.messages import Begin, Received
from diloco.elastic.protocol.ranges import Range, both, minus, normal
from diloco.elastic.protocol.record import EMPTY, Ballot
from diloco.simulate.virtual.check import Violation

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import Pair, World


PAGES = 840  # of every vector: so many can be divided among two to eight members
PARTS = 2  # of an exchange: first contributions travel, then means


@dataclass
class Reduction:
    """Track one attempt at an all-reduce, by the *begin* that started it."""

    begin: Begin
    joined: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)  # of these: have not heard how it ended
    began: float = inf  # when all had joined
    ended: float = inf
    failed: bool = False
    length_s: float = inf  # what it takes, if nothing happens
    kept: dict[str, tuple[Received, ...]] = field(default_factory=dict)  # by those who have heard that it failed

    @property
    def over(self) -> bool:
        """Return whether it failed, or it began and no member waits for its result any more."""
        return self.failed or (self.began < inf and not self.waiting)

    @property
    def seconds(self) -> float:
        """Return how long it took, once it has ended; 0 if it never began."""
        return max(0.0, self.ended - self.began)


class Reductions:
    """Track all attempts of a world, by their ballots, and inform members of the end."""

    def __init__(self, world: World) -> None:
        self._world, self._timeline, self._costs = world, world.timeline, world.costs
        self.all: dict[Ballot, Reduction] = {}
        self._open: list[Reduction] = []
        self.spoilt: set[str] = set()  # whose next result is wrong
        self.late: dict[str, float] = {}  # seconds after the others that these get theirs

    def join(self, name: str, begin: Begin) -> None:
        """Add a member to its attempt, which begins when all have joined and fails if one does not come in time."""
        reduction = self.all.get(begin.ballot)
        if reduction is None or reduction.begin != begin:
            if reduction is not None and reduction.waiting:
                raise Violation(f"I1: two attempts under ballot {begin.ballot}")
            # a coordinator that dies before its promise is durable has told nobody, and may use the name again
            reduction = self.all[begin.ballot] = Reduction(begin)
            self._open.append(reduction)
            self._timeline.after(self._costs.connect_s(begin), partial(self._give_up, reduction))
        self._check_salvage(name, begin)
        reduction.joined.add(name)
        reduction.waiting.add(name)
        if reduction.failed:
            self._report(name, reduction, "", "it is over", first=True)
        elif len(reduction.joined) == len(begin.members):
            self._go(reduction)

    def are_moving(self, name: str) -> bool:
        """Return whether bytes of an exchange move at this island."""
        return any(name in one.waiting and one.began < inf and not one.failed for one in self._recent())

    def _recent(self) -> list[Reduction]:
        """Return the attempts that are not over; those that are leave the list."""
        self._open = [one for one in self._open if not one.over]
        return self._open

    def _give_up(self, reduction: Reduction) -> None:
        """Fail an attempt that has not begun, and blame a member that did not come."""
        if reduction.began == inf and not reduction.failed:
            self._fail(reduction, min(set(reduction.begin.members) - reduction.waiting), "no stream came")

    def _go(self, reduction: Reduction) -> None:
        """Begin an attempt: each member finishes after its time, unless two of them cannot reach each other."""
        begin, reduction.began = reduction.begin, self._timeline.now
        if broken := [pair for pair in self._world.cut if reduction.joined.issuperset(pair)]:
            one, other = min(broken, key=lambda pair: [begin.members.index(name) for name in pair])
            failing = partial(self._fail, reduction, other, "cannot be reached", one)
            self._timeline.after(self._costs.unreachable_s, failing)
            return
        durations = self._costs.reduce_s(begin)
        reduction.length_s = max(durations)
        for member, seconds in zip(begin.members, durations, strict=True):
            finish = partial(self._world.when_running, member, partial(self._finish, reduction, member))
            self._timeline.after(seconds + self.late.get(member, 0.0), finish)

    def _finish(self, reduction: Reduction, member: str) -> None:
        """Hand a member its result, which is wrong if that was ordered."""
        if reduction.failed or member not in reduction.waiting:
            return
        reduction.waiting.remove(member)
        reduction.ended = self._timeline.now
        proposal = reduction.begin.proposal
        payload = hashlib.sha256(proposal.digest.encode()).hexdigest() if proposal.contributions else EMPTY
        if member in self.spoilt:
            self.spoilt.remove(member)
            payload = payload[::-1]
        self._world.enter(member, lambda node, now: node.reduced(reduction.begin.ballot, payload, now))

    def cancel(self, name: str, ballot: Ballot) -> None:
        """Fail an attempt because a member has given it up, unless that has its result already."""
        reduction = self.all.get(ballot)
        if reduction is not None and name in reduction.waiting:
            self._fail(reduction, name, "hung up")
            self._report(name, reduction, "", "halted", first=True)  # heeded only by one that was told to

    def lost(self, name: str, *, silent: bool) -> bool:
        """Fail the attempts that wait for a dead member; return whether one that is not over had it as a member."""
        needed = [each for each in self.all.values() if not each.over and name in each.begin.members]
        for reduction in needed:
            if name in reduction.waiting:
                made = self._timeline.now - reduction.began >= self._costs.made_s(reduction.begin)
                fail = self._fail_near if made else self._fail
                failing = partial(fail, reduction, name, "its chunks do not come")
                reduction.waiting.remove(name)
                self._timeline.later(self._costs.stall_s(reduction.begin, silent=silent), failing)
        return bool(needed)

    def severed(self, pairs: set[Pair]) -> None:
        """Fail the attempts in which two members of a cut pair take part, if one of them still waits."""
        for reduction in list(self.all.values()):
            for one, other in sorted(pairs):
                if {one, other} <= reduction.joined and {one, other} & reduction.waiting:
                    self._fail(reduction, other, "the connection broke", one)

    def _fail(self, reduction: Reduction, blamed: str, reason: str, reporter: str = "") -> None:
        """End an attempt; each member that waits is given another one to blame."""
        if reduction.over:
            return
        reduction.failed, reduction.ended = True, self._timeline.now
        for member in sorted(reduction.waiting if reporter else reduction.waiting - {blamed}):
            other = reporter if member == blamed else blamed
            self._report(member, reduction, other, reason, first=member == reporter)

    def _fail_near(self, reduction: Reduction, blamed: str, reason: str) -> None:
        """End an attempt for the members that get the mean by way of one that is gone."""
        for member in sorted(reduction.waiting & self._costs.group(reduction.begin, blamed)):
            reduction.waiting.remove(member)
            self._report(member, reduction, blamed, reason, first=True, local=True)

    def _report(
        self, member: str, reduction: Reduction, blamed: str, reason: str, *, first: bool, local: bool = False
    ) -> None:
        """Let a member know of the failure when its message has arrived."""
        ballot = reduction.begin.ballot
        if member not in reduction.kept:
            reduction.kept[member] = self._kept(reduction, member)
        failed = partial(
            self._world.enter, member,
            lambda node, now: node.reduce_failed(ballot, blamed, reason, now, local=local, kept=reduction.kept[member]),
        )  # fmt: skip
        self._timeline.after(self._costs.failure_s(first=first), failed)

    # what a failed attempt leaves

    def _kept(self, reduction: Reduction, member: str) -> tuple[Received, ...]:
        """Draw what has come to a member of a failed attempt: first contributions, then means, a page at a time."""
        begin = reduction.begin
        if begin.first or reduction.began == inf:
            return ()
        part = PARTS * (reduction.ended - reduction.began) / reduction.length_s
        kept = []
        for peer in begin.members:
            lo, hi = _span(begin, peer)
            come = PARTS if peer == member else part * self._costs.spread(f"pages {member} of {peer}")
            made = round((hi - lo) * min(1.0, max(0.0, come - 1)))
            kept.append(Received(peer, ((lo, hi),), normal([(lo, lo + made)]), whole=come >= 1))
        return tuple(kept)

    def _check_salvage(self, name: str, begin: Begin) -> None:
        """Check I3: of a contribution that counts without its island, every page outside of the hole is there."""
        if (hole := begin.proposal.hole) is None:
            return
        last = self.all[begin.ballot._replace(attempt=begin.ballot.attempt - 1)]
        here = next(kept for kept in self._kept_by(last, name) if kept.peer == hole.island)
        own = normal((lo, hi) for lo, hi, place in begin.owners if begin.members[place] == name)
        if not here.whole or minus(minus(own, hole.pages), here.means):
            raise Violation(f"I3: {name} does not have all pages of {hole.island} that it is to reduce")
        if both(here.means, hole.pages):
            raise Violation(f"I2: {name} has means of {hole.island} that are to be made anew without it")
        if normal((lo, hi) for lo, hi, _ in begin.owners) != here.pages:
            raise Violation(f"I3: nobody reduces some pages of {hole.island}")

    def _kept_by(self, reduction: Reduction, name: str) -> tuple[Received, ...]:
        """Return what a member of a failed attempt has; one that finished it has everything."""
        if name in reduction.kept:
            return reduction.kept[name]
        spans = {peer: (_span(reduction.begin, peer),) for peer in reduction.begin.members}
        return tuple(Received(peer, span, span, whole=True) for peer, span in spans.items())


def _span(begin: Begin, peer: str) -> Range:
    """Return the pages that a member is to reduce: they are divided equally."""
    place, count = begin.members.index(peer), len(begin.members)
    return place * PAGES // count, (place + 1) * PAGES // count
