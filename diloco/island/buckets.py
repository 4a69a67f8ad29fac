"""How parameters are cut and grouped to travel: many small ones together, a large one in parts. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from diloco.island.layout import Layout

LIMIT = (64 << 20) // 4  # fp32 values in a bucket

Box = tuple[tuple[int, int], ...]  # from, to in each dimension


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that lies in one stretch of the flat vector."""

    name: str
    box: Box
    start: int  # in the flat vector

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.box)

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    pieces: tuple[Piece, ...]

    @property
    def count(self) -> int:
        return sum(piece.count for piece in self.pieces)

    def places(self) -> Iterator[tuple[Piece, int, int]]:
        """Each piece, and where it lies in the bucket."""
        at = 0
        for piece in self.pieces:
            yield piece, at, at + piece.count
            at += piece.count

    def stretches(self) -> list[tuple[int, int]]:
        """Of the flat vector, in order."""
        found: list[tuple[int, int]] = []
        for piece in self.pieces:
            lo, hi = piece.start, piece.start + piece.count
            if found and found[-1][1] == lo:
                lo = found.pop()[0]
            found.append((lo, hi))
        return found


def buckets_of(layout: Layout, names: Collection[str] | None, limit: int) -> list[Bucket]:
    """All parameters or those named, in canonical order."""
    buckets: list[list[Piece]] = []
    room = 0
    for piece in _pieces(layout, names, limit):
        if not buckets or piece.count > room:
            buckets.append([])
            room = limit
        buckets[-1].append(piece)
        room -= piece.count
    return [Bucket(tuple(pieces)) for pieces in buckets]


def _pieces(layout: Layout, names: Collection[str] | None, limit: int) -> Iterator[Piece]:
    start = 0
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if names is None or name in names:
            at = start
            for box in _boxes(shape, limit):
                yield Piece(name, box, at)
                at += prod(hi - lo for lo, hi in box)
        start += prod(shape)


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """As few as possible along the first dimension; where one row is too large, row by row along the next."""
    row = prod(shape[1:])
    if not shape or shape[0] * row <= limit:
        yield tuple((0, length) for length in shape)
    elif row > limit:
        for index in range(shape[0]):
            yield from (((index, index + 1), *rest) for rest in _boxes(shape[1:], limit))
    else:
        rows = limit // row
        rest = tuple((0, length) for length in shape[1:])
        yield from (((lo, min(lo + rows, shape[0])), *rest) for lo in range(0, shape[0], rows))
