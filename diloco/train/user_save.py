"""Saves of a loop of one's own: what it trains, the state of the optimizer it brought, and its dice.

The optimizer's settings are not restored: they are the program's, and may be others at a restart.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from diloco.errors import SaveError

AGAIN = "undo that, or start again with fresh=True"


def inner_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state = {"model": module.state_dict(), "rng": _dice(), "optimizer": _name(optimizer)}
    return state if optimizer is None else {**state, "moments": optimizer.state_dict()["state"]}


def restore_inner(save: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    state = _read_inner(save)
    if state["optimizer"] != _name(optimizer):
        raise SaveError(f"{save} was made with optimizer={state['optimizer']}, now it is {_name(optimizer)}: {AGAIN}")
    try:
        module.load_state_dict(state["model"])
    except RuntimeError as error:
        raise SaveError(f"{save} is of another model ({str(error).splitlines()[-1].strip()}): {AGAIN}") from None
    if optimizer is not None:
        moments = {int(number): moments for number, moments in state.get("moments", {}).items()}
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    _set_dice(state["rng"])


def _read_inner(save: Path) -> dict[str, Any]:
    """All of it, whatever it holds: the state of somebody's optimizer has a shape of its own."""
    state: dict[str, Any] = {}
    reader, planner = FileSystemReader(save / "inner"), _EmptyStateDictLoadPlanner()
    try:
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)  # as dcp_to_torch_save does it
    except (OSError, RuntimeError, ValueError, UnpicklingError, CheckpointException) as error:
        raise SaveError(f"{save}/inner cannot be loaded ({error}): delete {save} to fall back") from None
    return state


def _name(optimizer: torch.optim.Optimizer | None) -> str:
    return "none" if optimizer is None else type(optimizer).__name__


def _dice() -> dict[str, Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def _set_dice(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
