"""`diloco.comm.codec.outer_sums` on a CPU, row by row, so that the sums stay in the cache."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.comm.codec.cpu import compiled, first_run

Floats = NDArray[np.float32]


@compiled
def _add_row(left: Floats, right: Floats, row: Floats, into: Floats) -> None:
    """The sum in `row`, then added. `left`: [k]; `right`: [k, columns]."""
    row[:] = 0
    for k in range(len(left)):
        for column in range(len(row)):
            row[column] += left[k] * right[k, column]
    for column in range(len(row)):
        into[column] += row[column]


@compiled
def _add(left: Floats, right: Floats, into: Floats) -> None:
    row, factors = np.empty(into.shape[2], np.float32), np.empty(left.shape[1], np.float32)
    for n in range(len(into)):
        for r in range(into.shape[1]):
            for k in range(len(factors)):
                factors[k] = left[n, k, r]
            _add_row(factors, right[n], row, into[n, r])


def prepare() -> None:
    """Compile everything, or load it from disk."""
    first_run(lambda: add_outer_sums(torch.ones(1, 2, 3), torch.ones(1, 2, 4), torch.ones(1, 3, 4)))


def add_outer_sums(left: Tensor, right: Tensor, into: Tensor) -> Any:
    _add(left.contiguous().numpy(), right.contiguous().numpy(), into.numpy())
