"""Draw the faults of a soak from a seed. Pure: the same seed always draws the same faults.

Kinds come out of a bag that holds each of them as often as its weight says, so that a short soak has every kind, too.
Durations are drawn evenly on a logarithmic scale: most are short, and some outlast every timeout of the product.
"""

import math
import random
from dataclasses import dataclass

WEIGHTS = {
    "kill": 5, "leave": 2, "skew": 1, "stop": 3, "freeze": 2, "daemon": 2, "cut": 3, "pair": 2, "one-way": 2,
    "slow": 2, "join": 1, "depart": 1,
}  # fmt: skip
ENDS_PROCESS = ("kill", "leave", "skew", "depart")
CUTS = ("cut", "pair", "one-way")
AWAY_S, STOP_S, CUT_S, SLOW_S = (1.0, 60.0), (1.0, 60.0), (5.0, 150.0), (5.0, 60.0)
AT_ONCE = 0.25  # the share of restarts that follow immediately
SKEW_S = (1.0, 30.0)
SLOW_BITS_PER_S = (256e3, 10e6)
START_S = 20.0  # of a process on a busy machine: so long it counts as away
LEAST = 3  # islands that stay, whoever departs
SMALL_CUTS = 2  # pairs and one-way cuts at a time
SPARED = 2  # islands whose processes live through the second half: only there do leaks show

Link = tuple[int, int]  # sender, receiver


@dataclass(frozen=True)
class Fault:
    """Describe one fault: its kind, when it begins and is healed, and whom it hits. Islands count from 1."""

    kind: str  # a key of WEIGHTS
    at_s: float
    until_s: float  # of a kill or a leave: when the process is started again
    islands: tuple[int, ...]
    others: tuple[int, ...] = ()  # the other side of a cut
    amount: float = 0.0  # skew: seconds; slow: bits per second

    @property
    def links(self) -> frozenset[Link]:
        """Return the links that a cut severs, each with its direction."""
        if self.kind not in CUTS:
            return frozenset()
        there = {(one, other) for one in self.islands for other in self.others}
        return frozenset(there if self.kind == "one-way" else there | {(b, a) for a, b in there})

    def describe(self) -> str:
        """Describe the fault in words, for the report."""
        who, others = _names(self.islands), _names(self.others)
        lasts, back = (f"{word} {self.until_s - self.at_s:.0f} s" for word in ("for", "back after"))
        match self.kind:
            case "kill":
                return f"{who}: SIGKILL, {back}"
            case "leave":
                return f"{who}: SIGTERM, {back}"
            case "skew":
                return f"{who}: SIGKILL, back at once with its clock {self.amount:+.0f} s off"
            case "stop":
                return f"{who}: SIGSTOP {lasts}"
            case "freeze":
                return f"{who}: SIGSTOP, its p2pd too, {lasts}"
            case "daemon":
                return f"{who}: SIGKILL of its p2pd"
            case "one-way":
                return f"{who} no longer reaches {others} {lasts}"
            case "cut" | "pair":
                return f"{who} | {others} cut {lasts}"
            case "slow":
                return f"{who}: link of {self.amount / 1e6:.2g} Mbit/s {lasts}"
            case "join":
                return f"{who} joins"
        return f"{who} leaves for good"


def _names(islands: tuple[int, ...]) -> str:
    return ", ".join(map(str, islands))


@dataclass(frozen=True)
class PlanConfig:
    """Specify a soak: its seed and islands, how long it takes, and seconds between two faults."""

    seed: int
    islands: int
    seconds: float
    every_s: float = 5.0
    one_way: bool = True  # whether the network can be cut in one direction

    @property
    def most(self) -> int:
        """Return how many islands there can be over all, newcomers included."""
        return self.islands + max(1, self.islands // 3)


def draw_faults(config: PlanConfig) -> tuple[Fault, ...]:
    """Draw all faults of a soak, in order. None of them lasts longer than the soak."""
    planner = _Planner(config)
    count = math.ceil(config.seconds / config.every_s)
    drawn = (planner.draw(number * config.every_s) for number in range(1, count))
    return tuple(fault for fault in drawn if fault is not None)


class _Planner:
    """Keep track of what the faults so far have left, so that the next one can happen."""

    def __init__(self, config: PlanConfig) -> None:
        self._config, self._chance = config, random.Random(config.seed)
        self._present = list(range(1, config.islands + 1))
        self._joined = self._departed = 0
        self._away_until: dict[int, float] = {}
        self._cut_until, self._small_until, self._slow_until = 0.0, [0.0] * SMALL_CUTS, dict[int, float]()
        self._spared = set(self._chance.sample(self._present, min(SPARED, config.islands - 1)))
        self._bag: list[str] = []

    def draw(self, at_s: float) -> Fault | None:
        """Draw the fault of this moment: the first kind in the bag that is possible now; None if none is."""
        if not self._bag:
            kinds = {kind: weight for kind, weight in WEIGHTS.items() if kind != "one-way" or self._config.one_way}
            self._bag = [kind for kind, weight in kinds.items() for _ in range(weight)]
            self._chance.shuffle(self._bag)
        for kind in dict.fromkeys(self._bag):
            if (fault := self._try(kind, at_s)) is not None:
                self._bag.remove(kind)
                return fault
        return None

    def _try(self, kind: str, at_s: float) -> Fault | None:
        if kind == "join":
            return self._join(at_s)
        if kind == "cut":
            return self._cut(at_s)
        if kind in CUTS:
            return self._small_cut(kind, at_s)
        victims = self._victims(kind, at_s)
        return self._strike(kind, at_s, self._chance.choice(victims)) if victims else None

    def _victims(self, kind: str, at_s: float) -> list[int]:
        """List the islands that this kind can hit now: less than half of all are away at a time."""
        there = [island for island in self._present if self._away_until.get(island, 0.0) <= at_s]
        if kind == "slow":
            return [island for island in there if self._slow_until.get(island, 0.0) <= at_s]
        if kind == "daemon":
            return there
        if len(self._present) - len(there) >= (len(self._present) - 1) // 2:
            return []
        if kind == "depart" and (self._departed > self._joined or len(self._present) <= LEAST):
            return []
        late = at_s + AWAY_S[1] + START_S > self._config.seconds / 2
        spare = kind == "depart" or (late and kind in ENDS_PROCESS)
        return [island for island in there if not (spare and island in self._spared)]

    def _strike(self, kind: str, at_s: float, island: int) -> Fault:
        until_s, amount = at_s, 0.0
        match kind:
            case "kill" | "leave":
                until_s = self._until(at_s, *AWAY_S) if self._chance.random() >= AT_ONCE else at_s
            case "skew":
                amount = self._between(*SKEW_S) * self._chance.choice((-1, 1))
            case "stop" | "freeze":
                until_s = self._until(at_s, *STOP_S)
            case "slow":
                until_s, amount = self._until(at_s, *SLOW_S), self._between(*SLOW_BITS_PER_S)
                self._slow_until[island] = until_s
            case "depart":
                self._present.remove(island)
                self._departed += 1
        if kind in ENDS_PROCESS:
            self._away_until[island] = until_s + START_S
        elif kind in ("stop", "freeze"):
            self._away_until[island] = until_s
        return Fault(kind, at_s, until_s, (island,), amount=amount)

    def _join(self, at_s: float) -> Fault | None:
        number = self._config.islands + self._joined + 1
        if number > self._config.most or at_s + START_S > self._config.seconds:
            return None
        self._joined += 1
        self._present.append(number)
        self._away_until[number] = at_s + 2 * START_S
        return Fault("join", at_s, at_s, (number,))

    def _cut(self, at_s: float) -> Fault | None:
        """Cut the islands into two groups; one such cut at a time."""
        if at_s < self._cut_until or len(self._present) < 2:
            return None
        self._cut_until = self._until(at_s, *CUT_S)
        size = self._chance.randint(1, len(self._present) // 2)
        one = tuple(sorted(self._chance.sample(self._present, size)))
        other = tuple(island for island in self._present if island not in one)
        return Fault("cut", at_s, self._cut_until, one, other)

    def _small_cut(self, kind: str, at_s: float) -> Fault | None:
        if len(self._present) < 2 or (free := min(self._small_until)) > at_s:
            return None
        self._small_until.remove(free)
        self._small_until.append(until_s := self._until(at_s, *CUT_S))
        one, other = self._chance.sample(self._present, 2)
        return Fault(kind, at_s, until_s, (one,), (other,))

    def _until(self, at_s: float, least: float, most: float) -> float:
        return min(at_s + self._between(least, most), self._config.seconds)

    def _between(self, least: float, most: float) -> float:
        """Draw a number evenly on a logarithmic scale."""
        return math.exp(self._chance.uniform(math.log(least), math.log(most)))
