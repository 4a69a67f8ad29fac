"""Cut links for ever, and see whether rounds go on among those who can still agree."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, permutations

from diloco.elastic.protocol.record import quorum
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.simulate.virtual.chances import PHASE_S, SILENCE_S, Chances, DisasterConfig, disaster_world
from diloco.simulate.virtual.costs import Timeline
from diloco.simulate.virtual.harsh import SteadyChances
from diloco.simulate.virtual.world import Pair, World

BEFORE_S = 20.0
EXCHANGES = (0.2, 1.0, 5.0)  # times silence_s
ROUNDS = 6  # of time that is given; two of them must come


@dataclass(frozen=True)
class Topology:
    """Describe which directed links are cut for ever, among how many islands, and how long exchanges take."""

    seed: int
    islands: int
    cut: frozenset[Pair]
    exchange_s: float

    @property
    def names(self) -> tuple[str, ...]:
        """Name the islands by letters, in the order of the roster."""
        return DisasterConfig(self.islands).names

    @property
    def could_work(self) -> bool:
        """Return whether somebody is linked to enough others for a quorum, itself included."""
        return any(quorum(self.names, {name, *self._linked(name)}) for name in self.names)

    def _linked(self, name: str) -> Iterable[str]:
        return (other for other in self.names if not {(name, other), (other, name)} & self.cut and other != name)


def draw(seed: int, islands: int | None = None) -> Topology:
    """Draw a topology in which a quorum could work."""
    chance = random.Random(f"{seed}/cuts")
    while True:
        count = islands or chance.randint(3, 9)
        names, share, one_way = DisasterConfig(count).names, chance.uniform(0.05, 0.6), chance.random() < 0.4
        pairs = permutations(names, 2) if one_way else combinations(names, 2)
        cut = {pair for pair in pairs if chance.random() < share}
        whole = frozenset(cut if one_way else cut | {(other, one) for one, other in cut})
        topology = Topology(seed, count, whole, SILENCE_S * chance.choice(EXCHANGES))
        if whole and topology.could_work:
            return topology


def world_of(topology: Topology, rules: Rules = ALL, partition: str = "quorum") -> World:
    """Build a world with this topology's exchanges, whose links are all whole at first."""
    setup = DisasterConfig(topology.islands, partition, topology.seed, rules)
    costs: Chances = SteadyChances(Timeline(topology.seed, smooth=False), topology.exchange_s)
    world = disaster_world(setup, costs)
    world.found(topology.names)
    return world


def updates_under(topology: Topology, rules: Rules = ALL, *, rounds: int = ROUNDS) -> tuple[int, World]:
    """Return how many updates are committed from the cut on, in the time of so many undisturbed rounds."""
    world = world_of(topology, rules)
    world.timeline.run(BEFORE_S + 2 * topology.exchange_s)
    world.sever(topology.cut)
    before = world.newest.updates
    world.timeline.run(world.now + 12 * SILENCE_S + rounds * (PHASE_S + 2 * SILENCE_S + 2 * topology.exchange_s))
    return world.newest.updates - before, world
