"""One bit a value: its sign, times the mean magnitude of its block. Meant for error feedback."""

import torch
from torch import Tensor

from diloco.comm.codec.base import FEEDBACK_COST, TINY, Noise
from diloco.comm.codec.chunks import tree_sum
from diloco.comm.codec.dense import BLOCK, Blockwise, Part

PLANE = BLOCK // 8  # bytes of a block; bit i of byte j is the value at i PLANE + j


class Sign(Blockwise):
    """Value by value in form, but a mean of signs is no sign: it travels in another codec."""

    name, about = "sign", "the sign of each value times the mean magnitude of its block of 256"
    bits, closed = 1, False
    needs_feedback, loss_cost, cpu_ns = True, FEEDBACK_COST, (22.0, 0.4)

    def bound(self, rows: Tensor) -> Tensor:
        return (rows.abs().amax(1, keepdim=True) * (1 + 1e-6) + TINY).expand_as(rows)

    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        return scales

    def _encode(self, rows: Tensor, noise: Noise, part: Part) -> None:
        magnitudes = torch.abs(rows, out=part.scratch.floats)
        bits = magnitudes.view(torch.int32)
        bits.mul_(bits >= _TINY_BITS)
        magnitudes.div_(torch.full_like(magnitudes[:, :1], BLOCK))  # first: their sum may be beyond the largest number
        part.scales.copy_(tree_sum(magnitudes).view(part.scales.shape))
        negative = (rows.view(torch.int32) < 0).view(torch.uint8).view(-1, 8, PLANE)
        packed = negative[:, 0].clone()
        for bit in range(1, 8):
            packed |= negative[:, bit] << bit
        part.packed.copy_(packed.view(part.packed.shape))

    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        signs, packed = part.scratch.bytes.view(-1, 8, PLANE), part.packed.reshape(-1, PLANE).view(torch.int8)
        for bit in range(8):
            torch.bitwise_and(packed >> bit, 1, out=signs[:, bit])
        return part.scratch.floats.copy_(part.scratch.bytes.mul_(-2).add_(1)).mul_(scales)


_TINY_BITS = int(torch.tensor(TINY).view(torch.int32))
