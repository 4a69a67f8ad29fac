"""The few largest values of each chunk: two bits each in a contribution (SparseLoCo), int8 in the mean of several.

A contribution keeps 64 of 4096 values and is meant for error feedback: what it leaves out comes later. The mean of
n of them has up to 64 n values in a chunk and no feedback: it is sent as it is, rounded stochastically.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from diloco.comm.codec.base import FEEDBACK_COST, TINY, Noise
from diloco.comm.codec.chunks import CHUNK, Chunked, chunk_kernels, largest, tree_sum
from diloco.comm.codec.dense import Int8
from diloco.comm.codec.noise import PAGE

KEPT = 64  # of each chunk of a contribution
LANE = KEPT // 4  # bytes of two-bit codes
LEVELS = 127


class Sparse(Chunked):
    """Encode each kept value as its sign and one of two magnitudes.

    They are the means of the kept magnitudes below the mean of all kept ones, and of those from that mean on.
    """

    name, about = "sparse", "the 64 largest of each 4096 values, two bits each (SparseLoCo)"
    needs_feedback, loss_cost, cpu_ns = True, FEEDBACK_COST, (10.0, 1.0)
    outer: Mapping[str, object] = {"optimizer": "sgd", "lr": 1.0}  # as published: feedback in place of momentum
    scales, keep, headroom = 2, KEPT, 1.0

    def result_codec(self, members: int) -> str:
        """Name the codec for the union of the supports, or int8, which is smaller where most of a chunk may be kept."""
        together = union(min(KEPT * members, CHUNK))
        return together.name if together.size(PAGE) < Int8().size(PAGE) else "int8"

    @property
    def unit_bytes(self) -> int:
        return 4 * self.scales + self.place_bytes + LANE

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by the largest magnitude of its chunk: a value that is left out is all error."""
        return (rows.abs().amax(1, keepdim=True) * (1 + 1e-6) + TINY).expand_as(rows)

    def _fill(self, payload: Tensor, values: Tensor, noise: Noise) -> None:
        if kernels := chunk_kernels(values.device.type):
            return kernels.encode_sparse(values, self.keep, self._rows(payload))
        return super()._fill(payload, values, noise)

    def _add(self, payload: Tensor, into: Tensor, share: float, *, fresh: bool) -> None:
        if kernels := chunk_kernels(into.device.type):
            return kernels.add_sparse(self._rows(payload), self.keep, share, into.zero_() if fresh else into)
        return super()._add(payload, into, share, fresh=fresh)

    def _encode(self, values: Tensor, noise: Noise, rows: Tensor) -> None:
        places, magnitudes = largest(values, self.keep)
        large = magnitudes >= _mean_of(magnitudes, torch.ones_like(magnitudes, dtype=torch.bool))
        self._scales(rows).copy_(torch.cat((_mean_of(magnitudes, ~large), _mean_of(magnitudes, large)), 1))
        self.write_places(places, rows)
        negative = values.view(torch.int32).gather(1, places) < 0
        codes = (large.to(torch.uint8) << 1 | negative.to(torch.uint8)).view(-1, 4, LANE)
        self.said(rows).copy_(codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6)

    def _decode(self, rows: Tensor, scales: Tensor, into: Tensor) -> None:
        said = self.said(rows)
        codes = torch.cat([said >> shift & 3 for shift in (0, 2, 4, 6)], 1).long()
        levels = torch.stack((scales[:, 0], -scales[:, 0], scales[:, 1], -scales[:, 1]), 1)
        _add_at(self.places(rows), levels.gather(1, codes), into)


class TopValues(Chunked):
    """Encode the kept values as int8 with one scale for each chunk, rounded stochastically or to nearest."""

    scales, headroom = 1, LEVELS + 1.0

    def __init__(self, name: str, keep: int, *, nearest: bool = False) -> None:
        assert 0 < keep <= CHUNK and keep % 8 == 0
        self.name, self.keep, self.nearest = name, keep, nearest

    @property
    def unit_bytes(self) -> int:
        return 4 * self.scales + self.place_bytes + self.keep

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by one step of int8, if no more than `keep` values of a row are not zero."""
        return (rows.abs().amax(1, keepdim=True) / LEVELS * (1 + 1e-4) + TINY).expand_as(rows)

    def _fill(self, payload: Tensor, values: Tensor, noise: Noise) -> None:
        if kernels := chunk_kernels(values.device.type):
            key = None if self.nearest else noise.key
            return kernels.encode_kept(values, key, noise.first_page, self.keep, self._rows(payload))
        return super()._fill(payload, values, noise)

    def _add(self, payload: Tensor, into: Tensor, share: float, *, fresh: bool) -> None:
        if kernels := chunk_kernels(into.device.type):
            return kernels.add_kept(self._rows(payload), self.keep, share, into.zero_() if fresh else into)
        return super()._add(payload, into, share, fresh=fresh)

    def _encode(self, values: Tensor, noise: Noise, rows: Tensor) -> None:
        places, magnitudes = largest(values, self.keep)
        peak = magnitudes.amax(1, keepdim=True)
        empty = peak < TINY
        scales = peak * (1 - 2.0**-22) / torch.full_like(peak, float(LEVELS))
        self._scales(rows).copy_(scales.masked_fill_(empty, 0.0))
        self.write_places(places, rows)
        steps = (torch.full_like(peak, LEVELS - 2.0**-12) / peak).masked_fill_(empty, 0.0)
        added = torch.full_like(values, 0.5) if self.nearest else noise.add_to(torch.zeros_like(values))
        numbers = (values.gather(1, places) * steps).add_(added.gather(1, places)).floor_()
        self.numbers(rows).copy_(numbers)

    def _decode(self, rows: Tensor, scales: Tensor, into: Tensor) -> None:
        _add_at(self.places(rows), self.numbers(rows).float() * scales, into)

    def numbers(self, rows: Tensor) -> Tensor:
        """Return what is written for the kept values, int8 [chunks, keep], as a view of the bytes."""
        return self.said(rows).view(torch.int8)


@cache
def union(keep: int) -> TopValues:
    """Return the codec for a mean of sparse vectors.

    It keeps as many values of each chunk as their supports can have together.
    """
    return TopValues(f"union:{keep}", keep)


def _mean_of(magnitudes: Tensor, which: Tensor) -> Tensor:
    """Return the mean of the chosen magnitudes, [chunks, 1], zero for none.

    Each is divided first: the sum of all may overflow.
    """
    all_of_them = torch.full_like(magnitudes[:, :1], magnitudes.shape[1])
    shares = torch.where(which, magnitudes / all_of_them, 0.0)
    count = which.sum(1, keepdim=True).float()
    return torch.where(count > 0, tree_sum(shares) / (count / all_of_them), 0.0)


def _add_at(places: Tensor, said: Tensor, into: Tensor) -> None:
    """Add the values at these places, of which none occurs twice."""
    into.scatter_(1, places, into.gather(1, places) + said)
