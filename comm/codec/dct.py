"""The few largest waves of each chunk (DeMo): 32 coefficients of the cosine transform of 64 x 64 values.

Meant for error feedback. Only the sender encodes, so its matrix products may round as they like; decoding adds up the
waves in the order of their places. The chunk is a stretch of the vector, no patch of a weight matrix: waves fit it
where neighbours in the vector are alike.
"""

from functools import cache

import torch
from torch import Tensor

from diloco.comm.codec.base import FEEDBACK_COST, NOT_DECODED, TINY, Noise
from diloco.comm.codec.chunks import CHUNK, Grouped, add_outer_sums
from diloco.comm.codec.sparse import LEVELS, TopValues

SIDE = 64
WAVES = 32  # of each chunk


class Dct(Grouped):
    """Encode the 32 largest coefficients of each chunk's cosine transform.

    The bytes are those of the kept coefficients.
    """

    name, about = "dct", "the 32 largest waves of each 64 x 64 values (DeMo)"
    needs_feedback, loss_cost, cpu_ns = True, FEEDBACK_COST, (26.0, 0.4)
    unit, scales, largest = CHUNK, 1, 1e36
    headroom = 2.0 * (LEVELS + 1)  # 32 waves of 128 scales, each wave 1/32 high: 128 scales, and what rounding adds
    kept = TopValues(name, WAVES, nearest=True)

    @property
    def unit_bytes(self) -> int:
        return self.kept.unit_bytes

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by the norm of its whole chunk: any wave may be among those left out."""
        return (rows.double().norm(dim=1, keepdim=True).float() * (1 + 1e-4) + SIDE * TINY).expand_as(rows)

    def refuse_bad(self, payload: Tensor, count: int, what_then: str = NOT_DECODED) -> None:
        """Refuse places that do not rise, too, as the codec of the kept coefficients does."""
        super().refuse_bad(payload, count, what_then)
        self.kept.refuse_bad(payload, count, what_then)

    def _encode(self, values: Tensor, noise: Noise, rows: Tensor) -> None:
        waves = _waves(str(values.device))
        coefficients = waves @ values.view(-1, SIDE, SIDE) @ waves.T
        self.kept.encode(coefficients.view(-1), noise.key, out=rows.view(-1), defer=True)

    def _decode(self, rows: Tensor, scales: Tensor, into: Tensor) -> None:
        waves, places = _waves(str(rows.device)), self.kept.places(rows)
        heights = self.kept.numbers(rows).float() * scales
        add_outer_sums(waves[places // SIDE] * heights[:, :, None], waves[places % SIDE], into.view(-1, SIDE, SIDE))


@cache
def _waves(device: str) -> Tensor:
    """Return a matrix whose row k is the orthonormal cosine wave of frequency k.

    It is computed in float64 first, so that all libms round to the same fp32.
    """
    k, n = torch.arange(SIDE, dtype=torch.float64)[:, None], torch.arange(SIDE, dtype=torch.float64)
    waves = torch.cos(torch.pi * (2 * n + 1) * k / (2 * SIDE)) * (2 / SIDE) ** 0.5
    waves[0] = SIDE**-0.5
    return waves.float().to(device)
