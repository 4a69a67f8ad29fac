"""Sums of outer products in which every multiplication and addition is rounded by itself, in order: no matmul."""

from types import ModuleType

from torch import Tensor

from diloco.comm.codec.base import compiled_module


def add_outer_sums(left: Tensor, right: Tensor, into: Tensor) -> None:
    """into[n, r, c] += (… (left[n, 0, r] right[n, 0, c] + left[n, 1, r] right[n, 1, c]) + …)."""
    if kernels := outer_kernels(into.device.type):
        return kernels.add_outer_sums(left, right, into)
    total = left[:, 0, :, None] * right[:, 0, None, :]
    for k in range(1, left.shape[1]):
        total += left[:, k, :, None] * right[:, k, None, :]
    into += total
    return None


def outer_kernels(device: str) -> ModuleType | None:
    return compiled_module("outer_sums_cpu", "numba") if device == "cpu" else None
