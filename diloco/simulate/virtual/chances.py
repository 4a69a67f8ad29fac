"""Draw how long things take in a disaster: short times, by chance. Clocks differ, and some messages come twice."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial

from diloco.elastic.protocol.messages import Begin, Message
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.simulate.virtual.costs import Costs, Timeline
from diloco.simulate.virtual.trainer import USUAL, SyncPace
from diloco.simulate.virtual.world import Pair, World, decide

SILENCE_S = 2.0
REJOIN_S = 12.0
PHASE_S = 3.0
ENCODE_S = 0.5
TICK_S = 0.35
SMOOTH_TICK_S = 0.25  # scenarios are few, and can be finer


@dataclass(frozen=True)
class DisasterConfig:
    """Describe the world of a disaster: islands, partition policy, seed, rules and pace."""

    islands: int = 4
    partition: str = "merge"
    seed: int = 0
    rules: Rules = ALL
    pace: SyncPace = USUAL
    smooth: bool = False  # no chance at all: for scenarios
    harsh: bool = False  # long exchanges, slow disks, lost messages
    min_islands: int = 1
    flat_up_to: int = 64

    @property
    def names(self) -> tuple[str, ...]:
        """Name the islands by letters: A, B, C, …"""
        return tuple(chr(ord("A") + index) for index in range(self.islands))


class Chances(Costs):
    """Draw all times by chance; on a smooth timeline they are fixed."""

    joins_within_s = 2 * SILENCE_S
    unreachable_s = SILENCE_S

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._chance, self._clocks = timeline.chance, cache(self._clock_of)
        self._arrival: defaultdict[Pair, float] = defaultdict(float)

    def send(self, world: World, sender: str, to: str, message: Message) -> None:
        """Deliver messages of a pair in order; some come once more, late."""
        chance = self._chance(f"link {sender}{to}")
        delay = 0.01 if self.timeline.smooth else 0.005 + 0.1 * chance**3
        arrival = self._arrival[sender, to] = max(self._arrival[sender, to], self.timeline.now + delay)
        deliver = partial(world.deliver, sender, to, message)
        self.timeline.at(arrival, deliver)
        if chance > 0.98:
            self.timeline.after(20 * self._chance("late"), deliver)

    def clock(self, name: str) -> float:
        """Return the time by an island's own clock, which starts and runs differently from others."""
        start, pace = self._clocks(name)
        return start + pace * self.timeline.now

    def _clock_of(self, name: str) -> tuple[float, float]:
        """Draw where an island's clock starts and how fast it runs: speeds differ slightly."""
        if self.timeline.smooth:
            return 0.0, 1.0
        skew = self._chance(f"clock {name}")
        return 10_000 * skew, 0.97 + 0.06 * skew

    def tick_s(self, node: Node, islands: int) -> float:
        """Draw the time to the next tick, within 20 % of 0.35 s; fixed and finer on a smooth timeline."""
        return SMOOTH_TICK_S if self.timeline.smooth else TICK_S * (0.8 + 0.4 * self._chance(f"tick {node.me}"))

    def phase_s(self, name: str) -> float:
        """Draw the duration of a phase; now and then it takes five times as long, unless the faults are over."""
        duration = PHASE_S * (0.6 + 0.8 * self._chance(f"phase {name}"))
        return duration * (5 if self._chance(f"slow {name}") < 0.05 and not self.calm else 1)

    def encode_s(self, name: str) -> float:
        """Draw how long encoding takes: up to 0.5 s, and nothing on a smooth timeline."""
        return 0.0 if self.timeline.smooth else ENCODE_S * self._chance(f"encode {name}")

    def fetch_s(self) -> float:
        return 0.05 + 0.3 * self._chance("fetch")

    def catch_up_s(self, name: str, missed: int) -> float:
        """Draw a duration that does not depend on how many rounds were missed."""
        return 0.1 + 1.5 * self._chance("catch up")

    def closed_s(self, gone: Node, other: Node) -> float | None:
        """Draw when another island notices a closed connection; in a fifth of the cases it never does."""
        return 0.05 + 0.2 * self._chance("closed") if self._chance("noticed") < 0.8 else None

    def connect_s(self, begin: Begin) -> float:
        return self.joins_within_s

    def spread(self, what: str) -> float:
        """Draw how far the bytes of a member have come: within a tenth of what is usual."""
        return 0.9 + 0.2 * self._chance(what)

    def reduce_s(self, begin: Begin) -> list[float]:
        """Draw for each member how long the all-reduce takes it: 0.2 to 1.2 s, or about what an exchange takes."""
        scale, least, more = (self.exchange_s, 0.9, 0.2) if self.exchange_s else (1.0, 0.2, 1.0)
        return [scale * (least + more * self._chance(f"reduce {member}")) for member in begin.members]

    def failure_s(self, *, first: bool) -> float:
        """Draw when a member learns of a failed all-reduce; the one that noticed it knows almost at once."""
        return 0.02 if first else 0.05 + 0.1 * self._chance("fails")


def disaster_world(setup: DisasterConfig, costs: Costs) -> World:
    """Build a world whose times are drawn by chance and whose transcript records every effect."""
    options = Options(
        decide,
        silence_s=SILENCE_S,
        min_islands=setup.min_islands,
        partition=setup.partition,
        rejoin_s=REJOIN_S,
        fragments=setup.pace.fragments,
        want=setup.pace.want,
        flat_up_to=setup.flat_up_to,
    )
    world = World(setup.names, options, costs, rules=setup.rules, pace=setup.pace)
    world.observers.append(world.transcript.see)
    return world
