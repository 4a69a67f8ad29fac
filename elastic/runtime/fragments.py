"""The fixed parts of the outer vectors that are synchronised one after the other. One part is all of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from diloco.elastic.protocol.ranges import Ranges, normal, size


@dataclass(frozen=True)
class Fragments:
    ranges: tuple[Ranges, ...]  # of each fragment, in the flat vectors

    def __post_init__(self) -> None:
        whole = normal(part for ranges in self.ranges for part in ranges)
        assert len(whole) <= 1 and size(whole) == sum(self.counts), "fragments cover everything, and nothing twice"

    @classmethod
    def whole(cls, count: int) -> "Fragments":
        return cls((((0, count),),))

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(size(ranges) for ranges in self.ranges)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def scatter(self, values: Tensor, vector: Tensor, fragment: int) -> None:
        for lo, hi, part in self.pieces(values, fragment):
            vector[lo:hi].copy_(part)

    def pieces(self, values: Tensor, fragment: int, start: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Yield where the values of a fragment's own vector belong; `values` may be those from `start` on only."""
        at = -start
        for lo, hi in self.ranges[fragment]:
            first, last = max(0, at), min(len(values), at + hi - lo)
            if first < last:
                yield lo + first - at, lo + last - at, values[first:last]
            at += hi - lo
