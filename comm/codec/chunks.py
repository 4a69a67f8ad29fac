"""Codecs that look at many values together: the few largest of each 4096, or a tile as a matrix.

Of equal values the first is taken, and places are written in rising order. Bytes whose places do not rise are refused:
so no place occurs twice, and a GPU may write them in any order.
"""

from abc import abstractmethod
from types import ModuleType

import torch
from torch import Tensor

from diloco.comm.codec.base import NOT_DECODED, TINY_BITS, Codec, Noise, compiled_module, cuts, whole_units
from diloco.comm.codec.noise import PAGE
from diloco.errors import CodecError

CHUNK = 4096
BITMAP = CHUNK // 8  # bytes
GROUP, MANY = 8, 1024  # pages that are worked on at once, by a CPU and by others


class Grouped(Codec):
    """Encode units that begin with their scales, some pages at a time, as [units, unit] and [units, bytes]."""

    closed = False
    scales: int  # of a unit
    headroom: float  # a scale times this is beyond any value it can make

    def _fill(self, payload: Tensor, values: Tensor, noise: Noise) -> None:
        for _, lo, hi in cuts(len(values), _group(values)):
            rows = self._rows(payload)[lo // self.unit : -(-hi // self.unit)]
            self._encode(whole_units(values[lo:hi], self.unit), Noise(noise.key, noise.first_page + lo // PAGE), rows)

    def _add(self, payload: Tensor, into: Tensor, share: float, *, fresh: bool) -> None:
        if fresh:
            into.zero_()
        factor = torch.tensor(share, dtype=torch.float32, device=into.device)
        for _, lo, hi in cuts(len(into), _group(into)):
            part, rows = into[lo:hi], self._rows(payload)[lo // self.unit : -(-hi // self.unit)]
            whole = whole_units(part, self.unit)
            self._decode(rows, self._scales(rows) * factor, whole)
            if len(part) < whole.numel():
                part.copy_(whole.view(-1)[: len(part)])

    def _is_finite(self, payload: Tensor, count: int) -> bool:
        return bool(torch.isfinite(self._scales(self._rows(payload)) * self.headroom).all())

    def _rows(self, payload: Tensor) -> Tensor:
        return payload.view(-1, self.unit_bytes)

    def _scales(self, rows: Tensor) -> Tensor:
        """Return the scales, fp32 [units, scales], as a view of the bytes."""
        return rows[:, : 4 * self.scales].view(torch.float32)

    @abstractmethod
    def _encode(self, values: Tensor, noise: Noise, rows: Tensor) -> None: ...

    @abstractmethod
    def _decode(self, rows: Tensor, scales: Tensor, into: Tensor) -> None:
        """Add to `into` what the rows encode with these scales."""


class Chunked(Grouped):
    """Encode `keep` values of each chunk: after the scales come their places, and then a code for each."""

    unit = CHUNK
    keep: int

    @property
    def place_bytes(self) -> int:
        """Return the bytes that the places of a chunk take: 12 bits each, or a bitmap of the chunk if that is less."""
        return min(self.keep * 12 // 8, BITMAP)

    def refuse_bad(self, payload: Tensor, count: int, what_then: str = NOT_DECODED) -> None:
        """Refuse places that do not rise, besides values that are not finite."""
        super().refuse_bad(payload, count, what_then)
        if not self._rise(self._rows(payload)):
            raise CodecError(f"{self.name}: the bytes hold places that do not rise: nothing was decoded")

    def _rise(self, rows: Tensor) -> bool:
        if kernels := chunk_kernels(rows.device.type):
            rise: bool = kernels.rise(rows, 4 * self.scales, self.place_bytes, self.keep)
            return rise
        if self.place_bytes == BITMAP:
            return bool((_bits(self.map(rows)).sum(1) == self.keep).all())
        return bool((self.places(rows).diff(dim=1) > 0).all())

    def map(self, rows: Tensor) -> Tensor:
        """Return the part of each row in which the places are written, as a view."""
        return rows[:, 4 * self.scales :][:, : self.place_bytes]

    def said(self, rows: Tensor) -> Tensor:
        """Return the part of each row that follows the places, as a view."""
        return rows[:, 4 * self.scales + self.place_bytes :]

    def places(self, rows: Tensor) -> Tensor:
        """Return the places, int64 [chunks, keep], of rows that have passed `refuse_bad`."""
        raw = self.map(rows)
        if self.place_bytes == BITMAP:
            return _bits(raw).nonzero()[:, 1].view(len(rows), self.keep)
        low, nibbles = raw[:, : self.keep].long(), raw[:, self.keep :].long()
        return low | torch.cat((nibbles & 15, nibbles >> 4), 1) << 8

    def write_places(self, places: Tensor, rows: Tensor) -> None:
        """Write the places into the rows, as a bitmap or with 12 bits each.

        Of 12 bits, the lower 8 of each come first, then the others as nibbles: the first half's low, the second half's
        high.
        """
        if self.place_bytes == BITMAP:
            taken = places.new_zeros(len(rows), CHUNK).scatter_(1, places, 1).view(-1, BITMAP, 8)
            self.map(rows).copy_((taken << torch.arange(8, device=rows.device)).sum(2))
            return
        half, high = self.keep // 2, places >> 8
        self.map(rows).copy_(torch.cat((places & 255, high[:, :half] | high[:, half:] << 4), 1))


def largest(values: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return places (rising, int64) and magnitudes of each row's `keep` largest values; below 2^-100 counts as zero."""
    bits = values.view(torch.int32) & 0x7FFFFFFF
    bits.masked_fill_(bits < TINY_BITS, 0)
    order = torch.sort(bits, dim=1, descending=True, stable=True).indices
    places = order[:, :keep].sort(dim=1).values
    return places, bits.gather(1, places).view(torch.float32)


def add_outer_sums(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Add a sum of outer products to each matrix in `into`.

    into[n, r, c] += (… (left[n, 0, r] right[n, 0, c] + left[n, 1, r] right[n, 1, c]) + …). Every multiplication and
    addition is rounded by itself, in order: no matmul.
    """
    if kernels := chunk_kernels(into.device.type):
        return kernels.add_outer_sums(left, right, into)
    total = left[:, 0, :, None] * right[:, 0, None, :]
    for k in range(1, left.shape[1]):
        total += left[:, k, :, None] * right[:, k, None, :]
    into += total
    return None


def tree_sum(rows: Tensor) -> Tensor:
    """Sum each row to [rows, 1] in an order that every device can follow.

    The second half is added to the first until one value is left.
    """
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows


def chunk_kernels(device: str) -> ModuleType | None:
    """Return the compiled kernels for chunks; None on other devices than a CPU, or without Numba."""
    return compiled_module("chunks_cpu", "numba") if device == "cpu" else None


def _group(values: Tensor) -> int:
    return GROUP if values.device.type == "cpu" else MANY


def _bits(raw: Tensor) -> Tensor:
    """Expand bitmaps to 0 and 1, [chunks, CHUNK]."""
    return ((raw[:, :, None] >> torch.arange(8, device=raw.device)) & 1).view(len(raw), CHUNK)
