"""Where a flat run stops to scale: what a round costs so many islands, computed by their plans and messages."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from diloco.comm.reduce.spans import MAX_MEMBERS
from diloco.elastic.protocol.liveness import FRONT
from diloco.simulate.virtual.allreduce import Cost, flat, two_level
from diloco.simulate.virtual.network import PACKED
from diloco.simulate.virtual.setting import Setting

COUNTS = (10, 30, 100, 300, 1000, 3000, 10_000)
BEGIN_BYTES = 350  # of each island, in a *begin*; a commit has as much
HEARTBEAT_BYTES = 270
HEARTBEATS = 5  # within silence_s


@dataclass(frozen=True)
class Row:
    islands: int
    flat: Cost | None  # None: a plan has at most so many members
    two_level: Cost
    flat_s: float
    two_level_s: float
    begin_s: float  # until the coordinator's uplink has sent a *begin* to everybody
    heartbeats_bits_s: float  # sent by each island if everybody tells everybody; otherwise by those of the front
    heartbeats_s: float  # of all islands, if everybody tells everybody
    front_heartbeats_s: float


def rows(setting: Setting, counts: Iterable[int] = COUNTS) -> list[Row]:
    return [_row(replace(setting, islands=count)) for count in counts]


def _row(setting: Setting) -> Row:
    n, line = setting.islands, setting.line
    whole, parts = flat(n, setting.values, setting.codec), two_level(n, setting.values, setting.codec)
    beats_s = n * HEARTBEATS / setting.silence_s
    return Row(
        n, whole if n <= MAX_MEMBERS else None, parts, whole.seconds(line, 1.0), parts.seconds(line, 1.0),
        begin_s=8 * PACKED * BEGIN_BYTES * n * n / line.up_bits_per_s,
        heartbeats_bits_s=8 * HEARTBEAT_BYTES * beats_s,
        heartbeats_s=n * beats_s, front_heartbeats_s=2 * FRONT * beats_s,
    )  # fmt: skip
