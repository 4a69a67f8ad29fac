"""Sets of sample positions as sorted, disjoint, half-open ranges."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def normal(ranges: Iterable[Range]) -> Ranges:
    """Return the ranges sorted, without empty ones, and joined where they touch or overlap."""
    joined: list[Range] = []
    for lo, hi in sorted(ranges):
        if joined and lo <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        elif lo < hi:
            joined.append((lo, hi))
    return tuple(joined)


def is_normal(ranges: Ranges) -> bool:
    """Return whether ranges are sorted, not empty, not negative, and apart from each other."""
    return all(0 <= lo < hi for lo, hi in ranges) and all(one[1] < other[0] for one, other in pairwise(ranges))


def size(ranges: Ranges) -> int:
    """Return how many positions the ranges contain together."""
    return sum(hi - lo for lo, hi in ranges)


def minus(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the positions that are in `ranges` but not in `others`; both must be normal."""
    left: list[Range] = []
    for lo, hi in ranges:
        for place in range(bisect_right(others, lo, key=lambda other: other[1]), len(others)):
            other_lo, other_hi = others[place]
            if other_lo >= hi:
                break
            if lo < other_lo:
                left.append((lo, other_lo))
            lo = other_hi
        if lo < hi:
            left.append((lo, hi))
    return tuple(left)


def both(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the positions that are in `ranges` as well as in `others`."""
    return minus(ranges, minus(ranges, others))


def first(ranges: Ranges, count: int) -> Ranges:
    """Return the lowest `count` positions, or all if there are fewer."""
    taken: list[Range] = []
    for lo, hi in ranges:
        if count <= 0:
            break
        taken.append((lo, min(hi, lo + count)))
        count -= hi - lo
    return tuple(taken)
