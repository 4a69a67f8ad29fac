"""A run, as a user's own training loop sees it: batches to train on, a step after each, everything else in between.

What `Trainer` is for the built-in model, `Run` is for a user's: the loop belongs to the user, the rounds to diloco.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from diloco.checkpoint.save import read_whole_inner
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP
from diloco.data.shuffle import over_epochs
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.errors import DataError, LoopError, SaveError
from diloco.island.mesh import ProcessMesh
from diloco.island.user_model import OwnModel
from diloco.model.frozen import FrozenDigests, frozen_of
from diloco.report.events import Events
from diloco.train.participant import Participant
from diloco.train.sync import samples_ahead


class Run(Participant):
    """Connect a user's own training loop to a run. Made by `diloco.connect`; for one thread."""

    ticket: str | None = None  # what others join with, where they can

    def __init__(
        self, config: Config, model: OwnModel, optimizer: torch.optim.Optimizer | None, events: Events
    ) -> None:
        place = ProcessMesh(0, 1, model.device, None)
        super().__init__(config, place, events, model.shards, model.fragments(config.sync), None)
        self.optimizer = optimizer
        self._model = model
        self._drawn: Ranges = ()  # samples since the last step

    @property
    def steps(self) -> int:
        """Return the step of the run's clock at which the run ends, with what its owner has changed."""
        return self.sync.config.inner.steps

    @property
    def round(self) -> int:
        """Return the number of the last committed round that this island has seen."""
        return self.sync.view.head.round

    @property
    def folder(self) -> Path:
        """Return where this island keeps its saves and its log."""
        return Path(self.config.dir)

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        shuffle: bool = True,
        per_step: int = 1,
    ) -> Iterator[Any]:
        """Yield batches until the run ends; over all islands, each sample comes once in an epoch.

        `dataset` is anything with a length and an index. Islands share the work by position, so they need the same data
        in the same order. Each epoch has an order of its own that follows from the run's seed, unless `shuffle` is off.
        `per_step` is the number of batches that make up one optimizer step.
        """
        batch_size = batch_size or self.config.island.batch
        _refuse_unfit(dataset, batch_size, per_step)
        want = samples_ahead(self.config, batch_size * per_step)
        assert self.rounds is not None
        self.rounds.session.request_samples(want)
        seed = self.config.seed if shuffle else None
        return self._batches(dataset, batch_size, want, seed, collate)

    def _batches(
        self, dataset: Any, count: int, most: int, seed: int | None, collate: Callable[[list[Any]], Any]
    ) -> Iterator[Any]:
        while not self.finished:
            if size(self._drawn) + count > most:
                raise LoopError(
                    f"{size(self._drawn)} samples were drawn without a step: call run.step() after each optimizer step "
                    "(and if several batches make up one, say so: run.batches(..., per_step=4))"
                )
            batch = first(minus(self.sync.pool, self._drawn), count)
            if size(batch) == count:
                self._drawn = normal((*self._drawn, *batch))
                yield collate([dataset[index] for index in indices(batch, len(dataset), seed)])
            else:
                self.sync.without_samples(size(self._drawn) + count)

    def step(self, tokens: int | None = None, loss: Tensor | float | None = None) -> bool:
        """Send what is due and apply what has come, after each optimizer step. Return False when the run has ended.

        `tokens` is the weight of what was trained, by default the number of samples.
        """
        if self.finished:
            return False
        drawn, self._drawn = self._drawn, ()
        tokens = max(1, size(drawn)) if tokens is None else int(tokens)
        if tokens < max(1, size(drawn)):
            raise LoopError(f"run.step(tokens={tokens}) after {size(drawn)} samples: count at least one for each")
        self.sync.trained(drawn, tokens)
        self.observe(tokens, None if loss is None else torch.as_tensor(loss).detach().float().mean(), skipped=0)
        self.after_step()
        return not self.finished

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Evaluate inside this context: the model holds what all islands agree on, and gets its own values back after
        it."""
        return self.sync.exchange.outer_parameters()

    @cached_property
    def frozen(self) -> FrozenDigests:
        return frozen_of(self._model.module)

    def inner_state(self) -> dict[str, Any]:
        return inner_state(self._model.module, self.optimizer)

    def load_inner(self, save: Path, facts: dict[str, Any]) -> None:
        restore_inner(save, self._model.module, self.optimizer)

    def begin(self) -> None:
        """Report what is trained and from where, then carry out what an earlier life of this island was waiting for."""
        module = self._model.module
        self.report_start(
            module, model=type(module).__name__, data=OWN_LOOP, data_tokens=None, dtype="float32",
            mesh="fsdp 1 x tp 1", tokens_per_step=None,
        )  # fmt: skip
        self.sync.finish_step()


def indices(batch: Ranges, length: int, seed: int | None) -> list[int]:
    """Return the samples at these positions, which continue over epochs, as indices into the user's data."""
    positions = np.concatenate([np.arange(lo, hi) for lo, hi in batch])
    return [int(place) for place in over_epochs(positions, length, seed)]


def _refuse_unfit(dataset: Any, batch_size: int, per_step: int) -> None:
    """Raise an error for data or batch sizes that islands cannot share."""
    if batch_size < 1 or per_step < 1:
        raise LoopError(f"run.batches with batch_size={batch_size}, per_step={per_step}: both are 1 or more")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"run.batches wants data with a length and an index, and {type(dataset).__name__} lacks one: islands share "
            "samples by position (or loop over a loader of your own, and call run.step())"
        )
    if len(dataset) == 0:
        raise DataError("run.batches: the data is empty")


# Saves: what it trains, the state of the optimizer it brought, and its dice. The optimizer's settings are not restored:
# they are the program's, and may be others at a restart.

AGAIN = "undo that, or start again with fresh=True"


def inner_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Collect what a save holds: the model, the state of the user's optimizer, and the random numbers' states."""
    dice = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        dice["cuda"] = torch.cuda.get_rng_state()
    state = {"model": module.state_dict(), "rng": dice, "optimizer": _name(optimizer)}
    return state if optimizer is None else {**state, "moments": optimizer.state_dict()["state"]}


def restore_inner(save: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load what `inner_state` collected, except for the optimizer's settings. Another model or optimizer is refused."""
    state = read_whole_inner(save)
    if state["optimizer"] != _name(optimizer):
        raise SaveError(f"{save} was made with optimizer={state['optimizer']}, now it is {_name(optimizer)}: {AGAIN}")
    try:
        module.load_state_dict(state["model"])
    except RuntimeError as error:
        raise SaveError(f"{save} is of another model ({str(error).splitlines()[-1].strip()}): {AGAIN}") from None
    if optimizer is not None:
        moments = state.get("moments", {})
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(state["rng"]["cpu"])
    if "cuda" in state["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["rng"]["cuda"])


def _name(optimizer: torch.optim.Optimizer | None) -> str:
    return "none" if optimizer is None else type(optimizer).__name__
