"""int8, int4, fp4 and bf16 as one kernel each way, bit for bit what `diloco.comm.codec.dense` computes on a CPU. Which
of them is said by `levels`: 127, 7, 1 and 0.

Division is the correctly rounded one, and the launch forbids fusing the multiplication with the addition of the noise.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from diloco.comm.codec.noise import PAGE, NoiseKey

BLOCK = tl.constexpr(256)
HALF = tl.constexpr(128)
PAGE_BLOCKS = tl.constexpr(PAGE // 256)
ROWS, WARPS = 4, 1  # blocks for each program; the fastest of a sweep on an H200


@triton.jit
def _step(position, first, second):
    """Compute which step of 65536 the noise at a position is, by the permutation of `diloco.comm.codec.noise`."""
    x = (position + first) & 0xFFFF
    x = ((x ^ (x >> 7)) * 0x2C1B) & 0xFFFF
    x = ((x ^ (x >> 9)) + second) & 0xFFFF
    x = ((x ^ (x >> 8)) * 0x297B) & 0xFFFF
    return x ^ (x >> 7)


@triton.jit
def _noise(position, first, second):
    return (_step(position, first, second) * 2 + 1).to(tl.float32) * (1.0 / 131072)  # a power of two: exact


@triton.jit
def _start(page, seed):
    """Return where in the permutation a page starts, as `diloco.comm.codec.noise.start_of` does."""
    x = page.to(tl.uint32) + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def _magnitude(x):
    """Return the magnitudes as bits: they compare as the magnitudes do, with infinity and NaN above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _page_at(page, packed_bytes: tl.constexpr):
    return page.to(tl.int64) * (PAGE_BLOCKS * (packed_bytes + 4))


@triton.jit
def _packed_at(block, count, packed_bytes: tl.constexpr):
    """Return where a block's packed values begin: behind all scales of its page, which may be the short last one."""
    page = block // PAGE_BLOCKS
    blocks_here = tl.minimum(((count - 1) // BLOCK + 1) - page * PAGE_BLOCKS, PAGE_BLOCKS)
    return _page_at(page, packed_bytes) + blocks_here * 4 + block % PAGE_BLOCKS * packed_bytes


@triton.jit
def _scale_at(payload, block, packed_bytes: tl.constexpr):
    place = payload + _page_at(block // PAGE_BLOCKS, packed_bytes) + block % PAGE_BLOCKS * 4
    return place.to(tl.pointer_type(tl.float32))


@triton.jit
def _round_fp4(x, peak, step):
    """Return codes with the sign in bit 3 and the exponent in bits 0 to 2."""
    share = tl.div_rn(tl.abs(x), tl.zeros_like(x) + peak)
    small = share < 0.015625
    share += tl.where(small, 0.015625, 0.0)
    code = ((share.to(tl.int32, bitcast=True) + (step * 2 + 1) * 64) >> 23) - 120 - small.to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), 7)
    return tl.where((code > 0) & (x < 0), code | 8, code)


@triton.jit
def _value_of_fp4(code):
    power = code & 7
    bits = tl.where(power > 0, (power + 120) << 23, 0) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _upper_half(x, step):
    """Return the upper half of the bits after adding noise to the lower one; NaN for what is not finite."""
    magnitude = _magnitude(x)
    rounded = tl.minimum(magnitude + step, 0x7F7FFFFF)
    rounded = tl.where(magnitude >= 0x7F800000, 0x7FC00000, rounded)
    return ((rounded | (x.to(tl.int32, bitcast=True) & -0x80000000)) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=["count", "seed", "first", "second"])
def _encode_bf16(values, payload, count, seed, first, second, levels: tl.constexpr, rows: tl.constexpr):
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, BLOCK)
    place = block[:, None].to(tl.int64) * BLOCK + column[None, :]
    x = tl.load(values + place, place < count, 0.0)
    noise_at = (_start(block // PAGE_BLOCKS, seed) + block % PAGE_BLOCKS * BLOCK)[:, None] + column[None, :]
    there = (block < ((count - 1) // BLOCK + 1))[:, None]
    tl.store(payload.to(tl.pointer_type(tl.int16)) + place, _upper_half(x, _step(noise_at, first, second)), there)


@triton.jit(do_not_specialize=["count", "share", "keep"])
def _accumulate_bf16(payload, into, count, share, keep, levels: tl.constexpr, rows: tl.constexpr):
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    place = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    halves = tl.load(payload.to(tl.pointer_type(tl.int16)) + place, place < count, 0).to(tl.int32)
    _add(into, place, (halves << 16).to(tl.float32, bitcast=True), share, count, keep)


@triton.jit(do_not_specialize=["count", "seed", "first", "second"])
def _encode(values, payload, count, seed, first, second, levels: tl.constexpr, rows: tl.constexpr):
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, HALF)
    place = block[:, None].to(tl.int64) * BLOCK + column[None, :]
    low = tl.load(values + place, place < count, 0.0)
    high = tl.load(values + place + HALF, place + HALF < count, 0.0)
    largest = tl.maximum(tl.max(_magnitude(low), 1), tl.max(_magnitude(high), 1))
    peak = largest.to(tl.float32, bitcast=True)
    empty = peak < 7.888609052210118e-31
    scale = tl.where(empty, 0.0, tl.div_rn(peak * (1 - 2.0**-22), tl.zeros_like(peak) + levels))
    scale = tl.where(largest >= 0x7F800000, float("nan"), scale)  # the mark of a block that cannot be encoded
    steps = tl.where(empty, 0.0, tl.div_rn(tl.zeros_like(peak) + (levels - 2.0**-12), peak))[:, None]

    noise_at = (_start(block // PAGE_BLOCKS, seed) + block % PAGE_BLOCKS * BLOCK)[:, None] + column[None, :]
    if levels == 1:
        divisor = tl.where(empty, float("inf"), peak)[:, None]
        numbers_low = _round_fp4(low, divisor, _step(noise_at, first, second))
        numbers_high = _round_fp4(high, divisor, _step(noise_at + HALF, first, second))
    else:
        numbers_low = libdevice.float2int_rd(low * steps + _noise(noise_at, first, second))
        numbers_high = libdevice.float2int_rd(high * steps + _noise(noise_at + HALF, first, second))

    packed_bytes: tl.constexpr = BLOCK if levels == 127 else HALF
    there = block < ((count - 1) // BLOCK + 1)
    tl.store(_scale_at(payload, block, packed_bytes), scale, there)
    out = payload + _packed_at(block, count, packed_bytes)[:, None] + column[None, :]
    if levels != 127:
        tl.store(out, ((numbers_low & 15) | ((numbers_high & 15) << 4)).to(tl.uint8), there[:, None])
    else:
        tl.store(out, (numbers_low & 255).to(tl.uint8), there[:, None])
        tl.store(out + HALF, (numbers_high & 255).to(tl.uint8), there[:, None])


@triton.jit(do_not_specialize=["count", "share", "keep"])
def _accumulate(payload, into, count, share, keep, levels: tl.constexpr, rows: tl.constexpr):
    """Add the decoded values to `into`. With `keep` 0, what lies in `into` is not looked at, not even for NaN."""
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, HALF)
    packed_bytes: tl.constexpr = BLOCK if levels == 127 else HALF
    there = block < ((count - 1) // BLOCK + 1)
    scale = (tl.load(_scale_at(payload, block, packed_bytes), there, 0.0) * share)[:, None]
    source = (payload + _packed_at(block, count, packed_bytes)[:, None] + column[None, :]).to(tl.pointer_type(tl.int8))
    if levels == 1:
        both = tl.load(source, there[:, None], 0).to(tl.int32)
        low, high = _value_of_fp4(both), _value_of_fp4(both >> 4)
    elif levels == 7:
        both = tl.load(source, there[:, None], 0).to(tl.int32)
        low, high = (both << 28) >> 28, both >> 4
    else:
        low, high = tl.load(source, there[:, None], 0), tl.load(source + HALF, there[:, None], 0)
    place = block[:, None].to(tl.int64) * BLOCK + column[None, :]
    _add(into, place, low, scale, count, keep)
    _add(into, place + HALF, high, scale, count, keep)


@triton.jit
def _add(into, place, numbers, scale, count, keep):
    before = tl.load(into + place, (place < count) & (keep != 0), 0.0)
    tl.store(into + place, before + numbers.to(tl.float32) * scale, place < count)


def encode(values: Tensor, key: NoiseKey, first_page: int, levels: int, payload: Tensor) -> None:
    """Encode the values into `payload` without waiting for the kernel.

    A block with NaN or infinity gets NaN for its scale.
    """
    first, second, start_seed = key.seeds
    seed = (start_seed + first_page + (1 << 31)) % (1 << 32) - (1 << 31)  # as a signed number of 32 bits
    _launch("encode", levels, values, payload, values.numel(), seed, first, second)


def accumulate(payload: Tensor, into: Tensor, share: float, levels: int, fresh: bool) -> None:
    """Add what `payload` encodes, times `share`, to `into`, or to zero if that is `fresh`.

    The caller has checked its scales.
    """
    exact = torch.tensor(share, dtype=torch.float32).item()
    _launch("accumulate", levels, payload, into, into.numel(), exact, int(not fresh))


def _launch(name: str, levels: int, source: Tensor, target: Tensor, count: int, *numbers: float) -> None:
    """Launch a kernel, as compiled before.

    Triton would inspect all arguments anew at each launch, for half of the kernel's own time: its finding is kept.
    """
    device = source.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(name, levels, source, target, count, *numbers)
    grid = (-(-count // (256 * ROWS)), 1, 1)
    kind = (name, levels, device, count < 1 << 31, source.data_ptr() % 16, target.data_ptr() % 16)
    kernel = _compiled.get(kind)
    if kernel is not None:
        kernel[grid](source, target, count, *numbers, levels, ROWS)
    else:
        kernel = _KERNELS[name, levels == 0]
        options = {"levels": levels, "rows": ROWS, "num_warps": WARPS, "enable_fp_fusion": False}
        _compiled[kind] = kernel[grid](source, target, count, *numbers, **options)
    return None


_KERNELS = {
    ("encode", False): _encode,
    ("encode", True): _encode_bf16,
    ("accumulate", False): _accumulate,
    ("accumulate", True): _accumulate_bf16,
}
_compiled: dict[tuple[Any, ...], Any] = {}
