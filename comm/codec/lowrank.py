"""The four strongest outer products of each tile (PowerSGD), int8.

A tile is one page of the vector seen as 128 x 256, not a weight matrix: spans of whole pages are reduced by different
owners, none of whom has a whole matrix, and bytes may not depend on where spans begin. So less is gained than
PowerSGD gains on matrices of low rank: what rows of a matrix share shows only where 256 divides its width. There is no
warm start either: a codec keeps no state, so each encoding takes its power steps from the same start.

Meant for error feedback. Only the sender encodes, so its matrix products may round as they like.
"""

from functools import cache

import torch
from torch import Tensor

from diloco.comm.codec.base import FEEDBACK_COST, TINY, Noise
from diloco.comm.codec.chunks import Grouped, add_outer_sums
from diloco.comm.codec.noise import PAGE

HEIGHT, WIDTH, RANK = 128, 256, 4
POWER_STEPS = 3
LEVELS = 127
LOST = 1e-4  # what is left of a column that the others contain already is rounding errors


class LowRank(Grouped):
    """Encode a tile as the fp32 scales of its products, their columns (int8) and their rows (int8)."""

    name, about = "lowrank", "the four strongest outer products of each 128 x 256 values (PowerSGD)"
    needs_feedback, loss_cost, cpu_ns = True, FEEDBACK_COST, (26.0, 0.4)
    unit, scales, largest = PAGE, RANK, 1e36
    headroom = 2.0 * RANK * (LEVELS + 1) ** 2

    @property
    def unit_bytes(self) -> int:
        return RANK * (4 + HEIGHT + WIDTH)

    def bound(self, rows: Tensor) -> Tensor:
        """Bound each error by the norm of its whole tile: any of it may be left out."""
        return (rows.double().norm(dim=1, keepdim=True).float() * (1 + 1e-4) + PAGE * TINY).expand_as(rows)

    def _encode(self, values: Tensor, noise: Noise, rows: Tensor) -> None:
        peak = values.abs().amax(1, keepdim=True)
        sound = (peak >= TINY) & torch.isfinite(peak)
        tiles = torch.where(sound, values / peak, 0.0).view(-1, HEIGHT, WIDTH)
        columns, _ = _rounded(_strongest_columns(tiles).transpose(1, 2))
        strengths = columns.square().sum(2, keepdim=True).clamp_(min=1.0)  # of any length: the rows make up for it
        across, scales = _rounded(columns @ tiles / strengths)
        self._said(rows).copy_(torch.cat((columns, across), 2))
        made = (scales[:, :, 0] * peak).masked_fill_(peak < TINY, 0.0)
        self._scales(rows).copy_(made.masked_fill_(~torch.isfinite(peak), torch.nan))

    def _decode(self, rows: Tensor, scales: Tensor, into: Tensor) -> None:
        said = self._said(rows).float()
        add_outer_sums(said[:, :, :HEIGHT] * scales[:, :, None], said[:, :, HEIGHT:], into.view(-1, HEIGHT, WIDTH))

    def _said(self, rows: Tensor) -> Tensor:
        """Return columns and rows, int8 [tiles, RANK, HEIGHT + WIDTH], as a view of the bytes."""
        return rows[:, 4 * RANK :].view(torch.int8).unflatten(1, (RANK, HEIGHT + WIDTH))


def _strongest_columns(tiles: Tensor) -> Tensor:
    """Return orthonormal columns, [tiles, HEIGHT, RANK], nearly the first left singular vectors."""
    columns = _orthonormal(tiles @ _start(str(tiles.device)))
    for _ in range(POWER_STEPS - 1):
        columns = _orthonormal(tiles @ _orthonormal(tiles.transpose(1, 2) @ columns))
    return columns


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormalise the columns by Gram and Schmidt; a column that adds nothing becomes zero."""
    done: list[Tensor] = []
    for k in range(RANK):
        column = columns[:, :, k]
        before = column.norm(dim=1, keepdim=True)
        for other in done:
            column = column - (column * other).sum(1, keepdim=True) * other
        norm = column.norm(dim=1, keepdim=True)
        done.append(torch.where(norm > LOST * before, column / norm, 0.0))
    return torch.stack(done, 2)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in [-LEVELS, LEVELS], as floats, and what the rows were divided by, [tiles, RANK, 1]."""
    peak = rows.abs().amax(2, keepdim=True)
    return torch.where(peak > 0, rows / peak * LEVELS, 0.0).round_(), peak / LEVELS


@cache
def _start(device: str) -> Tensor:
    """Return fixed directions; any will do. An island may encode the same vector twice and must send the same bytes."""
    hashed = (torch.arange(WIDTH * RANK, dtype=torch.int64) * 2654435761 >> 13) % 1024
    return ((hashed.float() - 511.5) / 512).view(WIDTH, RANK).to(device)
