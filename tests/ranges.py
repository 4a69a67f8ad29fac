"""Ranges as plain sets, to compare with."""

from diloco.elastic.protocol.ranges import Ranges


def positions(ranges: Ranges) -> set[int]:
    return {position for lo, hi in ranges for position in range(lo, hi)}
