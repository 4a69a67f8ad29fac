"""The canonical order of trainable parameters, and where each lies in the flat fp32 vectors of the outer state.

Also how they are cut and grouped to travel: many small ones together, a large one in parts; and which of them are
synchronised together: blocks are dealt out to fragments, what is in no block is a fragment of its own. Pure functions.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from torch import Tensor, nn

from diloco.elastic.protocol.ranges import normal
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import ConfigError

LIMIT = (64 << 20) // 4  # fp32 values in a bucket

Box = tuple[tuple[int, int], ...]  # from, to in each dimension


@dataclass(frozen=True)
class Layout:
    """List names and shapes of parameters in canonical order, and locate each in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> "Layout":
        """Build the layout of named parameters, in the order in which they come."""
        pairs = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @classmethod
    def of_module(cls, module: nn.Module) -> "Layout":
        """Build the layout of a module's trainable parameters; frozen ones are left out."""
        return cls.of((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)

    @property
    def edges(self) -> list[int]:
        """Return where in the flat vector each parameter begins, and where the last one ends."""
        return list(accumulate(map(prod, self.shapes), initial=0))

    @property
    def size(self) -> int:
        """Return the number of values in the flat vector."""
        return self.edges[-1]

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name, and the parameter as a view into the flat vector."""
        for name, shape, (lo, hi) in zip(self.names, self.shapes, pairwise(self.edges), strict=True):
            yield name, vector[lo:hi].view(shape)


@dataclass(frozen=True)
class ParameterPiece:
    """Describe a part of a parameter that lies in one stretch of the flat vector."""

    name: str
    box: Box
    start: int  # in the flat vector

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the piece's box, one for each dimension of the parameter."""
        return tuple(hi - lo for lo, hi in self.box)

    @property
    def count(self) -> int:
        """Return the number of fp32 values in the piece."""
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Group the pieces that travel together in one transfer of bounded size."""

    pieces: tuple[ParameterPiece, ...]

    @property
    def count(self) -> int:
        """Return the number of fp32 values in all its pieces."""
        return sum(piece.count for piece in self.pieces)

    def places(self) -> Iterator[tuple[ParameterPiece, int, int]]:
        """Yield each piece, and where it begins and ends in the bucket."""
        at = 0
        for piece in self.pieces:
            yield piece, at, at + piece.count
            at += piece.count

    def stretches(self) -> list[tuple[int, int]]:
        """Return the ranges of the flat vector that the bucket covers, in order, adjacent ones joined."""
        found: list[tuple[int, int]] = []
        for piece in self.pieces:
            lo, hi = piece.start, piece.start + piece.count
            if found and found[-1][1] == lo:
                lo = found.pop()[0]
            found.append((lo, hi))
        return found


def buckets_of(layout: Layout, names: Collection[str] | None, limit: int) -> list[Bucket]:
    """Group all parameters, or those named, into buckets of at most `limit` values, in canonical order."""
    buckets: list[list[ParameterPiece]] = []
    room = 0
    for piece in _pieces(layout, names, limit):
        if not buckets or piece.count > room:
            buckets.append([])
            room = limit
        buckets[-1].append(piece)
        room -= piece.count
    return [Bucket(tuple(pieces)) for pieces in buckets]


def _pieces(layout: Layout, names: Collection[str] | None, limit: int) -> Iterator[ParameterPiece]:
    for name, shape, at in zip(layout.names, layout.shapes, layout.edges, strict=False):
        for box in _boxes(shape, limit) if names is None or name in names else ():
            piece = ParameterPiece(name, box, at)
            yield piece
            at += piece.count


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a shape into as few boxes as possible along the first dimension.

    Where one row is too large, each row is cut along the next.
    """
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


def fragments_of(layout: Layout, count: int, pattern: str, blocks: str) -> Fragments:
    """Divide the parameters into fragments: blocks are dealt out to all but the last, which has what is in no block.

    `blocks` is the name of the list of blocks: parameters are called `{blocks}.{number}.…`. strided: block l goes to
    fragment l mod (count - 1); sequential: neighbours stay together.
    """
    if count == 1:
        return Fragments.whole(layout.size)
    of_block = re.compile(re.escape(blocks) + r"\.(\d+)\.")
    numbers = [int(found[1]) if (found := of_block.match(name)) else None for name in layout.names]
    depth = max((number for number in numbers if number is not None), default=-1) + 1
    groups, rest = count - 1, any(number is None for number in numbers)
    if depth < groups or not rest:
        raise ConfigError(
            f"sync.fragments={count}: the model has {depth} blocks, and what is in none of them is a fragment of its "
            f"own: use at most {depth + 1 if rest else 1}"
        )
    parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for number, lo_hi in zip(numbers, pairwise(layout.edges), strict=True):
        parts[_group(number, groups, depth, pattern)].append(lo_hi)
    return Fragments(tuple(normal(part) for part in parts))


def names_of(layout: Layout, fragments: Fragments) -> list[frozenset[str]]:
    """Return the names of the parameters in each fragment."""
    where = dict(zip(layout.names, layout.edges, strict=False))
    return [
        frozenset(name for name, start in where.items() if any(lo <= start < hi for lo, hi in ranges))
        for ranges in fragments.ranges
    ]


def _group(number: int | None, groups: int, depth: int, pattern: str) -> int:
    if number is None:
        return groups
    return number % groups if pattern == "strided" else number * groups // depth
