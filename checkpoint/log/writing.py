"""How files are written in the background: by threads that make way for those that train, tensors piece by piece.

Safetensors files are written here, not by their library: their bytes must not depend on its version, and whoever writes
them can rest in between.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.comm.transport.frame import Buffer

NICE = 5  # enough that training gets a core before they do, and little enough that a busy machine does not starve them
REST = 9  # times as long as it has worked, a thread rests: what it takes of cores and memory is a tenth at most
PIECE = 1 << 22  # bytes written at once
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Rest = Callable[[], None]  # called between pieces of work


def make_way() -> None:
    """Lower the priority of the calling thread, on Linux only: elsewhere that would affect the whole process."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class WritePace:
    """Slow a writing thread down: it rests nine times as long as it works. Whoever waits for it makes it hurry, and
    after `seconds` it rests no more."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._hurry = threading.Event()
        self._until = time.monotonic() + seconds
        self._rested_at = 0.0

    def begin(self) -> None:
        """Start to measure work, as CPU time of the calling thread: the writer itself calls it."""
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """Pause nine times as long as the CPU time spent since the last rest; waiting for the disk is no work."""
        if time.monotonic() < self._until:
            self._hurry.wait(REST * (time.thread_time() - self._rested_at))
        self._rested_at = time.thread_time()

    def hurry(self) -> None:
        """End the present rest and skip all later ones; called by whoever waits for the writer."""
        self._hurry.set()


def no_rest() -> None:
    """Return at once: for a writer whose result is waited for."""


@dataclass(frozen=True)
class Pieces:
    """Hold a tensor's type and shape, and how to come by its bytes, piece by piece."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: Callable[[], Iterator[Buffer]]

    def seen_by(self, see: Callable[[Buffer], None]) -> "Pieces":
        """Return the same tensor, of which `see` is given every byte that is read."""

        def parts() -> Iterator[Buffer]:
            for part in self.bytes():
                see(part)
                yield part

        return replace(self, bytes=parts)


def pieces_of(tensor: Tensor) -> Pieces:
    """Return a tensor's bytes in pieces, each copied to the host when it is asked for, if need be."""

    def parts() -> Iterator[Buffer]:
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        for part in flat.split(PIECE):
            yield memoryview(part.cpu().numpy())

    return Pieces(tensor.dtype, tuple(tensor.shape), parts)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Pieces], rest: Rest = no_rest,
    seen: Callable[[Buffer], None] = lambda data: None, *, durable: bool = True,
) -> None:  # fmt: skip
    """Write a safetensors file, durable when it returns, if it is to be. `seen` is given every byte, to compute a
    digest."""
    with path.open("wb") as out:
        head = header(tensors)
        seen(head)
        out.write(head)
        for name in _order(tensors):
            tensor = tensors[name]
            for part in (pieces_of(tensor) if isinstance(tensor, Tensor) else tensor).bytes():
                seen(part)
                out.write(part)
                rest()
        out.flush()
        if durable:
            os.fsync(out.fileno())


def header(tensors: Mapping[str, Tensor | Pieces]) -> bytes:
    """Return the head of a safetensors file: its length in 8 bytes, then JSON padded to a multiple of 8 bytes."""
    tree: dict[str, Any] = {}
    end = 0
    for name in _order(tensors):
        tensor, start = tensors[name], end
        end += math.prod(tensor.shape) * tensor.dtype.itemsize
        tree[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = canonical(tree)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def canonical(tree: Any) -> bytes:
    """Encode a tree as JSON in exactly one way, so that digests of it can be compared."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _order(tensors: Mapping[str, Tensor | Pieces]) -> list[str]:
    """Sort wide values first: each then lies at a multiple of its width."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
