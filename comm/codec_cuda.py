"""int8 and int4 encoding as one kernel, bit for bit what `diloco.comm.codec` computes on a CPU.

Division is the correctly rounded one, and the launch forbids fusing the multiplication with the addition of the noise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diloco.comm.noise import PAGE, NoiseKey

BLOCK = tl.constexpr(256)
HALF = tl.constexpr(128)
PAGE_BLOCKS = tl.constexpr(PAGE // 256)
ROWS = 8  # blocks for each program


@triton.jit
def _noise(start, position, first, second):
    """The permutation of `diloco.comm.noise`, for 32-bit positions of one page."""
    x = (start + position + first) & 0xFFFF
    x = ((x ^ (x >> 7)) * 0x2C1B) & 0xFFFF
    x = ((x ^ (x >> 9)) + second) & 0xFFFF
    x = ((x ^ (x >> 8)) * 0x297B) & 0xFFFF
    return (x ^ (x >> 7)).to(tl.float32) * (1.0 / 65536)  # a power of two: exact


@triton.jit
def _numbers(x, steps, noise):
    return tl.floor(x * steps + noise).to(tl.int32)


@triton.jit
def _encode(
    values,
    payload,
    bad,
    count,
    first_page,
    first,
    second,
    start_seed,
    levels,
    nibbles: tl.constexpr,
    rows: tl.constexpr,
):
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, HALF)
    place = block[:, None].to(tl.int64) * BLOCK + column[None, :]
    low = tl.load(values + place, place < count, 0.0)
    high = tl.load(values + place + HALF, place + HALF < count, 0.0)
    peak = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    # a NaN is lost in the maximum, so finiteness is asked of every value
    fine = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
    if tl.min(fine.to(tl.int32)) == 0:
        tl.atomic_xchg(bad, 1)
    empty = peak < 7.888609052210118e-31
    scale = tl.where(empty, 0.0, tl.div_rn(peak * (1 - 2.0**-22), tl.zeros_like(peak) + levels))
    steps = tl.where(empty, 0.0, tl.div_rn(tl.zeros_like(peak) + (levels - 2.0**-12), peak))

    page = block // PAGE_BLOCKS
    in_page = block % PAGE_BLOCKS
    h = (page + first_page).to(tl.uint32) + start_seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    start = ((h ^ (h >> 16)) & 0xFFFF).to(tl.int32)
    position = in_page[:, None] * BLOCK + column[None, :]
    numbers_low = _numbers(low, steps[:, None], _noise(start[:, None], position, first, second))
    numbers_high = _numbers(high, steps[:, None], _noise(start[:, None], position + HALF, first, second))

    packed_bytes = HALF if nibbles else BLOCK
    all_blocks = (count + BLOCK - 1) // BLOCK
    blocks_here = tl.minimum(all_blocks - page * PAGE_BLOCKS, PAGE_BLOCKS)
    base = page.to(tl.int64) * (PAGE_BLOCKS * (packed_bytes + 4))
    there = block < all_blocks
    tl.store((payload + base + in_page * 4).to(tl.pointer_type(tl.float32)), scale, there)
    out = payload + (base + blocks_here * 4 + in_page * packed_bytes)[:, None] + column[None, :]
    if nibbles:
        tl.store(out, ((numbers_low & 15) | ((numbers_high & 15) << 4)).to(tl.uint8), there[:, None])
    else:
        tl.store(out, (numbers_low & 255).to(tl.uint8), there[:, None])
        tl.store(out + HALF, (numbers_high & 255).to(tl.uint8), there[:, None])


def encode(values: Tensor, key: NoiseKey, first_page: int, levels: int, payload: Tensor) -> bool:
    """Fill `payload`; False if a value was NaN or infinite."""
    bad = torch.zeros(1, dtype=torch.int32, device=values.device)
    first, second, start_seed = key.seeds
    signed = start_seed - (1 << 32) if start_seed >= 1 << 31 else start_seed
    grid = (triton.cdiv(triton.cdiv(len(values), 256), ROWS),)
    _encode[grid](
        values, payload, bad, len(values), first_page, first, second, signed, float(levels),
        nibbles=levels == 7, rows=ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return not bad.item()
