"""An island's trainer, reduced to numbers: phases take time, end in a cut, and are offered until they are contained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from diloco.elastic.protocol.messages import Effect
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.elastic.protocol.record import Offer, Record, holder_name
from diloco.elastic.protocol.state import RunState

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import World

PHASE_SAMPLES = 8
TOKENS_PER_SAMPLE = 10
MAX_PHASES = 2  # in one contribution: what comes late comes in small pieces, oldest first

Input = Callable[[Node, float], list[Effect]]


@dataclass
class Trainer(ABC):
    world: World
    node: Node
    speed: float = 1.0
    phases_s: float = 0.0  # of all phases begun so far
    phase_until: float = 0.0

    @abstractmethod
    def train(self) -> None:
        """Begin a phase, if there are samples for it."""

    @abstractmethod
    def moved(self, *, only_leases: bool) -> None:
        """The head is another one; `only_leases`: by a record that admits and leases."""

    @property
    @abstractmethod
    def made(self) -> tuple[int, ...]:
        """Progress so far, by fragment."""

    def appended(self, record: Record) -> None:
        """The outer state contains it."""
        return

    def replaced(self, state: RunState) -> None:
        """The outer state is another one altogether."""
        return

    def has_bytes_of(self, offer: Offer) -> bool:
        return True

    @property
    def computed_s(self) -> float:
        """In inner steps so far."""
        return self.phases_s - max(0.0, self.phase_until - self.world.now)

    def phase_s(self) -> float:
        duration = self.world.costs.phase_s(self.node.me) / self.speed
        self.phases_s += duration
        self.phase_until = self.world.now + duration
        return duration

    def contained_in(self, state: RunState, fragment: int) -> int:
        """Return how many cuts of a fragment the state contains."""
        return self.world.contained(self.node, state, fragment)

    def offer(self, offer: Offer) -> None:
        self.world.enter(self.node.me, lambda node, now: node.offer(offer, now))

    def when_running(self, work: Callable[[], None]) -> None:
        """Do it now, or when the island goes on; never in another life."""
        me, lives = self.node.me, self.world.lives
        self.world.when_running(me, lambda: work() if me in lives and lives[me].node is self.node else None)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        self.world.timeline.later(seconds, lambda: self.when_running(work))


class Cut(NamedTuple):
    progress: int
    samples: Ranges  # consumed since the cut before


@dataclass
class Blocking(Trainer):
    """One fragment: it waits at its sync point until a round is over, with or without its contribution."""

    cuts: list[Cut] = field(default_factory=list)
    at_sync: bool = False
    training: bool = False

    @property
    def made(self) -> tuple[int, ...]:
        return (len(self.cuts),)

    @property
    def contained(self) -> int:
        return self.contained_in(self.node.state, 0)

    def train(self) -> None:
        if self.training or self.at_sync:
            return
        samples = first(self._available(), PHASE_SAMPLES)
        if samples:
            self.training = True
            self.later(self.phase_s(), partial(self._encode, samples))

    def _available(self) -> Ranges:
        """Leased, and not used by progress that is not contained yet."""
        used = normal(part for cut in self._owed() for part in cut.samples)
        return minus(self.node.state.ledger.lease_of(holder_name(self.node.me, self.node.incarnation)), used)

    def _owed(self) -> list[Cut]:
        return self.cuts[self.contained :]

    def _encode(self, samples: Ranges) -> None:
        self.later(self.world.costs.encode_s, partial(self._reach_sync, samples))

    def _reach_sync(self, samples: Ranges) -> None:
        self.training, self.at_sync = False, True
        self.cuts.append(Cut(len(self.cuts) + 1, samples))
        self._offer()

    def _offer(self) -> None:
        owed = self._owed()[:MAX_PHASES]
        if not owed:
            self.at_sync = False
            self.train()
            return
        samples = normal(part for cut in owed for part in cut.samples)
        offer = Offer(
            0, self.contained, owed[-1].progress, TOKENS_PER_SAMPLE * size(samples), samples,
            incarnation=self.node.incarnation, late=len(self._owed()) > 1,
        )  # fmt: skip
        self.offer(offer)

    def moved(self, *, only_leases: bool) -> None:
        self.later(0.0 if only_leases else self.world.costs.apply_s, partial(self._go_on, only_leases))

    def _go_on(self, only_leases: bool) -> None:
        """A record that only admits and leases leaves an offer standing."""
        if self.at_sync and only_leases and self.node.pending:
            return
        self.node.withdraw(0)
        self.at_sync = len(self._owed()) > 1  # late progress first
        if self.at_sync:
            self._offer()
        else:
            self.train()
