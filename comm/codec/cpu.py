"""int8, int4, fp4 and bf16 on a CPU as one pass over memory, bit for bit what `diloco.comm.codec.dense` computes with
torch. Which of them is said by `levels`: 127, 7, 1 and 0.

Numba compiles these loops on first use (a second; kept on disk) and needs no compiler on the machine. They hold no GIL,
so several threads encode and decode at once. Multiplication and addition stay apart: Numba fuses them only when asked.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pickle import PickleError  # to catch it: Numba keeps compiled code so, in caches like Python's own
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import NullCache
from numpy.typing import NDArray
from torch import Tensor

from diloco.comm.codec.noise import PAGE, NoiseKey, start_of, table_of

BLOCK = 256
HALF = 128
PAGE_BLOCKS = PAGE // BLOCK
SCALE_BYTES = 4
WORTH_A_THREAD = 32 * PAGE  # values; below that, starting one costs more than it saves
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)  # magnitudes from here on are infinity and NaN, and compare as integers do
LARGEST, NAN = np.int32(0x7F7FFFFF), np.int32(0x7FC00000)
TINY = np.float32(2.0**-100)
SHRINK = np.float32(1 - 2.0**-22)
ROUNDING_MARGIN = np.float32(2.0**-12)
NOTHING = np.float32(0)
LOWEST = np.float32(2.0**-6)  # fp4's smallest magnitude but zero, as a share of the largest

Floats = NDArray[np.float32]
Bytes = NDArray[np.int8]
log = logging.getLogger(__name__)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with Numba, to run without the GIL; the code is kept on disk if it can be written there."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError as nowhere:  # neither the package's folder nor the user's cache can be written
        log.info("compiled code is not kept on disk: %s", nowhere)
    _dispatchers.append(dispatcher)
    return dispatcher


_dispatchers: list[Any] = []


def prepare() -> None:
    """Compile everything, or load it from disk. This takes seconds the first time, so it is not done within a round."""
    first_run(_run_everything)


def first_run(work: Callable[[], None]) -> None:
    """Run compiled code for the first time; if what is kept of it on disk is damaged, compile anew and keep nothing."""
    try:
        work()
    except (EOFError, OSError, PickleError, ImportError, ValueError, IndexError) as damaged:
        log.warning("compiled code on disk is damaged (%s): compiling anew, without keeping it", damaged)
        for dispatcher in _dispatchers:
            dispatcher._cache = NullCache()
        work()


def _run_everything() -> None:
    key, count = NoiseKey(0, 0, "prepare"), BLOCK + 1
    for levels, size in ((127, BLOCK + SCALE_BYTES), (7, HALF + SCALE_BYTES), (1, HALF + SCALE_BYTES), (0, 2 * BLOCK)):
        payloads = torch.zeros(2, 2 * size, dtype=torch.uint8)
        values = torch.ones(count)
        encode(values, key, 0, levels, payloads[0])
        assert is_finite(payloads[0], levels)
        assert levels < 2 or sum_of_squares(payloads[0], count, levels) > 0
        accumulate(payloads[0], values, 1.0, levels, fresh=False)
        mean(payloads, (0.5, 0.5), count, key, 0, levels, torch.empty_like(payloads[0]))


@compiled
def _block_bytes(levels: int) -> int:
    if levels == 0:
        return 2 * BLOCK
    return SCALE_BYTES + (BLOCK if levels > 8 else HALF)


@compiled
def _page_bytes(levels: int) -> int:
    return PAGE_BLOCKS * _block_bytes(levels)


@compiled
def _round(row: Floats, steps: Any, noise: Floats, numbers: Bytes) -> None:
    for i in range(BLOCK):
        numbers[i] = np.int8(np.int32(np.floor(row[i] * steps + noise[i])))


@compiled
def _pack(numbers: Bytes, out: Bytes) -> None:
    for i in range(HALF):
        out[i] = (numbers[i] & 15) | (numbers[HALF + i] << 4)


@compiled
def _unpack(packed: Bytes, numbers: Bytes) -> None:
    for i in range(HALF):
        numbers[i] = np.int8(packed[i] << 4) >> 4
        numbers[HALF + i] = packed[i] >> 4


@compiled
def _round_fp4(row: Floats, peak: Any, noise: Floats, shares: Floats, small: Any, numbers: Bytes) -> None:
    """Return codes in `numbers`: the sign in bit 3, the exponent in bits 0 to 2. The others are memory to work in."""
    exponents = shares.view(np.int32)
    for i in range(BLOCK):
        shares[i] = abs(row[i]) / peak
        small[i] = shares[i] < LOWEST
        shares[i] += LOWEST if small[i] else NOTHING
    for i in range(BLOCK):
        code = np.int32(np.int32(exponents[i] + np.int32(noise[i] * np.float32(2**23))) >> 23) - 120 - small[i]
        code = min(max(code, 0), 7)
        numbers[i] = code | (8 if code > 0 and row[i] < 0 else 0)


@compiled
def _unpack_fp4(packed: Bytes, bits: Any) -> None:
    """Return the bits of the values: a code's low bits are an exponent, 2^(code - 7), or zero for code 0."""
    for i in range(HALF):
        for shift in (0, 4):
            code = np.int32(packed[i]) >> shift
            power = code & 7
            bits[i + 32 * shift] = ((power + 120 << 23) if power > 0 else 0) | (code & 8) << 28


@compiled
def _encode_bf16(bits: Any, noise: Floats, out: Any) -> None:
    """Keep the upper half of the bits after adding noise to the lower one; NaN for what is not finite."""
    for i in range(len(bits)):
        magnitude = np.int32(bits[i] & MAGNITUDE)
        rounded = min(np.int32(magnitude + np.int32(noise[i] * np.float32(65536))), LARGEST)
        rounded = NAN if magnitude >= INFINITE else rounded
        out[i] = np.int16(np.int32(rounded | (bits[i] & ~MAGNITUDE)) >> 16)


@compiled
def _widen(halves: Any, bits: Any) -> None:
    for i in range(BLOCK):
        bits[i] = np.int32(halves[i]) << 16


@compiled
def _accumulate_bf16(halves: Any, share: Any, into: Floats, fresh: bool) -> None:
    bits = np.empty(BLOCK, np.int32)
    for first in range(0, len(into), BLOCK):
        row = into[first : first + BLOCK]
        _widen(halves[first : first + BLOCK], bits)
        if fresh:
            _set(row, bits.view(np.float32), share)
        else:
            _add(row, bits.view(np.float32), share)


@compiled
def _scale_and_steps(largest: Any, levels: Any) -> tuple[Any, Any]:
    """Return the scale of a block with this largest magnitude (its bits), and what its values are multiplied with."""
    peak = np.int32(largest).view(np.float32)
    if largest >= INFINITE:
        return np.float32(np.nan), NOTHING  # the mark of a block that cannot be encoded
    if peak < TINY:
        return NOTHING, NOTHING
    return peak * SHRINK / levels, (levels - ROUNDING_MARGIN) / peak


@compiled
def _encode_blocks(values: Floats, noise: Floats, levels: Any, packed: Bytes, scales: Floats) -> None:
    """Encode whole blocks.

    Loops of constant length, over the whole array's indices, are a third faster than over slices.
    """
    width = len(packed) // max(1, len(scales))
    bits, numbers = values.view(np.int32), np.empty(BLOCK, np.int8)
    shares, small = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
    for block in range(len(scales)):
        at, to = block * BLOCK, block * width
        largest = np.int32(0)
        for i in range(BLOCK):
            largest = max(largest, np.int32(bits[at + i] & MAGNITUDE))
        scales[block], steps = _scale_and_steps(largest, levels)
        row, here = values[at : at + BLOCK], noise[at : at + BLOCK]
        if width == BLOCK:
            _round(row, steps, here, packed[to : to + BLOCK])
        else:
            if levels == 1:
                peak = np.int32(largest).view(np.float32) if scales[block] > 0 else np.float32(np.inf)
                _round_fp4(row, peak, here, shares, small, numbers)
            else:
                _round(row, steps, here, numbers)
            _pack(numbers, packed[to : to + HALF])


@compiled
def _encode_page(values: Floats, noise: Floats, levels: Any, raw: Bytes) -> None:
    """Encode one page."""
    blocks, whole = -(-len(values) // BLOCK), len(values) // BLOCK
    scales, packed = raw[: SCALE_BYTES * blocks].view(np.float32), raw[SCALE_BYTES * blocks :]
    width = _block_bytes(levels) - SCALE_BYTES
    last = np.zeros(BLOCK if whole < blocks else 0, np.float32)
    last[: len(values) - whole * BLOCK] = values[whole * BLOCK :]
    if levels == 0:
        halves = raw.view(np.int16)
        _encode_bf16(values[: whole * BLOCK].view(np.int32), noise, halves)
        _encode_bf16(last.view(np.int32), noise[whole * BLOCK :], halves[whole * BLOCK :])
        return
    _encode_blocks(values, noise, levels, packed[: whole * width], scales[:whole])
    _encode_blocks(last, noise[whole * BLOCK :], levels, packed[whole * width :], scales[whole:])


@compiled
def _encode(values: Floats, table: Floats, starts: Any, levels: Any, packed: Bytes) -> None:
    page_bytes = _page_bytes(levels)
    for page in range(-(-len(values) // PAGE)):
        part = values[page * PAGE : (page + 1) * PAGE]
        raw = packed[page * page_bytes : (page + 1) * page_bytes]
        _encode_page(part, table[starts[page] :], levels, raw)


@compiled
def _is_finite(packed: Bytes, levels: Any) -> bool:
    """Tell whether every value that these scales allow is finite, of bf16 every value itself."""
    if levels == 0:
        halves, bad = packed.view(np.int16), 0
        for i in range(len(halves)):
            bad += (halves[i] & 0x7F80) == 0x7F80
        return bad == 0
    page_bytes = _page_bytes(levels)
    largest = levels + np.float32(levels > 1)  # whole numbers from elsewhere may be one more than we ever write
    for first in range(0, len(packed), page_bytes):
        raw = packed[first : first + page_bytes]
        scales = raw[: len(raw) // _block_bytes(levels) * SCALE_BYTES].view(np.float32)
        for i in range(len(scales)):
            if not abs(scales[i] * largest) < np.inf:
                return False
    return True


@compiled
def _square_of(numbers: Bytes, count: int) -> Any:
    """Return the sum of the first squares of a block: at most 2^22, so it is exact."""
    total = np.int32(0)
    if count == BLOCK:
        for i in range(BLOCK):  # of constant length: the compiler makes a third of the time of it
            total += np.int32(numbers[i]) * np.int32(numbers[i])
    else:
        for i in range(count):
            total += np.int32(numbers[i]) * np.int32(numbers[i])
    return total


@compiled
def _sum_of_squares(packed: Bytes, count: int, levels: Any) -> float:
    """Add up blocks in order, each its exact sum times its squared scale; what lies behind `count` says nothing."""
    width = BLOCK if levels > 8 else HALF
    page_bytes, unpacked, total = _page_bytes(levels), np.empty(BLOCK, np.int8), 0.0
    for page in range(-(-count // PAGE)):
        raw, left = packed[page * page_bytes : (page + 1) * page_bytes], min(PAGE, count - page * PAGE)
        blocks = -(-left // BLOCK)
        scales = raw[: SCALE_BYTES * blocks].view(np.float32)
        for block in range(blocks):
            at, scale = SCALE_BYTES * blocks + block * width, np.float64(scales[block])
            numbers = raw[at : at + width]
            if width == HALF:
                _unpack(numbers, unpacked)
                numbers = unpacked
            total += scale * scale * _square_of(numbers, min(BLOCK, left - block * BLOCK))
    return total


@compiled
def _add(row: Floats, numbers: Bytes, scale: Any) -> None:
    for i in range(len(row)):
        row[i] += np.float32(numbers[i]) * scale


@compiled
def _set(row: Floats, numbers: Bytes, scale: Any) -> None:
    for i in range(len(row)):
        row[i] = NOTHING + np.float32(numbers[i]) * scale  # as if added to zero: never -0


@compiled
def _accumulate_page(raw: Bytes, levels: Any, share: Any, into: Floats, fresh: bool) -> None:
    if levels == 0:
        _accumulate_bf16(raw.view(np.int16), share, into, fresh)
        return
    blocks, width = -(-len(into) // BLOCK), _block_bytes(levels) - SCALE_BYTES
    scales, packed = raw[: SCALE_BYTES * blocks].view(np.float32), raw[SCALE_BYTES * blocks :]
    unpacked, floats = np.empty(BLOCK, np.int8), np.empty(BLOCK, np.float32)
    for block in range(blocks):
        row = into[block * BLOCK : (block + 1) * BLOCK]
        numbers, scale = packed[block * width : (block + 1) * width], scales[block] * share
        if levels == 1:
            _unpack_fp4(numbers, floats.view(np.int32))
            if fresh:
                _set(row, floats, scale)
            else:
                _add(row, floats, scale)
        elif width == HALF:
            _unpack(numbers, unpacked)
            if fresh:
                _set(row, unpacked, scale)
            else:
                _add(row, unpacked, scale)
        elif fresh:
            _set(row, numbers, scale)
        else:
            _add(row, numbers, scale)


@compiled
def _accumulate(packed: Bytes, levels: Any, share: Any, into: Floats, fresh: bool) -> None:
    page_bytes = _page_bytes(levels)
    for page in range(-(-len(into) // PAGE)):
        part = into[page * PAGE : (page + 1) * PAGE]
        raw = packed[page * page_bytes : (page + 1) * page_bytes]
        _accumulate_page(raw, levels, share, part, fresh)


@compiled
def _mean(payloads: Any, shares: Floats, count: int, table: Floats, starts: Any, levels: Any, packed: Bytes) -> None:
    """Compute the mean page by page, so that the sums stay in the cache."""
    page_bytes = _page_bytes(levels)
    sums = np.empty(PAGE, np.float32)
    for page in range(-(-count // PAGE)):
        first = page * page_bytes
        part, raw = sums[: min(PAGE, count - page * PAGE)], packed[first : first + page_bytes]
        for member in range(len(payloads)):
            theirs = payloads[member][first : first + len(raw)]
            _accumulate_page(theirs, levels, shares[member], part, member == 0)
        _encode_page(part, table[starts[page] :], levels, raw)


def mean(
    payloads: Tensor, shares: Sequence[float], count: int, key: NoiseKey, first_page: int, levels: int, out: Tensor
) -> None:
    """Encode the sum of what the rows of `payloads` encode, each times its share.

    The caller has checked their scales.
    """
    table, starts = noise_of(key, first_page, count)
    rows, target = payloads.numpy().view(np.int8), out.numpy().view(np.int8)
    _mean(rows, np.array(shares, np.float32), count, table, starts, np.float32(levels), target)


def encode(values: Tensor, key: NoiseKey, first_page: int, levels: int, payload: Tensor) -> None:
    """Encode the values into `payload`. A block with NaN or infinity gets NaN for its scale."""
    table, starts = noise_of(key, first_page, len(values))

    def work(pages: slice, part: Floats, raw: Bytes) -> None:
        _encode(part, table, starts[pages], np.float32(levels), raw)

    spread(work, values.numpy(), payload.numpy().view(np.int8), _page_bytes(levels))


def accumulate(payload: Tensor, into: Tensor, share: float, levels: int, fresh: bool) -> None:
    """Add what `payload` encodes, times `share`, to `into`, or to zero if that is `fresh`.

    The caller has checked its scales.
    """

    def work(pages: slice, part: Floats, raw: Bytes) -> None:
        _accumulate(raw, np.float32(levels), np.float32(share), part, fresh)

    spread(work, into.numpy(), payload.numpy().view(np.int8), _page_bytes(levels))


def noise_of(key: NoiseKey, first_page: int, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the noise table and where each page starts in it.

    Not compiled: code on disk would not notice a change of noise.py.
    """
    first, second, seed = key.seeds
    pages = np.arange(first_page, first_page + -(-count // PAGE), dtype=np.int64)
    return table_of(first, second).numpy(), start_of(pages, seed)


def is_finite(payload: Tensor, levels: int) -> bool:
    """Tell whether every value that the scales of this payload allow is finite."""
    return bool(_is_finite(payload.numpy().view(np.int8), np.float32(levels)))


def sum_of_squares(payload: Tensor, count: int, levels: int) -> float:
    """Return the squared norm of what `payload` encodes, without decoding it. The caller has checked its scales."""
    return float(_sum_of_squares(payload.numpy().view(np.int8), count, np.float32(levels)))


def spread(work: Callable[[slice, Any, Any], None], values: Floats, raw: NDArray[Any], page_bytes: int) -> None:
    """Call `work` with runs of pages, their values and bytes, in as many threads as torch uses if that is worth it."""
    pages, threads = -(-len(values) // PAGE), min(torch.get_num_threads(), len(values) // WORTH_A_THREAD)
    if threads < 2:
        return work(slice(0, pages), values, raw)

    def some(lo: int, hi: int) -> None:
        work(slice(lo, hi), values[lo * PAGE : hi * PAGE], raw[lo * page_bytes : hi * page_bytes])

    cuts = [pages * i // threads for i in range(threads + 1)]
    for _ in _threads().map(some, cuts, cuts[1:]):
        pass
    return None


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="codec")
