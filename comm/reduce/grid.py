"""The plan of an all-reduce on two levels, for members so many that one butterfly would have too many streams.

Pure; two_level.py carries it out. Members stand in a grid. Groups are its rows: each adds up its contributions, a part
of the vector at each member. Columns hold the same part of all groups' sums: they reduce those among themselves, and
the mean goes back through the groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TypeVar

from diloco.comm.codec.noise import NoiseKey
from diloco.comm.reduce.spans import Coded, ReducePlan, Span, chunk_pages_for, spans_by_bandwidth
from diloco.errors import CodecError, PlanRefused

EXACT = "fp32"  # how sums travel between groups: each contribution, and the mean, are rounded once
MAX_MEMBERS = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True)
class Grid:
    """Place members, by their index in the plan, in groups and columns.

    One that is left over has no column: it owns nothing, in one of the groups.
    """

    groups: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


def grid_of(bytes_per_s: Sequence[float]) -> Grid:
    """Place members in nearly as many groups as columns, by the rates of their links.

    Members of a column have links that are alike, so that no group is a slow one and a column's part can be sized by
    them.
    """
    n = len(bytes_per_s)
    rows = isqrt(n)
    order = sorted(range(n), key=lambda member: (-bytes_per_s[member], member))
    columns = tuple(tuple(order[k * rows : (k + 1) * rows]) for k in range(n // rows))
    over = order[len(columns) * rows :]
    groups = (tuple(column[row] for column in columns) + tuple(over[row : row + 1]) for row in range(rows))
    return Grid(tuple(groups), columns)


@dataclass(frozen=True)
class Levels:
    """Hold the three plans that one member takes part in."""

    scatter: ReducePlan  # contributions, within its group
    column: ReducePlan | None  # exact sums; None where it owns nothing
    gather: ReducePlan  # the mean, within its group


@dataclass(frozen=True)
class TwoLevelPlan(Coded):
    """Describe one attempt at a mean on two levels. The order of additions, and so the bytes, follow from it alone."""

    channel: str
    members: tuple[str, ...]
    weights: tuple[int, ...]
    bytes_per_s: tuple[float, ...]  # of their links
    count: int
    codec_name: str
    key: NoiseKey
    result_codec_name: str = ""
    norms: tuple[float, ...] = ()  # that contributions have, as their offers say; empty: nobody says

    def __post_init__(self) -> None:
        n = len(self.members)
        if not 1 < n <= MAX_MEMBERS or len(set(self.members)) != n:
            raise PlanRefused(f"{self.channel}: a plan of two levels has 2 to {MAX_MEMBERS} members, each once")
        if len(self.norms) not in (0, n):
            raise PlanRefused(f"{self.channel}: each contribution has a norm")
        if not len(self.weights) == len(self.bytes_per_s) == n or min(self.bytes_per_s) <= 0 or self.count <= 0:
            raise PlanRefused(f"{self.channel}: each member has a weight and a rate, and there is something to reduce")
        try:
            self.levels(self.members[0])  # each is looked at by its own rules, too
        except CodecError as unknown:
            raise PlanRefused(f"{self.channel}: {unknown}") from None

    @cached_property
    def grid(self) -> Grid:
        """Return the groups and columns that follow from the rates of the links."""
        return grid_of(self.bytes_per_s)

    @cached_property
    def parts(self) -> tuple[Span, ...]:
        """Return the columns' parts of the vector, sized by the slowest link of each column."""
        return spans_by_bandwidth(self.count, [min(_of(column, self.bytes_per_s)) for column in self.grid.columns])

    def levels(self, member: str) -> Levels:
        """Return the plans of one member; where it owns nothing, it has none for a column."""
        index = self.members.index(member)
        row = next(row for row, group in enumerate(self.grid.groups) if index in group)
        column = next((k for k, column in enumerate(self.grid.columns) if index in column), None)
        owns = column is not None and self.parts[column].lo < self.parts[column].hi
        result = self.result_codec.name
        return Levels(
            self._in_group(row, "scatter", self.codec_name, EXACT, self.norms),
            self._in_column(column) if column is not None and owns else None,
            self._in_group(row, "gather", result, result),
        )

    def _in_group(self, row: int, step: str, codec: str, result: str, norms: tuple[float, ...] = ()) -> ReducePlan:
        group = self.grid.groups[row]
        spans = self.parts + (Span(self.count, self.count),) * (len(group) - len(self.parts))
        names, weights = _of(group, self.members), _of(group, self.weights)
        pages, norms = chunk_pages_for(self.parts), _of(group, norms) if norms else ()
        return ReducePlan(f"{self.channel}/{step}", names, weights, spans, codec, self.key, pages, result, norms=norms)

    def _in_column(self, k: int) -> ReducePlan:
        part, column = self.parts[k], self.grid.columns[k]
        inside = spans_by_bandwidth(part.hi - part.lo, _of(column, self.bytes_per_s))
        spans = tuple(Span(part.lo + span.lo, part.lo + span.hi) for span in inside)
        weights = tuple(sum(_of(group, self.weights)) for group in self.grid.groups)
        return ReducePlan(
            f"{self.channel}/column", _of(column, self.members), weights, spans, EXACT, self.key,
            chunk_pages_for(spans), self.result_codec.name, start=part.lo,
        )  # fmt: skip


def _of(members: Sequence[int], each: Sequence[T]) -> tuple[T, ...]:
    return tuple(each[member] for member in members)
