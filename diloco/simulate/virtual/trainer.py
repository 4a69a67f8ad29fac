"""Simulate an island's trainer, reduced to numbers: it takes time, and runs the sync policy of a real one.

It stands for diloco/train/sync.py and exchange.py (doing what the policy decides) and for elastic/runtime/session.py
and work.py (when a round is over, what is owed). An inner step is a *stretch*: a phase is one, or two where results are
applied in the middle of a later phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from diloco.elastic.protocol.messages import Effect
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.elastic.protocol.record import Head, Offer, Record, holder_name
from diloco.elastic.protocol.state import RunState, Version
from diloco.train.policy import AppliedResult, SyncPolicy, View
from diloco.train.schedule import Schedule

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import World

PHASE_SAMPLES = 8
TOKENS_PER_SAMPLE = 10
MAX_PHASES = 2  # in one contribution: what comes late comes in small pieces, oldest first
ENDLESS = 10**9  # phases

Input = Callable[[Node, float], list[Effect]]


@dataclass(frozen=True)
class SyncPace:
    """Describe which fragment is launched, or applied, after which stretch."""

    fragments: int = 1
    overlap: int = 0  # 1: training goes on until a result is due
    scarce: bool = False  # fewer samples are leased to an island than it could use until they are contained

    @property
    def told(self) -> str:
        """Describe the pace for people; empty where it is the usual one."""
        if self == USUAL:
            return ""
        return f", {self.fragments} fragments{', overlapped' * self.overlap}{', few samples' * self.scarce}"

    @property
    def want(self) -> int:
        """Return the samples to hold besides those behind late progress: two passes' worth, or fewer if scarce."""
        return PHASE_SAMPLES * (max(1, self.fragments - 1) if self.scarce else 2 * self.fragments)

    @property
    def stretches(self) -> int:
        """Return the stretches of a phase, at whose end the next fragment is launched."""
        return 2 if self.overlap else 1

    @property
    def schedule(self) -> Schedule:
        """Return when fragments are launched and applied.

        With several fragments and overlap, two are in flight at times.
        """
        launches = range(self.stretches, ENDLESS, self.stretches)
        return Schedule(launches, self.fragments, delay=self.overlap * min(3, 2 * self.fragments - 1))


USUAL = SyncPace()  # all parameters at once, and everybody waits


class SimulatedCut(NamedTuple):
    """Hold one piece of progress: its cuts, tokens, samples and inner steps."""

    lo: int
    hi: int
    tokens: int
    samples: Ranges
    steps: int
    carried: Ranges = ()  # pages on which an earlier piece did not count


@dataclass
class SimulatedProgress:
    """Track an island's progress in one fragment, in pieces, oldest first."""

    fragment: int
    incarnation: int
    pieces: list[SimulatedCut] = field(default_factory=list)
    offered: set[tuple[int, int]] = field(default_factory=set)
    hi: int = 0  # the last cut
    mark: int = 0  # of the state that was last taken
    norm: float = 0.0
    carried: Ranges = ()  # pages on which what was contained last did not count, until the next cut

    def cut(self, tokens: int, samples: Ranges, steps: int) -> Offer:
        """Cut after so much progress, and return an offer of the oldest pieces that are owed.

        An offer has two pieces at most. Without tokens there is no new piece.
        """
        if tokens:
            self.hi += 1
            self.pieces.append(SimulatedCut(self.hi - 1, self.hi, tokens, samples, steps, self.carried))
            self.carried = ()
        owed = self.owed(self.mark)
        oldest, late = owed[:MAX_PHASES], len(owed) > 1
        lo, hi = oldest[0].lo, oldest[-1].hi
        self.offered.add((lo, hi))
        tokens = sum(piece.tokens for piece in oldest)
        return Offer(self.fragment, lo, hi, tokens, _samples(oldest), self.norm, self.incarnation, late=late)

    def owed(self, mark: int) -> list[SimulatedCut]:
        """List the pieces that a state with this mark does not contain."""
        return [piece for piece in self.pieces if piece.lo >= mark]

    def carries(self, offer: Offer) -> Ranges:
        """Return the pages of earlier progress that an offer brings."""
        return normal(part for piece in self.pieces if offer.lo <= piece.lo < offer.hi for part in piece.carried)

    def rebase(self, mark: int, hole: Ranges) -> None:
        """Move to a state with this mark; offers from before it are forgotten, and the hole is to be covered."""
        if mark > self.mark and self.hi >= mark:
            self.carried = normal(self.carried + hole)
        if self.carried and (owed := self.owed(mark)):
            place = self.pieces.index(owed[0])
            self.pieces[place] = owed[0]._replace(carried=normal(owed[0].carried + self.carried))
            self.carried = ()
        self.mark = mark
        self.offered = {cuts for cuts in self.offered if cuts[0] >= mark}


class Trainer:
    """Train one island: let time pass, offer progress, and follow the outer state as the policy decides."""

    def __init__(self, world: World, node: Node, pace: SyncPace) -> None:
        self.world, self.node, self.pace = world, node, pace
        self.speed = 1.0
        self.phases_s = self.phase_until = 0.0  # all that were begun so far; the end of the last one
        count, self.state = pace.fragments, node.state  # as last seen
        self.works = [SimulatedProgress(fragment, node.incarnation) for fragment in range(count)]
        self.versions = [Version(self.state.head.digest, self.state.step)] * count  # of fragments' outer parameters
        self._taken = [version.digest for version in self.versions]
        self._offered_at = [("", 0)] * count
        self._wanted = pace.want
        self._encoded_at = 0.0
        self.policy = SyncPolicy(self, pace.schedule, self.refresh())
        self._loop = self._live()
        self._waits = False

    @property
    def made(self) -> tuple[int, ...]:
        """Return the progress so far, by fragment."""
        return tuple(work.hi for work in self.works)

    @property
    def computed_s(self) -> float:
        """Return the seconds spent in inner steps so far."""
        return self.phases_s - max(0.0, self.phase_until - self.world.now)

    def has_bytes_of(self, offer: Offer) -> bool:
        """Return whether the island still has the contribution that this offer describes."""
        return (offer.lo, offer.hi) in self.works[offer.fragment].offered

    # what happens to it

    def appended(self, record: Record) -> None:
        """Note that the outer state now contains this record."""
        if record.proposal.contributions:
            self.versions[record.proposal.fragment] = Version(record.digest, record.proposal.step)

    def replaced(self, state: RunState) -> None:
        """Note that the outer state was replaced by another one altogether."""
        self.versions = [Version(state.head.digest, state.step)] * self.pace.fragments

    def on_update(self, *, only_leases: bool) -> None:
        """Wake a trainer that waits for a new head; `only_leases`: that record only admits and leases."""
        if self._waits:
            self._waits = False
            self.later(0.0 if only_leases else self.world.costs.apply_s, self.train)

    def train(self) -> None:
        """Run until something takes time, or has to be waited for."""
        pause = next(self._loop)
        if isinstance(pause, float):
            self.later(pause, self.train)
        else:
            self._waits = True

    def when_running(self, work: Callable[[], None]) -> None:
        """Do the work now, or when a stopped island resumes; never in another life of it."""
        me, lives = self.node.me, self.world.lives
        self.world.when_running(me, lambda: work() if me in lives and lives[me].node is self.node else None)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Do the work after so many seconds, if the island then runs; a stopped one does it when it resumes."""
        self.world.timeline.later(seconds, lambda: self.when_running(work))

    # its life

    def _live(self) -> Iterator[float | Head]:
        """Train for ever: yield the seconds that pass, or the head until there is another one."""
        while True:
            if batch := self._batch():
                yield self._stretch_s()
                self.policy.trained(batch, TOKENS_PER_SAMPLE * size(batch))
                yield from self.policy.after_step()
            elif self.policy.owes_something:
                yield from self.policy.without_samples(lambda: bool(self._batch()))
            else:
                yield self.state.head
            self.policy.follow()

    def _batch(self) -> Ranges:
        """Return the samples of one stretch; empty if there are fewer.

        They are leased, and not used by progress that is not contained yet.
        """
        count = PHASE_SAMPLES // self.pace.stretches
        lease = self.state.ledger.lease_of(holder_name(self.node.me, self.node.incarnation))
        batch = first(minus(minus(lease, self._waiting()), self.policy.used), count)
        return batch if size(batch) == count else ()

    def _stretch_s(self) -> float:
        """Begin a stretch, and return its duration."""
        duration = self.world.costs.phase_s(self.node.me) / self.speed / self.pace.stretches
        self.phases_s += duration
        self.phase_until = self.world.now + duration
        return duration

    # what its policy has done

    def refresh(self) -> View:
        """Return the policy's view of the run and of this island's part in it.

        Samples behind late progress are held besides those to train on: with none left, an island could offer nothing
        for the round that is due.
        """
        self.state = state = self.node.state
        late = size(self._waiting()) if any(len(work.owed(work.mark)) > 1 for work in self.works) else 0
        if self.pace.want + late != self._wanted:
            self._wanted = want = self.pace.want + late
            self.world.enter(self.node.me, lambda node, now: node.request_samples(want, now))
        at = [(version.digest, self._mark(fragment)) for fragment, version in enumerate(self.versions)]
        over = tuple(now != offered for now, offered in zip(at, self._offered_at, strict=True))
        moved = tuple(version != taken for (version, _), taken in zip(at, self._taken, strict=True))
        owes = tuple(bool(work.owed(work.mark)) for work in self.works)
        return View(state.head, state.step * self.pace.stretches, state.updates, over, moved, owes)

    def launch(self, fragment: int, tokens: int, samples: Ranges, steps: int) -> None:
        """Cut a fragment, and offer it once it is encoded; encodings follow each other."""
        work = self.works[fragment]
        offer = work.cut(tokens, samples, steps)
        self.world.checker.carried[self.node.me, offer] = work.carries(offer)
        self._offered_at[fragment] = self.versions[fragment].digest, work.mark
        self._encoded_at = max(self._encoded_at, self.world.now + self.world.costs.encode_s(self.node.me))

        def offers(node: Node, now: float) -> list[Effect]:
            return node.offer(offer, now)

        self.later(self._encoded_at - self.world.now, partial(self.world.enter, self.node.me, offers))

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        """Move to the fragment's outer parameters, and withdraw what is left of its offer."""
        self.state, version, work = self.node.state, self.versions[fragment], self.works[fragment]
        work.rebase(self._mark(fragment), self.state.hole(self.node.me, self.node.incarnation, fragment)[1])
        self._taken[fragment] = version.digest
        self.node.withdraw(fragment)
        return AppliedResult(version.step * self.pace.stretches, sum(piece.steps for piece in work.owed(work.mark)))

    def _waiting(self) -> Ranges:
        """Return the samples behind progress that is not contained yet."""
        return _samples(piece for work in self.works for piece in work.owed(self._mark(work.fragment)))

    def _mark(self, fragment: int) -> int:
        """Return how far the state that was last seen contains this island's progress in a fragment."""
        return self.world.contained(self.node, self.state, fragment)


def _samples(pieces: Iterable[SimulatedCut]) -> Ranges:
    return normal(part for piece in pieces for part in piece.samples)
