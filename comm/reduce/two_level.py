"""The all-reduce of many members: within groups, then among the owners of the same part, then within groups again.

Each contribution and the result are quantised once, as in the butterfly; sums travel in full precision in between. A
member has streams to its group and its column only, about 2 sqrt(n) instead of n, and all members get the same bytes.
"""

import threading

import torch
from torch import Tensor

from diloco.comm.reduce.allreduce import Reduction
from diloco.comm.reduce.grid import TwoLevelPlan
from diloco.comm.reduce.pages import KeptPages
from diloco.comm.reduce.spans import ReducePlan
from diloco.comm.transport.transport import Addresses, Transport
from diloco.errors import ReduceCancelled, ReduceFailed

LONG_S = 3600.0  # others may be at an earlier level yet: whoever watches the attempt knows how long that may take


class Scatter(Reduction):
    """Send contributions to the owners, who keep the means."""

    gathers = False


class Gather(Reduction):
    """Send the owners' parts of the mean to all; each owner holds its own part when it begins."""

    scatters = False


class TwoLevelReduction:
    """Run one attempt at an all-reduce on two levels, with the interface of `Reduction`."""

    def __init__(
        self, plan: TwoLevelPlan, contribution: Tensor, transport: Transport, addresses: Addresses, *, patience_s: float
    ) -> None:
        self.plan, self.levels = plan, plan.levels(transport.identity)
        self._transport, self._addresses = transport, addresses
        self._lock = threading.Lock()
        self._cancelled = ""
        scatter = Scatter(self.levels.scatter, contribution, transport, addresses, patience_s=patience_s)
        self._begun: list[Reduction] = [scatter]
        self.kept: dict[str, KeptPages] = {}  # nothing: the next attempt begins anew

    def run(self) -> Tensor:
        """Run the levels one after the other and return the encoded mean. Once only, as with `Reduction`."""
        scatter, column, gather = self.levels.scatter, self.levels.column, self.levels.gather
        try:
            sums = self._begun[0].run()
            result = torch.empty(gather.result_codec.size(gather.count), dtype=torch.uint8)
            if column is not None:
                part = scatter.spans[scatter.members.index(self._transport.identity)]
                room = result[gather.result_bytes_of(part)]
                self._run_level(Reduction, column, sums[scatter.result_bytes_of(part)], room)
            return self._gather(gather, result)
        finally:
            for plan in filter(None, (scatter, column, gather)):
                self._transport.forget(plan.channel)

    def _gather(self, plan: ReducePlan, result: Tensor) -> Tensor:
        """Run the last level. What fails there is this group's trouble alone: all others get the same mean."""
        try:
            return self._run_level(Gather, plan, result, result)
        except ReduceFailed as failed:
            failed.local = True
            raise

    def _run_level(self, kind: type[Reduction], plan: ReducePlan, values: Tensor, room: Tensor) -> Tensor:
        level = kind(plan, values, self._transport, self._addresses, result=room, patience_s=LONG_S)
        with self._lock:
            if self._cancelled:
                raise ReduceCancelled(self._cancelled)
            self._begun.append(level)
        return level.run()

    def cancel(self, reason: str = "cancelled") -> None:
        """Give up the present level, and start no later one."""
        with self._lock:
            self._cancelled = f"{self.plan.channel}: {reason}"
            level = self.level
        level.cancel(reason)

    @property
    def level(self) -> Reduction:
        """Return the reduction that was begun last: the one at work."""
        return self._begun[-1]

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent so far on all levels that have begun."""
        return sum(level.bytes_sent for level in self._begun)

    @property
    def bytes_received(self) -> int:
        """Return the bytes of contributions and results that have come in this attempt so far."""
        return sum(level.bytes_received for level in self._begun)
