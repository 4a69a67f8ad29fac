"""Safetensors files, written piece by piece by ourselves: their bytes shall not depend on a library's version, and
whoever writes them in the background can rest in between."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.checkpoint.log.background import Rest, no_rest
from diloco.comm.transport.frame import Buffer

PIECE = 1 << 22  # bytes written at once
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


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
