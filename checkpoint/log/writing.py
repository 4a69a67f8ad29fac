"""How files are written in the background: by threads that make way for those that train, tensors piece by piece.

Safetensors files are written by ourselves: their bytes shall not depend on a library's version, and whoever writes them
can rest in between.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
    """Called by a thread, for itself."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class WritePace:
    """Of a thread that writes. Whoever waits for it makes it hurry; and it rests no more after `seconds`."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._hurry = threading.Event()
        self._until = time.monotonic() + seconds
        self._rested_at = 0.0

    def begin(self) -> None:
        """By the thread itself."""
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """Waiting for the disk is no work."""
        if time.monotonic() < self._until:
            self._hurry.wait(REST * (time.thread_time() - self._rested_at))
        self._rested_at = time.thread_time()

    def hurry(self) -> None:
        self._hurry.set()


def no_rest() -> None:
    """Of whoever writes while somebody waits."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], rest: Rest = no_rest, seen: Callable[[Buffer], None] = lambda data: None
) -> None:
    """Durable when it returns. `seen` is shown every byte."""
    with path.open("wb") as out:
        head = header(tensors)
        seen(head)
        out.write(head)
        for name in _order(tensors):
            data = memoryview(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
            for at in range(0, len(data), PIECE):
                seen(data[at : at + PIECE])
                out.write(data[at : at + PIECE])
                rest()
        out.flush()
        os.fsync(out.fileno())


def header(tensors: Mapping[str, Tensor]) -> bytes:
    tree: dict[str, Any] = {}
    end = 0
    for name in _order(tensors):
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        tree[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = canonical(tree)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def canonical(tree: Any) -> bytes:
    """One text for one tree, so that digests of it can be compared."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide values first: each lies where its width divides."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
