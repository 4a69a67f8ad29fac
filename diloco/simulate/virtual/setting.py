"""What is modelled: how long islands compute, how fast their links are, how often they fail."""

import math
from dataclasses import dataclass, field

from diloco.elastic.runtime.reducing import FLAT_UP_TO
from diloco.plan.predict import Host, Line

DAY_S = 86400.0
REGIONS = 8  # islands are spread around the world: each region has its own time of day
NAME_CHARS = 52  # of a peer's identity, which messages carry many times


@dataclass(frozen=True)
class Setting:
    islands: int
    line: Line = field(default_factory=lambda: Line(100e6, 100e6, 0.04))  # of each
    values: int = 150_000_000  # in one round
    codec: str = "int8"
    phase_s: float = 300.0  # of inner steps, between two rounds
    spread: float = 0.1  # the slowest needs so much longer
    jitter: float = 0.02  # of every phase
    mtbf_s: float | None = None  # between two failures, of all islands together
    back_s: float = 300.0  # until a failed island is back, on average
    silent: float = 0.5  # of failures: nobody hears a connection close
    diurnal: float = 0.0  # of the rate is lost at the worst time of the day
    seconds: float = 3600.0
    seed: int = 0
    silence_s: float = 5.0
    straggler: float = 1.5
    two_level: bool | None = None  # how vectors are reduced; None: as real islands do, by their number
    flat_up_to: int = 64  # heartbeats, see diloco.elastic.protocol.liveness
    host: Host = field(default_factory=Host.of_gpus)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(name_of, range(self.islands)))

    def reduces_in_two_levels(self, members: int) -> bool:
        return members > FLAT_UP_TO if self.two_level is None else self.two_level

    def pace(self, index: int) -> float:
        """How much longer than the fastest this island computes: evenly spread, in no order."""
        return 1 + self.spread * ((index * 0.618034) % 1)

    def rate(self, index: int, now: float) -> float:
        """What is left of its line at this time of its day."""
        noon = now / DAY_S + (index % REGIONS) / REGIONS
        return 1 - self.diurnal * (1 - math.cos(2 * math.pi * noon)) / 2


def name_of(index: int) -> str:
    return str(index).zfill(NAME_CHARS)
