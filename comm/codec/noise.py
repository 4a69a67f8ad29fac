"""Noise for stochastic rounding that every device computes alike: the middle of one of 65536 equal steps of [0, 1).

It is never zero: a value too small to be distinguished from zero rounds to zero, whether a device keeps denormals or
not.

It is a counter hash of (round, fragment, role, absolute position). Positions are cut into pages; each page walks
through a keyed permutation of all 16-bit numbers from a hashed starting point. So the noise has no bias of its own, a
CPU reads it from a table computed once, and a GPU hashes each position in its registers.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

PAGE = 1 << 15
STEPS = 1 << 16


@dataclass(frozen=True)
class NoiseKey:
    """Identify the noise of one encoding; `role` separates results from contributions, and islands from each other."""

    round: int
    fragment: int
    role: str

    @cached_property
    def seeds(self) -> tuple[int, int, int]:
        """Return two seeds of 16 bits for the permutation and one of 32 bits for the starting points."""
        digest = sha256(f"{self.round}/{self.fragment}/{self.role}".encode()).digest()
        return tuple(int.from_bytes(part, "little") for part in (digest[:2], digest[2:4], digest[4:8]))  # type: ignore[return-value]


def add_noise(values: Tensor, key: NoiseKey, first: int) -> Tensor:
    """Add the noise of pages `first`, `first` + 1, … to fp32 values in place: whole pages, or the beginning of one."""
    table, flat = table_of(key.seeds[0], key.seeds[1]), values.view(-1)
    starts = [start_of(first + page, key.seeds[2]) for page in range(-(-flat.numel() // PAGE))]
    if flat.device.type == "cpu":
        for page, start in enumerate(starts):
            part = flat[page * PAGE : (page + 1) * PAGE]
            part.add_(table[start : start + part.numel()])
    else:
        places = torch.tensor(starts, device=flat.device)[:, None] + torch.arange(PAGE, device=flat.device)
        flat.add_(table.to(flat.device)[places.view(-1)[: flat.numel()]])
    return values


def start_of(page: Any, seed: int) -> Any:
    """Return where in the permutation a page, or each of an array of pages, starts: 16 bits of a 32-bit hash."""
    x = (page + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & (STEPS - 1)


@lru_cache(maxsize=8)
def table_of(first: int, second: int) -> Tensor:
    """Return the permutation of all steps, its beginning repeated at the end so that every page is one slice."""
    x = torch.arange(STEPS + PAGE, dtype=torch.int32)
    x = (x + first) & 0xFFFF
    x = ((x ^ (x >> 7)) * 0x2C1B) & 0xFFFF
    x = ((x ^ (x >> 9)) + second) & 0xFFFF
    x = ((x ^ (x >> 8)) * 0x297B) & 0xFFFF
    return ((x ^ (x >> 7)) * 2 + 1).float() / (2 * STEPS)  # a power of two: exact
