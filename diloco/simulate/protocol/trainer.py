"""An island's trainer, reduced to numbers: phases take time, end in a cut, and are offered until they are contained."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.elastic.protocol.messages import Effect
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.elastic.protocol.record import Offer, Record, holder_name
from diloco.elastic.protocol.state import RunState
from diloco.simulate.protocol.timeline import Timeline

PHASE_S = 3.0
PHASE_SAMPLES = 8
TOKENS_PER_SAMPLE = 10
MAX_PHASES = 2  # in one contribution: what comes late comes in small pieces, oldest first

Input = Callable[[Node, float], list[Effect]]


@dataclass
class Trainer(ABC):
    node: Node
    timeline: Timeline
    enter: Callable[[Input], None]  # gives the node an input, or keeps it until the island goes on
    when_running: Callable[[Callable[[], None]], None]
    contained_in: Callable[[RunState, int], int]  # how many cuts of a fragment
    speed: float = 1.0

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

    def phase_s(self) -> float:
        name, timeline = self.node.me, self.timeline
        duration = PHASE_S * (0.6 + 0.8 * timeline.chance(f"phase {name}")) / self.speed
        return duration * (5 if timeline.chance(f"slow {name}") < 0.05 else 1)


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
        if not samples:
            return
        self.training = True
        self.timeline.after(self.phase_s(), lambda: self.when_running(lambda: self._reach_sync(samples)))

    def _available(self) -> Ranges:
        """Leased, and not used by progress that is not contained yet."""
        used = normal(part for cut in self._owed() for part in cut.samples)
        return minus(self.node.state.ledger.lease_of(holder_name(self.node.me, self.node.incarnation)), used)

    def _owed(self) -> list[Cut]:
        return self.cuts[self.contained :]

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
        self.enter(lambda node, now: node.offer(offer, now))

    def moved(self, *, only_leases: bool) -> None:
        """A record that only admits and leases leaves an offer standing."""
        if self.at_sync and only_leases and self.node.pending:
            return
        self.node.withdraw(0)
        self.at_sync = len(self._owed()) > 1  # late progress first
        if self.at_sync:
            self._offer()
        else:
            self.train()
