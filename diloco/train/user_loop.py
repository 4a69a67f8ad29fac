"""A run, as a training loop of one's own sees it: batches to train on, a step after each, everything else in between.

What `Trainer` is for the built-in model, `Run` is for somebody else's: the loop belongs to them, the rounds to us.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP
from diloco.data.shuffle import permute
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.errors import DataError, LoopError
from diloco.island.mesh import Place
from diloco.island.user_model import OwnModel
from diloco.report.events import Events
from diloco.train.participant import Participant
from diloco.train.sync import samples_ahead
from diloco.train.user_save import inner_state, restore_inner


class Run(Participant):
    """Made by `diloco.connect`; for one thread."""

    ticket: str | None = None  # what others join with, where they can

    def __init__(
        self, config: Config, model: OwnModel, optimizer: torch.optim.Optimizer | None, events: Events
    ) -> None:
        place = Place(0, 1, model.device, None)
        super().__init__(config, place, events, model.shards, model.fragments(config.sync), None)
        self.optimizer = optimizer
        self._model = model
        self._drawn: Ranges = ()  # samples since the last step

    @property
    def steps(self) -> int:
        """Where that ends."""
        return self.sync.config.inner.steps

    @property
    def round(self) -> int:
        return self.sync.view.head.round

    @property
    def folder(self) -> Path:
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
        """Batches until the run ends; over all islands, each sample once in an epoch.

        `dataset` is anything with a length and an index. Islands share the work by position, so they need the same
        data in the same order. Each epoch has an order of its own that follows from the run's seed, unless `shuffle`
        is off. `per_step` is the number of batches that make up one optimizer step.
        """
        batch_size = batch_size or self.config.island.batch
        _refuse_unfit(dataset, batch_size, per_step)
        want = samples_ahead(self.config, batch_size * per_step)
        assert self.rounds is not None
        self.rounds.session.ask(want)
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
        """After each step of the optimizer: what is due is sent, what has come is applied. True while the run goes on.

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
        """What all islands agree on is in the model inside, for evaluation; what is trained here is put back."""
        return self.sync.exchange.outer_parameters()

    def inner_state(self) -> dict[str, Any]:
        return inner_state(self._model.module, self.optimizer)

    def load_inner(self, save: Path, facts: dict[str, Any]) -> None:
        restore_inner(save, self._model.module, self.optimizer)

    def begin(self) -> None:
        """Report what is trained, and from where."""
        module = self._model.module
        self.report_start(
            module, model=type(module).__name__, data=OWN_LOOP, data_tokens=None, dtype="float32",
            mesh="fsdp 1 x tp 1", tokens_per_step=None,
        )  # fmt: skip
        self.sync.finish_step()


def indices(batch: Ranges, length: int, seed: int | None) -> list[int]:
    """The samples at these positions, which run on over epochs; each epoch has its own order, if there is a seed."""
    positions = np.concatenate([np.arange(lo, hi) for lo, hi in batch])
    epochs, places = np.divmod(positions, length)
    if seed is not None:
        for epoch in np.unique(epochs):
            now = epochs == epoch
            places[now] = permute(places[now], length, seed, int(epoch))
    return [int(place) for place in places]


def _refuse_unfit(dataset: Any, batch_size: int, per_step: int) -> None:
    if batch_size < 1 or per_step < 1:
        raise LoopError(f"run.batches with batch_size={batch_size}, per_step={per_step}: both are 1 or more")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"run.batches wants data with a length and an index, and {type(dataset).__name__} lacks one: islands share "
            "samples by position (or loop over a loader of your own, and call run.step())"
        )
    if len(dataset) == 0:
        raise DataError("run.batches: the data is empty")
