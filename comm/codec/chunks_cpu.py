"""The largest of each chunk and sums of outer products on a CPU, bit for bit what `diloco.comm.codec.chunks` and
`sparse` compute with torch.

As in `diloco.comm.codec.cpu`, the loops hold no GIL, and multiplication and addition stay apart. Nothing compiled is
shared between the two files: code kept on disk would not notice a change of the other.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.comm.codec.cpu import compiled, first_run, noise_of, spread
from diloco.comm.codec.noise import PAGE, NoiseKey

CHUNK = 4096
HEAD = 4  # bytes of a scale
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)
TINY = np.int32(0x0D800000)  # the bits of 2^-100
SHRINK, STEPS = np.float32(1 - 2.0**-22), np.float32(127 - 2.0**-12)
LEVELS = np.float32(127)
NAN, NOTHING = np.float32(np.nan), np.float32(0)
NEAREST = np.full(PAGE, 0.5, np.float32)  # in place of noise

Floats = NDArray[np.float32]
Numbers = NDArray[np.int32]
Bytes = NDArray[np.uint8]


@compiled
def _magnitudes(values: Floats, found: Numbers) -> Any:
    """Write the magnitudes as bits, which compare as they do, and return the largest.

    Tiny ones and those beyond the end are zero.
    """
    bits, largest = values.view(np.int32), np.int32(0)
    for i in range(len(bits)):
        magnitude = np.int32(bits[i] & MAGNITUDE)
        found[i] = magnitude if magnitude >= TINY else np.int32(0)
        largest = max(largest, magnitude)
    found[len(bits) :] = 0
    return largest


@compiled
def _at_least(found: Numbers, floor: Any) -> Any:
    count = np.int32(0)
    for i in range(CHUNK):
        count += np.int32(found[i] >= floor)
    return count


@compiled
def _floor(found: Numbers, keep: int) -> Any:
    """Return a magnitude that `keep` values reach and fewer exceed, bit by bit: counting is fast, sorting is not."""
    floor = np.int32(0)
    if _at_least(found, np.int32(1)) <= keep:
        return floor
    for shift in range(30, -1, -1):
        guess = np.int32(floor | np.int32(1 << shift))
        count = _at_least(found, guess)
        if count >= keep:
            floor = guess
        if count == keep:
            break
    return floor


@compiled
def _pick(found: Numbers, places: Numbers) -> None:
    """Write the places of the largest values, rising; of equal values the first are taken."""
    floor, keep = _floor(found, len(places)), len(places)
    equals, taken = keep - _at_least(found, np.int32(floor + 1)), 0
    for i in range(CHUNK):
        if found[i] >= floor and (found[i] > floor or equals > 0):
            equals -= found[i] == floor
            places[taken] = i
            taken += 1
            if taken == keep:
                break


@compiled
def _write_places(places: Numbers, room: Bytes) -> None:
    """Write a bitmap, or 12 bits each: a byte each, then nibbles, the first half's low and the second's high."""
    keep = len(places)
    if len(room) == CHUNK // 8:
        room[:] = 0
        for i in range(keep):
            room[places[i] >> 3] |= np.uint8(1 << (places[i] & 7))
        return
    for i in range(keep):
        room[i] = places[i] & 255
    for i in range(keep // 2):
        room[keep + i] = (places[i] >> 8) | (places[keep // 2 + i] >> 8 << 4)


@compiled
def _read_places(room: Bytes, places: Numbers) -> bool:
    """Read the places and return whether they rise: then none occurs twice."""
    keep = len(places)
    if len(room) == CHUNK // 8:
        taken = 0
        for i in range(CHUNK):
            if room[i >> 3] >> (i & 7) & 1:
                if taken < keep:
                    places[taken] = i
                taken += 1
        return taken == keep
    last = np.int32(-1)
    for i in range(keep):
        nibbles = np.int32(room[keep + i % (keep // 2)])
        places[i] = np.int32(room[i]) | ((nibbles >> 4 if i >= keep // 2 else nibbles & 15) << 8)
        if places[i] <= last:
            return False
        last = places[i]
    return True


@compiled
def _rise(payload: Bytes, chunk_bytes: int, first: int, width: int, keep: int) -> bool:
    places, rise = np.empty(keep, np.int32), True
    for at in range(first, len(payload), chunk_bytes):
        rise = rise and _read_places(payload[at : at + width], places)
    return rise


@compiled
def _tree_sum(row: Floats) -> Any:
    """Sum the row in an order that a GPU can follow too: the second half is added to the first until one value is left.

    `row` is used up.
    """
    width = len(row) // 2
    while width:
        for i in range(width):
            row[i] += row[width + i]
        width //= 2
    return row[0]


@compiled
def _mean_of(magnitudes: Floats, large: Any, which: bool) -> Any:
    """Return the mean of the large magnitudes, or of the others. Each is divided first: the sum of all may overflow."""
    row, count = np.zeros(len(magnitudes), np.float32), 0
    for i in range(len(row)):
        if large[i] == which:
            row[i] = magnitudes[i] / np.float32(len(row))
            count += 1
    return _tree_sum(row) / (np.float32(count) / np.float32(len(row))) if count else NOTHING


@compiled
def _encode_sparse(values: Floats, chunk_bytes: int, keep: int, payload: Bytes) -> None:
    found, places = np.empty(CHUNK, np.int32), np.empty(keep, np.int32)
    magnitudes, large = np.empty(keep, np.float32), np.empty(keep, np.bool_)
    for chunk in range(-(-len(values) // CHUNK)):
        part = values[chunk * CHUNK : (chunk + 1) * CHUNK]
        raw = payload[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        scales, codes, lane = raw[: 2 * HEAD].view(np.float32), raw[-keep // 4 :], keep // 4
        largest = _magnitudes(part, found)
        _pick(found, places)
        _write_places(places, raw[2 * HEAD : -keep // 4])
        large[:] = True
        for i in range(keep):
            magnitudes[i] = np.int32(found[places[i]]).view(np.float32)
        middle = _mean_of(magnitudes, large, True)
        codes[:] = 0
        for i in range(keep):
            large[i] = magnitudes[i] >= middle
            negative = places[i] < len(part) and part[places[i] : places[i] + 1].view(np.int32)[0] < 0
            codes[i % lane] |= np.uint8((2 * large[i] + negative) << (i // lane * 2))
        scales[0], scales[1] = _mean_of(magnitudes, large, False), _mean_of(magnitudes, large, True)
        if largest >= INFINITE:
            scales[:] = NAN


@compiled
def _add_sparse(payload: Bytes, chunk_bytes: int, keep: int, share: Any, into: Floats) -> None:
    places, levels, lane = np.empty(keep, np.int32), np.empty(4, np.float32), keep // 4
    for chunk in range(-(-len(into) // CHUNK)):
        part = into[chunk * CHUNK : (chunk + 1) * CHUNK]
        raw = payload[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        scales, codes = raw[: 2 * HEAD].view(np.float32), raw[-keep // 4 :]
        for i in range(2):
            levels[2 * i] = scales[i] * share
            levels[2 * i + 1] = -levels[2 * i]
        _read_places(raw[2 * HEAD : -keep // 4], places)
        for i in range(keep):
            if places[i] < len(part):
                part[places[i]] += levels[codes[i % lane] >> (i // lane * 2) & 3]


@compiled
def _encode_kept(values: Floats, table: Floats, starts: Any, chunk_bytes: int, keep: int, payload: Bytes) -> None:
    found, places = np.empty(CHUNK, np.int32), np.empty(keep, np.int32)
    for chunk in range(-(-len(values) // CHUNK)):
        part = values[chunk * CHUNK : (chunk + 1) * CHUNK]
        raw = payload[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        scale, numbers = raw[:HEAD].view(np.float32), raw[-keep:].view(np.int8)
        noise = starts[chunk * CHUNK // PAGE] + chunk * CHUNK % PAGE
        largest = _magnitudes(part, found)
        peak, sound = np.int32(largest).view(np.float32), TINY <= largest < INFINITE
        scale[0] = peak * SHRINK / LEVELS if sound else NAN if largest >= INFINITE else NOTHING
        steps = STEPS / peak if sound else NOTHING
        _pick(found, places)
        _write_places(places, raw[HEAD:-keep])
        for i in range(keep):
            value = part[places[i]] if sound and places[i] < len(part) else NOTHING
            numbers[i] = np.int8(np.int32(np.floor(value * steps + table[noise + places[i]])))


@compiled
def _add_kept(payload: Bytes, chunk_bytes: int, keep: int, share: Any, into: Floats) -> None:
    places = np.empty(keep, np.int32)
    for chunk in range(-(-len(into) // CHUNK)):
        part = into[chunk * CHUNK : (chunk + 1) * CHUNK]
        raw = payload[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        scale, numbers = raw[:HEAD].view(np.float32)[0] * share, raw[-keep:].view(np.int8)
        _read_places(raw[HEAD:-keep], places)
        for i in range(keep):
            if places[i] < len(part):
                part[places[i]] += np.float32(numbers[i]) * scale


@compiled
def _add_product_row(left: Floats, right: Floats, row: Floats, into: Floats) -> None:
    """Sum the products in `row`, then add that to `into`. `left` is [k], `right` is [k, columns]."""
    row[:] = 0
    for k in range(len(left)):
        for column in range(len(row)):
            row[column] += left[k] * right[k, column]
    for column in range(len(row)):
        into[column] += row[column]


@compiled
def _add_products(left: Floats, right: Floats, into: Floats) -> None:
    row, factors = np.empty(into.shape[2], np.float32), np.empty(left.shape[1], np.float32)
    for n in range(len(into)):
        for r in range(into.shape[1]):
            for k in range(len(factors)):
                factors[k] = left[n, k, r]
            _add_product_row(factors, right[n], row, into[n, r])


def prepare() -> None:
    """Compile everything, or load it from disk."""
    first_run(_run_everything)


def _run_everything() -> None:
    key, values = NoiseKey(0, 0, "prepare"), torch.ones(CHUNK + 1)
    for keep, width in ((64, 96), (512, 512)):
        payload = torch.empty(2, HEAD + width + keep, dtype=torch.uint8)
        encode_kept(values, key, 0, keep, payload)
        assert rise(payload, HEAD, width, keep)
        add_kept(payload, keep, 1.0, values)
    payload = torch.empty(2, 120, dtype=torch.uint8)
    encode_sparse(values, 64, payload)
    add_sparse(payload, 64, 1.0, values)
    add_outer_sums(torch.ones(1, 2, 3), torch.ones(1, 2, 4), torch.ones(1, 3, 4))


def add_outer_sums(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Add the sums row by row, so that they stay in the cache."""
    _add_products(left.contiguous().numpy(), right.contiguous().numpy(), into.numpy())


# All payloads from here on: [chunks, bytes]


def encode_sparse(values: Tensor, keep: int, payload: Tensor) -> None:
    """Encode the `keep` largest values of each chunk, two bits each. A chunk with NaN or infinity gets NaN scales."""
    width = payload.shape[1]

    def work(pages: slice, part: Floats, raw: Bytes) -> None:
        _encode_sparse(part, width, keep, raw)

    spread(work, values.numpy(), payload.numpy().reshape(-1), PAGE // CHUNK * width)


def encode_kept(values: Tensor, key: NoiseKey | None, first_page: int, keep: int, payload: Tensor) -> None:
    """Encode the `keep` largest values of each chunk as int8, rounded to nearest if there is no key."""
    width = payload.shape[1]
    table, starts = noise_of(key, first_page, len(values)) if key else (NEAREST, np.zeros(payload.numel(), np.int64))

    def work(pages: slice, part: Floats, raw: Bytes) -> None:
        _encode_kept(part, table, starts[pages], width, keep, raw)

    spread(work, values.numpy(), payload.numpy().reshape(-1), PAGE // CHUNK * width)


def add_sparse(payload: Tensor, keep: int, share: float, into: Tensor) -> None:
    """Add to `into` what `encode_sparse` has written, the scales times `share`."""
    _add_sparse(payload.numpy().reshape(-1), payload.shape[1], keep, np.float32(share), into.numpy())


def add_kept(payload: Tensor, keep: int, share: float, into: Tensor) -> None:
    """Add to `into` what `encode_kept` has written, the scales times `share`."""
    _add_kept(payload.numpy().reshape(-1), payload.shape[1], keep, np.float32(share), into.numpy())


def rise(payload: Tensor, first: int, width: int, keep: int) -> bool:
    """Tell whether the places, which begin at byte `first` of each chunk, can be what an honest sender wrote."""
    return bool(_rise(payload.numpy().reshape(-1), payload.shape[1], first, width, keep))
