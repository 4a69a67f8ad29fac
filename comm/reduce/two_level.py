"""The all-reduce of many members: within groups, then among the owners of the same part, then within groups again.

Each contribution and the result are quantised once, as in the butterfly; sums travel in full precision in between. A
member has streams to its group and its column only, about 2 sqrt(n) instead of n, and everybody gets the same bytes.
"""

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.comm.reduce.allreduce import (
    CHUNK_NUMBER,
    CONTRIBUTION,
    RESULT,
    Progress,
    Reduction,
    _bytes,
    _expect,
    _expect_end,
)
from diloco.comm.reduce.grid import TwoLevelPlan
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.errors import ReduceCancelled

LONG_S = 3600.0  # others may be at an earlier level yet: whoever watches the attempt knows how long that may take


class Scatter(Reduction):
    """Contributions go to the owners, who keep the means."""

    def _send_to(self, peer: str) -> None:
        stream, contribution = self._connect(peer), _bytes(self._contribution)
        for number, chunk in enumerate(self.plan.chunks(self.plan.members.index(peer))):
            stream.send(CONTRIBUTION, CHUNK_NUMBER.pack(number), contribution[self.plan.bytes_of(chunk)])
            self._sent(peer)
        stream.end()

    def _receive_from(self, stream: Stream) -> None:
        window = self._windows[stream.peer]
        for number, chunk in enumerate(self._mine):
            room = window.place(number, self._size(chunk))
            stream.receive(_expect(CONTRIBUTION, number, room))
            window.filled()
            self._received(stream.peer)
        _expect_end(stream)

    def expected(self, peer: str) -> int:
        return len(self._mine)


class Gather(Reduction):
    """Owners hold their part of the mean, and send it to all."""

    def _send_to(self, peer: str) -> None:
        stream, result = self._connect(peer), _bytes(self.result)
        for number, chunk in enumerate(self._mine):
            stream.send(RESULT, CHUNK_NUMBER.pack(number), result[self.plan.result_bytes_of(chunk)])
            self._sent(peer)
        stream.end()

    def _receive_from(self, stream: Stream) -> None:
        for number, chunk in enumerate(self.plan.chunks(self.plan.members.index(stream.peer))):
            room = self.result[self.plan.result_bytes_of(chunk)]
            stream.receive(_expect(RESULT, number, room))
            self._refuse_bad_result(stream.peer, chunk, room)
            self._received(stream.peer)
        _expect_end(stream)

    def _reduce(self) -> None:
        """It was done before."""

    def expected(self, peer: str) -> int:
        return len(self.plan.chunks(self.plan.members.index(peer)))


class TwoLevelReduction:
    """One attempt, as `Reduction` is."""

    def __init__(
        self,
        plan: TwoLevelPlan,
        contribution: Tensor,
        transport: Transport,
        addresses: Mapping[str, PeerAddress],
        *,
        patience_s: float = 30.0,
    ) -> None:
        self.plan, self.levels = plan, plan.levels(transport.identity)
        self._transport, self._addresses = transport, addresses
        self._lock = threading.Lock()
        self._cancelled = ""
        self._over: list[Reduction] = []
        self._level: Reduction = Scatter(self.levels.scatter, contribution, transport, addresses, patience_s=patience_s)
        self.level_began = time.monotonic()

    def run(self) -> Tensor:
        try:
            return self._run()
        finally:
            for plan in (self.levels.scatter, self.levels.column, self.levels.gather):
                if plan is not None:
                    self._transport.forget(plan.channel)

    def _run(self) -> Tensor:
        scatter, column, gather = self.levels.scatter, self.levels.column, self.levels.gather
        sums = self._level.run()
        result = torch.empty(gather.result_codec.size(gather.count), dtype=torch.uint8)
        if column is not None:
            part = scatter.spans[self._level.me]
            exact = sums[scatter.result_bytes_of(part)]
            room = result[gather.result_bytes_of(part)]
            self._next(Reduction(
                column, exact, self._transport, self._addresses, result=room, patience_s=LONG_S
            )).run()  # fmt: skip
        return self._next(
            Gather(gather, result, self._transport, self._addresses, result=result, patience_s=LONG_S)
        ).run()

    def _next(self, level: Reduction) -> Reduction:
        with self._lock:
            if self._cancelled:
                raise ReduceCancelled(self._cancelled)
            self._over.append(self._level)
            self._level, self.level_began = level, time.monotonic()
        return level

    def cancel(self, reason: str = "cancelled") -> None:
        with self._lock:
            self._cancelled = f"{self.plan.channel}: {reason}"
            level = self._level
        level.cancel(reason)

    @property
    def progress(self) -> dict[str, Progress]:
        """Of the present level."""
        return self._level.progress

    def expected(self, peer: str) -> int:
        return self._level.expected(peer)

    @property
    def bytes_sent(self) -> int:
        return sum(level.bytes_sent for level in (*self._over, self._level))
