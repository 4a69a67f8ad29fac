"""Model what an all-reduce costs a member: bytes, frames, connections, time, by the spans of real islands."""

from dataclasses import dataclass, replace
from functools import cache

from diloco.comm.codec.noise import PAGE
from diloco.comm.codec.registry import codec_named, result_codec_for
from diloco.comm.reduce.grid import EXACT, grid_of
from diloco.comm.reduce.spans import Span, chunk_pages_for, spans_by_bandwidth
from diloco.plan.predict import LinkModel

FRAME_S = 60e-6  # of one thread's time, to send or to take in a frame; measured on 2 ARM cores


@dataclass(frozen=True)
class Level:
    """Describe one pass of streams, for the member with the most to do."""

    sent: int
    received: int
    frames: int  # sent and received
    hops: int


@dataclass(frozen=True)
class Cost:
    """Describe what an all-reduce costs a member, level by level."""

    levels: tuple[Level, ...]
    connections: int  # of a member, to others and from others

    @property
    def sent(self) -> int:
        """Return the bytes that a member sends on all levels."""
        return sum(level.sent for level in self.levels)

    def seconds(self, line: LinkModel, share: float) -> float:
        """Return the duration on links of which only this share of the rate is available."""
        rest = LinkModel(line.up_bits_per_s * share, line.down_bits_per_s * share, line.delay_s)
        return sum(max(_transfer_s(level, rest), level.frames * FRAME_S) for level in self.levels)


def _transfer_s(level: Level, line: LinkModel) -> float:
    """Return the seconds on the link; where nothing comes back, there is one delay."""
    if level.hops == 2:
        return line.reduce_s(level.sent, level.received)
    return line.delay_s + replace(line, delay_s=0.0).reduce_s(level.sent, level.received)


@cache
def flat(members: int, values: int, codec: str) -> Cost:
    """Return the cost of the butterfly: contributions to all owners, means from all of them."""
    result = result_codec_for(codec, members)
    level = _level(spans_by_bandwidth(values, [1.0] * members), members, codec, result, hops=2)
    return Cost((level,), 2 * (members - 1))


@cache
def two_level(members: int, values: int, codec: str) -> Cost:
    """Return the cost of reducing in groups first.

    A sum in each group, a butterfly among those who hold the same part of it, and back through the group.
    """
    grid, result = grid_of([1.0] * members), result_codec_for(codec, members)
    size = max(map(len, grid.groups))
    spans = spans_by_bandwidth(values, [1.0] * len(grid.columns))
    widest = max(spans, key=lambda span: span.hi - span.lo)
    part = spans_by_bandwidth(widest.hi - widest.lo, [1.0] * len(grid.groups))
    levels = (
        _level(spans, size, codec, "", hops=1),
        _level(part, len(grid.groups), EXACT, result, hops=2),
        _level(spans, size, "", result, hops=1),
    )
    return Cost(levels, 2 * (size - 1 + len(grid.groups) - 1))


def _level(spans: tuple[Span, ...], members: int, codec: str, result: str, *, hops: int) -> Level:
    """Return the cost of one pass; an empty codec means that this direction does not travel."""
    lengths = [span.hi - span.lo for span in spans]
    given, meant = (_sizes(lengths, name) for name in (codec, result))
    chunk = chunk_pages_for(spans) * PAGE
    chunks = [-(-length // chunk) for length in lengths]
    others, both = members - 1, bool(codec) + bool(result)
    sent = max(sum(given) - own + others * mean for own, mean in zip(given, meant, strict=True))
    received = max(others * own + sum(meant) - mean for own, mean in zip(given, meant, strict=True))
    return Level(sent, received, both * (sum(chunks) + others * max(chunks)), hops)


def _sizes(lengths: list[int], codec: str) -> list[int]:
    """Return the encoded bytes of each length; 0 without a codec."""
    size = codec_named(codec).size if codec else lambda length: 0
    return [size(length) for length in lengths]
