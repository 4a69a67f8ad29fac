"""Where islands are and how they are connected: rates of each, which may change over time, paths of each pair. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from diloco.comm.transport.link import Path


def island_name(number: int) -> str:
    return f"island-{number}"


@dataclass(frozen=True)
class Rates:
    up_bits_per_s: float
    down_bits_per_s: float


@dataclass(frozen=True)
class Site:
    """Of one island. `changes` are rates from a moment on, earliest first."""

    region: str
    rates: Rates
    changes: tuple[tuple[float, Rates], ...] = ()

    def rates_at(self, seconds: float) -> Rates:
        passed = [rates for at_s, rates in self.changes if at_s <= seconds]
        return passed[-1] if passed else self.rates


@dataclass(frozen=True)
class Topology:
    """Islands count from 1, as in their names. A pair without a path is never connected."""

    sites: tuple[Site, ...]
    paths: Mapping[frozenset[int], Path] = field(default_factory=dict)

    @classmethod
    def uniform(cls, islands: int, bits_per_s: float, delay_s: float) -> "Topology":
        sites = (Site("", Rates(bits_per_s, bits_per_s)),) * islands
        return cls(sites, {pair: Path(delay_s) for pair in pairs(islands)})

    @property
    def islands(self) -> int:
        return len(self.sites)

    def site(self, island: int) -> Site:
        return self.sites[island - 1]

    def in_region(self, name: str) -> tuple[int, ...]:
        return tuple(number for number, site in enumerate(self.sites, start=1) if site.region == name)

    @property
    def unconnected(self) -> list[frozenset[int]]:
        return [pair for pair in pairs(self.islands) if pair not in self.paths]

    def reachable(self, island: int) -> set[int]:
        """From there, by way of others too."""
        found, new = {island}, {island}
        while new:
            new = {other for pair in self.paths if pair & new for other in pair} - found
            found |= new
        return found


def pairs(islands: int) -> list[frozenset[int]]:
    return [frozenset(pair) for pair in combinations(range(1, islands + 1), 2)]


def between(one: Iterable[int], other: Iterable[int]) -> set[frozenset[int]]:
    return {frozenset((a, b)) for a in one for b in other if a != b}
