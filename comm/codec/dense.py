"""Codecs value by value: fp32, bf16, and blockwise int8, int4 and fp4, with stochastic rounding; and the sign alone.

An encoded page is the scales of its blocks of 256 values (fp32; none for fp32 and bf16), then the packed values of its
blocks. On a CPU a page goes through all its operations in scratch memory that stays in the cache.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from diloco.comm.codec.base import FEEDBACK_COST, TINY, TINY_BITS, Codec, Noise, compiled_module, cuts, whole_units
from diloco.comm.codec.chunks import tree_sum
from diloco.comm.codec.noise import PAGE, NoiseKey

BLOCK = 256
HALF = BLOCK // 2
PLANE = BLOCK // 8  # bytes of a block of signs; bit i of byte j is the value at i PLANE + j
GROUP = 8  # pages that a CPU works on at once: they stay in the cache, and pay for each operation's start


@dataclass(frozen=True)
class Scratch:
    """Hold memory to work in, [blocks, BLOCK] of fp32 and of int8."""

    floats: Tensor
    bytes: Tensor

    @classmethod
    def new(cls, blocks: int, device: torch.device) -> "Scratch":
        """Allocate memory for so many blocks, uninitialised."""
        floats = torch.empty(blocks, BLOCK, device=device)
        return cls(floats, torch.empty(blocks, BLOCK, dtype=torch.int8, device=device))

    def of(self, blocks: int) -> "Scratch":
        """Return the first `blocks` blocks, as views."""
        return Scratch(self.floats[:blocks], self.bytes[:blocks])


@dataclass(frozen=True)
class Part:
    """Describe a stretch of whole pages, or the short last one, with views of its encoded bytes."""

    first_page: int
    values: Tensor
    scales: Tensor  # fp32 [pages, blocks a page], a view of the bytes
    packed: Tensor  # uint8 [pages, bytes a page], a view of the bytes
    scratch: Scratch


class Blockwise(Codec):
    """Encode blocks of 256 values: first the scales of a page's blocks, if there are any, then their packed values."""

    unit = BLOCK
    bits: int  # of one packed value
    scale_bytes: int = 4  # of one block

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one block: its packed values and its scale."""
        return BLOCK * self.bits // 8 + self.scale_bytes

    def _fill(self, payload: Tensor, values: Tensor, noise: Noise) -> None:
        for part in self._parts(values, payload):
            here = Noise(noise.key, noise.first_page + part.first_page)
            self._encode(whole_units(part.values, BLOCK), here, part)

    def _add(self, payload: Tensor, into: Tensor, share: float, *, fresh: bool) -> None:
        if fresh:
            into.zero_()
        factor = torch.tensor(share, dtype=torch.float32, device=payload.device)
        for part in self._parts(into, payload):
            decoded = self._decode(part, part.scales.reshape(-1, 1) * factor if self.scale_bytes else factor)
            part.values.add_(decoded.flatten()[: len(part.values)])

    def _is_finite(self, payload: Tensor, count: int) -> bool:
        views = (self._split(payload, *cut) for cut in cuts(count, max(count, 1)))
        return all(torch.isfinite(self._largest_possible(*view)).all() for view in views)

    def _split(self, payload: Tensor, pages: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        raw = payload[lo // PAGE * self.size(PAGE) :][: self.size(hi - lo)].view(pages, -1)
        cut = self.scale_bytes * -(-(hi - lo) // BLOCK) // pages
        return raw[:, :cut].view(torch.float32), raw[:, cut:]

    def _parts(self, values: Tensor, payload: Tensor) -> Iterator[Part]:
        """Yield a few pages at a time on a CPU, in this thread's scratch memory; elsewhere all whole pages at once."""
        on_cpu = values.device.type == "cpu"
        for pages, lo, hi in cuts(len(values), GROUP if on_cpu else len(values)):
            blocks = -(-(hi - lo) // BLOCK)
            scratch = _scratch().of(blocks) if on_cpu else Scratch.new(blocks, values.device)
            yield Part(lo // PAGE, values[lo:hi], *self._split(payload, pages, lo, hi), scratch)

    @abstractmethod
    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        """Return numbers that are finite only if every decoded value is."""

    @abstractmethod
    def _encode(self, rows: Tensor, noise: Noise, part: Part) -> None:
        """Fill the part's scales and packed values from fp32 [blocks, BLOCK]; what is not finite stays so."""

    @abstractmethod
    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        """Return the values, fp32 [blocks, BLOCK], with these scales; they may lie in the part's scratch memory."""


class Fp32(Blockwise):
    """Copy every bit of every value: nothing is rounded."""

    name, about = "fp32", "every bit of every value"
    bits, scale_bytes, cpu_ns = 32, 0, (6.0, 9.0)

    def bound(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        return packed.view(torch.float32)

    def _encode(self, rows: Tensor, noise: Noise, part: Part) -> None:
        part.packed.view(torch.float32).copy_(rows.view(len(part.packed), -1))

    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        return torch.mul(part.packed.view(torch.float32).reshape(-1, BLOCK), scales, out=part.scratch.floats)


class Compiled(Blockwise):
    """Encode with compiled kernels where Triton (CUDA) or Numba (CPU) is installed, and with torch elsewhere."""

    levels: int  # what the kernels know the codec by

    def _fill(self, payload: Tensor, values: Tensor, noise: Noise) -> None:
        kernels = dense_kernels(values.device.type)
        if kernels is None:
            return super()._fill(payload, values, noise)
        return kernels.encode(values, noise.key, noise.first_page, self.levels, payload)

    def _add(self, payload: Tensor, into: Tensor, share: float, *, fresh: bool) -> None:
        kernels = dense_kernels(into.device.type)
        if kernels is None:
            return super()._add(payload, into, share, fresh=fresh)
        return kernels.accumulate(payload, into, share, self.levels, fresh)

    def _mean_fused(
        self, payloads: Tensor, shares: Sequence[float], key: NoiseKey, first_page: int, count: int, out: Tensor
    ) -> bool:
        kernels = dense_kernels(payloads.device.type)
        if kernels is None or not hasattr(kernels, "mean"):
            return False
        kernels.mean(payloads, shares, count, key, first_page, self.levels, out)
        return True

    def _is_finite(self, payload: Tensor, count: int) -> bool:
        kernels = dense_kernels(payload.device.type)
        if kernels is None or not hasattr(kernels, "is_finite"):
            return super()._is_finite(payload, count)
        finite: bool = kernels.is_finite(payload, self.levels)
        return finite


class Bf16(Compiled):
    """Keep the upper half of the bits; adding the noise to the lower half first makes the cut a stochastic rounding."""

    name, about = "bf16", "the upper half of the bits, rounded stochastically"
    bits, levels, scale_bytes, cpu_ns = 16, 0, 0, (0.5, 0.7)  # cpu_ns: from x86, by its ratio to int8 there

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by one step of a mantissa of 7 bits, or of the denormals."""
        return (rows.abs() * 2.0**-7).clamp(min=2.0**-133)  # one step of 7 bits, or of the denormals

    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        return packed.view(torch.bfloat16)

    def _encode(self, rows: Tensor, noise: Noise, part: Part) -> None:
        bits = part.scratch.floats.copy_(rows).view(torch.int32)
        sign = bits & -0x80000000
        infinite = bits.bitwise_and_(0x7FFFFFFF) >= 0x7F800000
        bits.add_(noise.whole_numbers(rows, 65536)).clamp_(max=0x7F7FFFFF)  # never up to infinity
        bits.masked_fill_(infinite, 0x7FC00000).bitwise_or_(sign).bitwise_right_shift_(16)
        part.packed.view(torch.int16).copy_(bits.view(len(part.packed), -1))

    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        bits = part.scratch.floats.view(torch.int32)
        bits.copy_(part.packed.view(torch.int16).reshape(-1, BLOCK)).bitwise_left_shift_(16)
        return part.scratch.floats.mul_(scales)


class Scaled(Compiled):
    """Encode values as numbers of scales; a block's largest magnitude is `levels` times its scale."""

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by one step, the block's largest magnitude divided by `levels`."""
        peak = rows.abs().amax(1, keepdim=True)
        return (peak / self.levels * (1 + 1e-4) + TINY).expand_as(rows)

    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        return scales * float(self.levels + 1)  # bytes from elsewhere may say one more than we ever do

    def _encode(self, rows: Tensor, noise: Noise, part: Part) -> None:
        peak = torch.abs(rows, out=part.scratch.floats).amax(1, keepdim=True)
        empty = peak < TINY
        shrunk = peak * (1 - 2.0**-22)  # so that levels times the rounded scale is never beyond the largest number
        scales = (shrunk / torch.full_like(peak, float(self.levels))).masked_fill_(empty, 0.0)
        part.scales.copy_(scales.view(part.scales.shape))
        self._pack(self._numbers(rows, peak, empty, noise, part.scratch), part)

    def _numbers(self, rows: Tensor, peak: Tensor, empty: Tensor, noise: Noise, scratch: Scratch) -> Tensor:
        """Return floor(y + noise) in [-levels, levels].

        At the peak y is a hair below `levels`, so that no rounding passes it.
        """
        steps = (torch.full_like(peak, self.levels - 2.0**-12) / peak).masked_fill_(empty, 0.0)
        return noise.add_to(torch.mul(rows, steps, out=scratch.floats)).floor_()

    def _pack(self, numbers: Tensor, part: Part) -> None:
        """Pack the numbers as nibbles: the first half of a block low, the second high."""
        small = part.scratch.bytes.copy_(numbers)
        nibbles = (small[:, :HALF] & 15).bitwise_or_(small[:, HALF:] << 4)
        part.packed.view(torch.int8).copy_(nibbles.view(len(part.packed), -1))


class Integer(Scaled):
    """Encode a value as a whole number of its block's scale."""

    def sum_of_squares(self, payload: Tensor, count: int) -> float:
        """Return the squared norm of what a payload encodes: where compiled, from its whole numbers and scales."""
        kernels = dense_kernels(payload.device.type)
        if kernels is None or not hasattr(kernels, "sum_of_squares"):
            return super().sum_of_squares(payload, count)
        squares: float = kernels.sum_of_squares(payload, count, self.levels)
        return squares


class Int8(Integer):
    """Encode values as whole numbers up to 127, a byte each, with a scale for each block of 256."""

    name, about = "int8", "whole numbers up to 127, a scale for each block of 256 values"
    bits, levels, cpu_ns, planned = 8, 127, (0.7, 0.4), True

    def _pack(self, numbers: Tensor, part: Part) -> None:
        part.packed.view(torch.int8).copy_(numbers.view(len(part.packed), -1))

    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        pages = part.scratch.floats.view(len(part.packed), -1)
        return pages.copy_(part.packed.view(torch.int8)).view(-1, BLOCK).mul_(scales)


class Int4(Integer):
    """Encode values as whole numbers up to 7, half a byte each, with a scale for each block of 256."""

    name, about = "int4", "whole numbers up to 7, a scale for each block of 256 values"
    bits, levels, cpu_ns, planned = 4, 7, (0.7, 0.6), True
    loss_cost = 0.0009

    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        nibbles, small = part.packed.reshape(-1, HALF).view(torch.int8), part.scratch.bytes
        torch.bitwise_left_shift(nibbles, 4, out=small[:, :HALF]).bitwise_right_shift_(4)
        torch.bitwise_right_shift(nibbles, 4, out=small[:, HALF:])
        return part.scratch.floats.copy_(small).mul_(scales)


class Fp4(Scaled):
    """Encode a value as sign and three exponent bits: 0, or 2^-6 … 1 of the block's largest magnitude.

    Between two powers of two the mantissa is the share of the way up, so adding noise to it rounds stochastically.
    Below 2^-6 the share is taken after adding 2^-6, which moves [0, 2^-6) to [2^-6, 2^-5).
    """

    name, about = "fp4", "sign and exponent, a scale for each block of 256 values (Streaming DiLoCo)"
    bits, levels, cpu_ns, loss_cost = 4, 1, (1.4, 0.6), 0.0009  # cpu_ns: from x86, by its ratio to int4 there

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by the value's own magnitude, but at least by 2^-6 of the block's largest."""
        peak = rows.abs().amax(1, keepdim=True)
        return torch.maximum(rows.abs(), peak * 2.0**-6) * (1 + 1e-5) + TINY

    def _numbers(self, rows: Tensor, peak: Tensor, empty: Tensor, noise: Noise, scratch: Scratch) -> Tensor:
        """Return codes with the sign in bit 3 and the exponent in bits 0 to 2."""
        share = torch.div(scratch.floats, peak, out=scratch.floats).masked_fill_(empty, 0.0)  # it holds |rows|
        small = share < 2.0**-6
        share.add_(small.float().mul_(2.0**-6))
        exponent = share.view(torch.int32).add_(noise.whole_numbers(rows, 2**23)).bitwise_right_shift_(23)
        code = exponent.sub_(127 - 7).sub_(small.to(torch.int32)).clamp_(0, 7)
        negative = (rows < 0).logical_and_(code > 0)  # no -0: whether rows < 0 there is a matter of denormals
        return code.bitwise_or_(negative.to(torch.int32).bitwise_left_shift_(3))

    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        return scales

    def _decode(self, part: Part, scales: Tensor) -> Tensor:
        """Return the values: a code's low bits are an exponent, 2^(code - 7), or zero for code 0."""
        packed, small = part.packed.reshape(-1, HALF), part.scratch.bytes.view(torch.uint8)
        torch.bitwise_and(packed, 15, out=small[:, :HALF])
        torch.bitwise_right_shift(packed, 4, out=small[:, HALF:])
        code = small.to(torch.int32)
        power = code & 7
        bits = (
            (power + (127 - 7)).bitwise_left_shift_(23).mul_(power > 0).bitwise_or_((code & 8).bitwise_left_shift_(28))
        )
        return torch.mul(bits.view(torch.float32), scales, out=part.scratch.floats)


class Sign(Blockwise):
    """Encode the sign of each value in one bit, with the mean magnitude of each block of 256 as its scale.

    Meant for error feedback. A mean of signs is no sign: it travels in another codec.
    """

    name, about = "sign", "the sign of each value times the mean magnitude of its block of 256"
    bits, closed = 1, False
    needs_feedback, loss_cost, cpu_ns = True, FEEDBACK_COST, (22.0, 0.4)

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by the largest magnitude of its block."""
        return (rows.abs().amax(1, keepdim=True) * (1 + 1e-6) + TINY).expand_as(rows)

    def _largest_possible(self, scales: Tensor, packed: Tensor) -> Tensor:
        return scales

    def _encode(self, rows: Tensor, noise: Noise, part: Part) -> None:
        magnitudes = torch.abs(rows, out=part.scratch.floats)
        bits = magnitudes.view(torch.int32)
        bits.mul_(bits >= TINY_BITS)
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


def dense_kernels(device: str) -> ModuleType | None:
    """Return the compiled kernels for this device: Triton's on CUDA, Numba's on a CPU; None if there are none."""
    compiler, module = {"cuda": ("triton", "cuda"), "cpu": ("numba", "cpu")}.get(device, ("", ""))
    return compiled_module(module, compiler) if module else None


def _scratch() -> Scratch:
    """Return this thread's own scratch memory, a group of pages large."""
    if not hasattr(_per_thread, "scratch"):
        _per_thread.scratch = Scratch.new(GROUP * PAGE // BLOCK, torch.device("cpu"))
    scratch: Scratch = _per_thread.scratch
    return scratch


_per_thread = threading.local()
