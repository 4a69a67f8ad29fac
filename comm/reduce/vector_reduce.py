"""The all-reduce of vectors as they are: encoded and decoded chunk by chunk, while other chunks are on their way."""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diloco.comm.codec.noise import NoiseKey
from diloco.comm.reduce.allreduce import Reduction
from diloco.comm.reduce.spans import ReducePlan, Span
from diloco.comm.transport.transport import PeerAddress, Transport


class VectorReduction(Reduction):
    """`run()` returns the encoded mean; then `mean` holds its values, and `contribution` what this member sent."""

    def __init__(
        self,
        plan: ReducePlan,
        vector: Tensor,
        key: NoiseKey,
        mean: Tensor,
        transport: Transport,
        addresses: Mapping[str, PeerAddress],
        *,
        contribution: Tensor,
        **options: Any,
    ) -> None:
        super().__init__(plan, contribution, transport, addresses, **options)
        assert len(vector) == len(mean) == plan.count
        self._vector, self._key, self._mean = vector, key, mean
        self._encoding = threading.Lock()  # one after the other: so the first is soon on its way

    def _await_own(self, member: int, number: int) -> None:
        """Encoded when it is about to leave, and no sooner: other processes of this machine want to begin, too."""
        chunk = self.plan.chunks(member)[number]
        room = self._contribution[self.plan.bytes_of(chunk)]
        with self._encoding:
            self.plan.codec.encode(self._vector[chunk.lo : chunk.hi], self._key, chunk.lo, out=room)

    def _got_result(self, chunk: Span) -> None:
        payload = self.result[self.plan.result_bytes_of(chunk)]
        self.plan.result_codec.decode(payload, chunk.hi - chunk.lo, out=self._mean[chunk.lo : chunk.hi])
