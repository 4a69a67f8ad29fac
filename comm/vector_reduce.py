"""The all-reduce of vectors as they are: encoded and decoded chunk by chunk, while other chunks are on their way."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from diloco.comm.allreduce import Reduction
from diloco.comm.noise import NoiseKey
from diloco.comm.spans import ReducePlan, Span
from diloco.comm.transport import PeerAddress, Transport
from diloco.comm.window import Count


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
        self._encoded = [Count() for _ in plan.members]

    def _works(self) -> list[Callable[[], None]]:
        return [self._encode, *super()._works()]

    def _encode(self) -> None:
        """The first chunk of every span, then the second, as they travel; each member begins with another one's."""
        members = range(len(self.plan.members))
        order = [*members[self.me + 1 :], *members[: self.me + 1]]
        chunks = {member: self.plan.chunks(member) for member in order}
        for number in range(max(map(len, chunks.values()))):
            for member in order:
                if number < len(chunks[member]):
                    self._encode_chunk(chunks[member][number])
                    self._encoded[member].add_one()

    def _encode_chunk(self, chunk: Span) -> None:
        room = self._contribution[self.plan.bytes_of(chunk)]
        self.plan.codec.encode(self._vector[chunk.lo : chunk.hi], self._key, chunk.lo, out=room)

    def _await_own(self, member: int, number: int) -> None:
        self._encoded[member].reach(number + 1)

    def _got_result(self, chunk: Span) -> None:
        payload = self.result[self.plan.result_bytes_of(chunk)]
        self.plan.result_codec.decode(payload, chunk.hi - chunk.lo, out=self._mean[chunk.lo : chunk.hi])

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        for count in self._encoded:
            count.stop()
