"""All-reduces of the virtual network: who has joined, who was lost, and what each member gets to hear of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING

from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.record import EMPTY, Ballot, Proposal
from diloco.simulate.protocol.timeline import SILENCE_S

if TYPE_CHECKING:
    from diloco.simulate.protocol.world import Pair, World


@dataclass
class Reduction:
    begin: Begin
    joined: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    failed: bool = False

    @property
    def waiting(self) -> set[str]:
        """Those who have joined and have not heard how it ended."""
        return self.joined - self.finished


class Reductions:
    def __init__(self, world: World) -> None:
        self._world, self._timeline = world, world.timeline
        self._under_way: dict[Ballot, Reduction] = {}  # a ballot's name is used once
        self.spoilt: set[str] = set()  # whose next result is wrong
        self.late: set[str] = set()  # who get theirs a second after the others

    def join(self, name: str, begin: Begin) -> None:
        reduction = self._under_way.setdefault(begin.ballot, Reduction(begin))
        reduction.joined.add(name)
        if reduction.failed:
            self._timeline.after(0.02, partial(self._report, name, reduction, "", "it is over"))
        elif reduction.joined == set(begin.members):
            self._go(reduction)
        else:
            self._timeline.after(2 * SILENCE_S, partial(self._give_up, reduction))

    def _give_up(self, reduction: Reduction) -> None:
        if missing := set(reduction.begin.members) - reduction.joined:
            self._fail(reduction, min(missing), "never came")

    def _go(self, reduction: Reduction) -> None:
        members, chance = reduction.begin.members, self._timeline.chance
        for one, other in permutations(members, 2):
            if not self._world.connected(one, other):
                self._timeline.after(SILENCE_S, partial(self._fail, reduction, other, "cannot be reached", one))
                return
        for member in members:
            took = 0.2 + chance(f"reduce {member}") + (member in self.late)
            self._timeline.after(took, partial(self._finish, reduction, member))

    def _finish(self, reduction: Reduction, member: str) -> None:
        self._world.when_running(member, partial(self._hand_over, reduction, member))

    def _hand_over(self, reduction: Reduction, member: str) -> None:
        if reduction.failed or member not in reduction.joined:
            return
        reduction.finished.add(member)
        payload = payload_of(reduction.begin.proposal)
        if member in self.spoilt:
            self.spoilt.remove(member)
            payload = payload[::-1]
        self._world.enter(member, lambda node, now: node.reduced(reduction.begin.ballot, payload, now))

    def cancel(self, name: str, ballot: Ballot) -> None:
        reduction = self._under_way.get(ballot)
        if reduction is not None and name in reduction.waiting:
            self._fail(reduction, name, "hung up")

    def lost(self, name: str) -> None:
        for reduction in list(self._under_way.values()):
            if name in reduction.waiting:
                self._fail(reduction, name, "hung up")
                reduction.joined.discard(name)

    def severed(self, pairs: set[Pair]) -> None:
        for reduction in list(self._under_way.values()):
            for one, other in sorted(pairs):
                if {one, other} <= reduction.joined and not {one, other} <= reduction.finished:
                    self._fail(reduction, other, "the connection broke", one)

    def _fail(self, reduction: Reduction, blamed: str, reason: str, reporter: str = "") -> None:
        if reduction.failed or not reduction.waiting:
            return
        reduction.failed = True
        for member in sorted(reduction.waiting if reporter else reduction.waiting - {blamed}):
            delay = 0.02 if member == reporter else 0.05 + 0.1 * self._timeline.chance("fails")
            other = reporter if member == blamed else blamed
            self._timeline.after(delay, partial(self._report, member, reduction, other, reason))

    def _report(self, member: str, reduction: Reduction, blamed: str, reason: str) -> None:
        ballot = reduction.begin.ballot
        self._world.enter(member, lambda node, now: node.reduce_failed(ballot, blamed, reason, now))


def payload_of(proposal: Proposal) -> str:
    return hashlib.sha256(proposal.digest.encode()).hexdigest() if proposal.contributions else EMPTY
