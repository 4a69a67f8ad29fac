"""A plain save: everything the next step depends on, in one folder that appears at once or not at all.

`DIR/save-00000400/` holds `inner/` (torch distributed checkpoint: each process writes its shards, any mesh can load
them), `outer.safetensors` (the outer state) and `facts.json`, written last.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from diloco.errors import SaveError

KEEP = 2


def write_save(
    folder: Path, step: int, *, inner: dict[str, Any], outer: dict[str, Tensor], facts: dict[str, Any]
) -> Path:
    """All processes of the island call it; the leader (rank 0) alone needs `outer` and `facts`."""
    leader = not dist.is_initialized() or dist.get_rank() == 0
    final = folder / f"save-{step:08}"
    part = folder / f"{final.name}.part"
    if leader:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    _barrier()
    with _one_process_is_fine():
        save(inner, checkpoint_id=part / "inner", no_dist=not dist.is_initialized())
    if leader:
        save_file(outer, part / "outer.safetensors")
        (part / "facts.json").write_text(json.dumps({"step": step, **facts}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in saves(folder)[:-KEEP]:
            shutil.rmtree(old)
    _barrier()
    return final


def saves(folder: Path) -> list[Path]:
    """Complete saves, oldest first."""
    return sorted(path.parent for path in folder.glob("save-*/facts.json") if path.parent.suffix != ".part")


def read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / "facts.json").read_text())
    except (OSError, ValueError) as error:
        raise SaveError(
            f"{folder}/facts.json cannot be read ({error}): delete {folder} to fall back to an older save"
        ) from None
    if not isinstance(facts, dict):
        raise SaveError(f"{folder}/facts.json is damaged: delete {folder} to fall back to an older save")
    return facts


def read_outer(folder: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(folder / "outer.safetensors")
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{folder}/outer.safetensors cannot be read ({error}): delete {folder} to fall back") from None
    return tensors


def read_inner(folder: Path, into: dict[str, Any]) -> None:
    """Fill the tensors of `into`, each process its own shards. The files are the island's own, never a peer's."""
    try:
        with _one_process_is_fine():
            load(into, checkpoint_id=folder / "inner", no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise SaveError(f"{folder}/inner cannot be loaded: {str(error).splitlines()[0]}") from error


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
