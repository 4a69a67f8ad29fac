"""The fixed parts of the outer vectors that are synchronised one after the other. A single fragment is all of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from diloco.elastic.protocol.ranges import Ranges, normal, size


@dataclass(frozen=True)
class Fragments:
    """Divide the flat outer vectors into fragments, which cover every value exactly once."""

    ranges: tuple[Ranges, ...]  # of each fragment, in the flat vectors

    def __post_init__(self) -> None:
        whole = normal(part for ranges in self.ranges for part in ranges)
        assert len(whole) <= 1 and size(whole) == sum(self.counts), "fragments cover everything, and nothing twice"

    @classmethod
    def whole(cls, count: int) -> "Fragments":
        """Return the division into a single fragment of `count` values."""
        return cls((((0, count),),))

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of values in each fragment."""
        return tuple(size(ranges) for ranges in self.ranges)

    @property
    def count(self) -> int:
        """Return the number of values in all fragments together."""
        return sum(self.counts)

    def place(self, fragment: int, at: int) -> int:
        """Return where a place in the flat vectors, which belongs to a fragment, lies within that."""
        return sum(max(0, min(hi, at) - lo) for lo, hi in self.ranges[fragment])

    def pieces(self, values: Tensor, fragment: int, start: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """Yield lo, hi and the values that belong there in a full vector; `values` may begin at `start` only."""
        at = -start
        for lo, hi in self.ranges[fragment]:
            first, last = max(0, at), min(len(values), at + hi - lo)
            if first < last:
                yield lo + first - at, lo + last - at, values[first:last]
            at += hi - lo
