"""A trainer that takes fragments in turn and may train on while they are in flight, reduced to numbers.

It stands for diloco/train/sync.py and diloco/train/exchange.py (when a fragment is launched and its result taken) and
for elastic/runtime/session.py and elastic/runtime/work.py (when its round is over, what is owed). The unit of training
is a *stretch*: a phase is one, or two where results are taken in the middle of a later phase.

Rounds take the fragments in turn and wait for those who train, so the protocol asks of a trainer that it always comes
to have something for the fragment that is due. Each of these rules has its disaster:

- while it waits for one fragment, it offers those whose turn comes before (`_keep_up`; tests/scenarios/waiting.txt);
- it waits without training only as long as it has no samples (`_give_everything`);
- samples behind late progress are not counted among those it wants to hold (`_ask`);
- if others have moved its clock past a launch, it launches at its next step (`_sync`, `_take`);
- what it owes is measured from the mark that it will cut from (`_owes`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.elastic.protocol.record import Offer, Record, holder_name
from diloco.elastic.protocol.state import RunState, Version
from diloco.simulate.virtual.trainer import MAX_PHASES, PHASE_SAMPLES, TOKENS_PER_SAMPLE, Trainer

ENCODE_S = 0.5

Pause = Iterator[float | None]  # seconds of training; None: until the head is another one


@dataclass(frozen=True)
class Pace:
    """Which fragment is launched, or applied, after which stretch."""

    fragments: int = 1
    overlap: int = 0  # 1: training goes on until a result is due
    scarce: bool = False  # fewer samples are leased to an island than it could use until they are contained

    @property
    def told(self) -> str:
        """Where it is not the usual one, for people."""
        if self == USUAL:
            return ""
        return f", {self.fragments} fragments{', overlapped' * self.overlap}{', few samples' * self.scarce}"

    @property
    def want(self) -> int:
        """Samples to hold besides those that wait to be contained: two passes' worth."""
        return PHASE_SAMPLES * (max(1, self.fragments - 1) if self.scarce else 2 * self.fragments)

    @property
    def stretches(self) -> int:
        """Of a phase, at whose end the next fragment is launched."""
        return 2 if self.overlap else 1

    @property
    def delay(self) -> int:
        """In stretches. Where there are several fragments, two are in flight at times."""
        return self.overlap * min(3, 2 * self.fragments - 1)

    def launched(self, after: int, until: int) -> list[int]:
        """Each fragment once, that whose turn was last in the end."""
        phases = range(max(0, after) // self.stretches, max(0, until) // self.stretches)
        return [phase % self.fragments for phase in phases[-self.fragments :]]


USUAL = Pace()  # all parameters at once, and everybody waits


class Piece(NamedTuple):
    lo: int
    hi: int
    tokens: int
    samples: Ranges


@dataclass
class Work:
    """Of one fragment."""

    fragment: int
    incarnation: int
    pieces: list[Piece] = field(default_factory=list)
    offered: set[tuple[int, int]] = field(default_factory=set)
    hi: int = 0  # the last cut
    mark: int = 0  # of the state that was last taken

    def cut(self, tokens: int, samples: Ranges) -> Offer:
        if tokens:
            self.hi += 1
            self.pieces.append(Piece(self.hi - 1, self.hi, tokens, samples))
        owed = self.owed(self.mark)
        oldest, late = owed[:MAX_PHASES], len(owed) > 1
        lo, hi = oldest[0].lo, oldest[-1].hi
        self.offered.add((lo, hi))
        tokens = sum(piece.tokens for piece in oldest)
        return Offer(self.fragment, lo, hi, tokens, _samples(oldest), incarnation=self.incarnation, late=late)

    def owed(self, mark: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.lo >= mark]

    def rebase(self, mark: int) -> None:
        self.mark = mark
        self.offered = {cuts for cuts in self.offered if cuts[0] >= mark}


class Flight(NamedTuple):
    """Where a fragment was when it was launched."""

    digest: str
    mark: int


@dataclass
class Streaming(Trainer):
    pace: Pace = USUAL

    def __post_init__(self) -> None:
        count, state = self.pace.fragments, self.node.state
        self.works = [Work(fragment, self.node.incarnation) for fragment in range(count)]
        self.state = state  # as last seen
        self.versions = [Version(state.head.digest, state.step)] * count  # of fragments' outer parameters
        self._taken = [state.head.digest] * count
        self._in_flight: dict[int, Flight] = {}
        self._trained = 0  # stretches
        self._clock = state.step * self.pace.stretches
        self._synced = self._clock  # everything up to then was launched
        self._cut_at = [0] * count
        self._tokens = [0] * count  # since the last cut
        self._used: Ranges = ()  # since the last cut of any fragment
        self._wanted = self.pace.want
        self._encoded_at = 0.0
        self._loop = self._live()
        self._waits = False

    @property
    def made(self) -> tuple[int, ...]:
        return tuple(work.hi for work in self.works)

    def has_bytes_of(self, offer: Offer) -> bool:
        return (offer.lo, offer.hi) in self.works[offer.fragment].offered

    def appended(self, record: Record) -> None:
        if record.proposal.contributions:
            self.versions[record.proposal.fragment] = Version(record.digest, record.proposal.step)

    def replaced(self, state: RunState) -> None:
        self.versions = [Version(state.head.digest, state.step)] * self.pace.fragments

    def train(self) -> None:
        self._waits, pause = False, next(self._loop)
        if pause is None:
            self._waits = True
        else:
            self.later(pause, self.train)

    def moved(self, *, only_leases: bool) -> None:
        if self._waits:
            self.train()

    def _live(self) -> Pause:
        while True:
            if batch := self._batch():
                yield self.phase_s() / self.pace.stretches
                self._train_on(batch)
                yield from self._sync()
            elif any(map(self._owes, range(self.pace.fragments))):
                yield from self._give_everything()
            else:
                yield None
            self._follow()

    def _batch(self) -> Ranges:
        """For one stretch: leased, and not used by progress that is not contained yet. None, if there are fewer."""
        count = PHASE_SAMPLES // self.pace.stretches
        lease = self.state.ledger.lease_of(holder_name(self.node.me, self.node.incarnation))
        batch = first(minus(minus(lease, self._waiting()), self._used), count)
        return batch if size(batch) == count else ()

    def _train_on(self, batch: Ranges) -> None:
        self._trained += 1
        self._clock += 1
        self._tokens = [tokens + TOKENS_PER_SAMPLE * size(batch) for tokens in self._tokens]
        self._used = normal((*self._used, *batch))

    def _sync(self) -> Pause:
        """One that is slow finds its clock moved on by others: what it has missed the time of, it launches now."""
        before, now, delay = self._synced, self._clock, self.pace.delay
        self._synced = now
        launches, applies = self.pace.launched(before, now), self.pace.launched(before - delay, now - delay)
        yield from self._carry_out(launches, applies)

    def _carry_out(self, launches: Iterable[int], applies: Iterable[int]) -> Pause:
        for fragment in launches:
            self._launch(fragment)
        for fragment in applies:
            yield from self._finish(fragment)

    def _give_everything(self) -> Pause:
        """In the order of their rounds, what is in flight first. Until there are samples: rounds may need what is
        trained on them."""
        count = self.pace.fragments
        for fragment in [(self.state.updates + more) % count for more in range(count)]:
            for launches in ([], [fragment]):
                for _ in self._carry_out(launches, [fragment]):
                    if self._batch():
                        return
                    yield None

    def _owes(self, fragment: int) -> bool:
        """By what was last taken, as the cut will have it."""
        work = self.works[fragment]
        return self._tokens[fragment] > 0 or bool(work.owed(work.mark))

    def _launch(self, fragment: int) -> None:
        if fragment in self._in_flight or not self._owes(fragment):
            return
        work = self.works[fragment]
        offer = work.cut(self._tokens[fragment], self._used)
        self._in_flight[fragment] = Flight(self.versions[fragment].digest, work.mark)
        self._cut_at[fragment], self._tokens[fragment], self._used = self._trained, 0, ()
        now, encode_s = self.world.now, ENCODE_S * self.world.timeline.chance(f"encode {self.node.me}")
        self._encoded_at = max(self._encoded_at, now + encode_s)
        self.world.timeline.at(self._encoded_at, lambda: self.when_running(lambda: self.offer(offer)))

    def _finish(self, fragment: int) -> Pause:
        """Waits until its round is over, with or without this island's part."""
        if fragment not in self._in_flight:
            return
        early = set[int]()
        while not self._over(fragment):
            self._keep_up(early)
            yield None
        for each in (fragment, *early):
            self._conclude(each)

    def _keep_up(self, early: set[int]) -> None:
        """Rounds come in turn: whoever waits for a later one takes part in those before it, or they may never come."""
        due = self.node.due
        for fragment in (*early, due):
            self._conclude(fragment)
        self._follow()
        if due not in self._in_flight:
            self._launch(due)
            early.add(due)

    def _conclude(self, fragment: int) -> None:
        if fragment in self._in_flight and self._over(fragment):
            if self.contained_in(self.node.state, fragment) < self.works[fragment].hi:
                self.node.withdraw(fragment)
            self._take(fragment)

    def _over(self, fragment: int) -> bool:
        """A round of it was committed, or the offer no longer stands: it is contained, or another branch is."""
        flight = self._in_flight[fragment]
        mark = self.contained_in(self.node.state, fragment)
        return flight != (self.versions[fragment].digest, mark)

    def _take(self, fragment: int) -> None:
        self.state, version = self.node.state, self.versions[fragment]
        self.works[fragment].rebase(self._mark(fragment))
        self._taken[fragment] = version.digest
        clock = version.step * self.pace.stretches
        if self._in_flight.pop(fragment, None) is not None:
            self._clock = clock + self._trained - self._cut_at[fragment]
        else:  # where the others are, so that their turn is this island's
            self._clock = max(self._clock, clock)
        self._synced = min(self._synced, self._clock)

    def _follow(self) -> None:
        """Others went on without this island, or it moved to another branch. What is in flight has its own time."""
        for fragment, version in enumerate(self.versions):
            if version.digest != self._taken[fragment] and fragment not in self._in_flight:
                self._take(fragment)
        self.state = self.node.state
        self._ask()

    def _ask(self) -> None:
        """Late progress keeps its samples. With none left, an island could offer nothing for the round that is due."""
        want = self.pace.want + size(self._waiting())
        if want != self._wanted:
            self._wanted = want
            self.world.enter(self.node.me, lambda node, now: node.ask(want, now))

    def _waiting(self) -> Ranges:
        """Samples behind progress that is not contained yet."""
        return _samples(piece for work in self.works for piece in work.owed(self._mark(work.fragment)))

    def _mark(self, fragment: int) -> int:
        return self.contained_in(self.state, fragment)


def _samples(pieces: Iterable[Piece]) -> Ranges:
    return normal(part for piece in pieces for part in piece.samples)
