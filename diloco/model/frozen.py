"""Digests of what islands never exchange and must have alike: frozen parameters, buffers, a base model's settings.

They are in the run's first record. Where two islands had different ones, each would train another model, and nothing of
what they send each other would show it. Tables that a model computes when it is built (non-persistent buffers) are left
out: they follow from its settings, and their last bits from the machine.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FrozenDigests = tuple[tuple[str, str], ...]  # by name, the SHA-256 of each

PIECE = 1 << 20  # values at once
SETTINGS = "config.json"  # of a Hugging Face model; no parameter is called so
ELSEWHERE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")  # say nothing of the model


def tensor_digest(tensor: Tensor) -> str:
    """Compute the SHA-256 of a tensor's type, shape and bytes, piece by piece, wherever it lies. Of a sharded one all
    processes call this."""
    if hasattr(tensor, "full_tensor"):  # a DTensor
        tensor = tensor.full_tensor()
    kind = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(f"{kind} {list(tensor.shape)}\n".encode())
    flat = tensor.detach().flatten()
    for at in range(0, flat.numel(), PIECE):
        digest.update(memoryview(flat[at : at + PIECE].cpu().contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def frozen_of(module: nn.Module) -> FrozenDigests:
    """Compute the digests of a module's frozen parameters and of its buffers."""
    parameters = ((name, one) for name, one in module.named_parameters() if not one.requires_grad)
    return (*((name, tensor_digest(one)) for name, one in parameters), *buffers_of(module))


def buffers_of(module: nn.Module) -> FrozenDigests:
    """Compute the digests of a module's persistent buffers."""
    kept = module.state_dict().keys()
    return tuple((name, tensor_digest(buffer)) for name, buffer in module.named_buffers() if name in kept)


def settings_of(path: Path) -> FrozenDigests:
    """Compute the digest of a Hugging Face model's settings: shapes alone do not tell its rotary base or its norms."""
    tree: dict[str, Any] = json.loads((path / SETTINGS if path.is_dir() else path).read_text(encoding="utf-8"))
    plain = {name: value for name, value in tree.items() if name not in ELSEWHERE}
    return ((SETTINGS, hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()),)
