"""A run, as a training loop of one's own sees it: batches to train on, a step after each, everything else in between.

What `Trainer` is for the built-in model, `Run` is for somebody else's: the loop belongs to them, the rounds to us.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from diloco.checkpoint.save import Saver, read_outer, write_save
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP
from diloco.data.shuffle import permute
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.errors import DataError, LoopError
from diloco.island.mesh import Place
from diloco.island.user_model import OwnModel
from diloco.model.flops import Meter
from diloco.report.events import Events
from diloco.run.join import agreement, samples_ahead
from diloco.train.alone import Alone
from diloco.train.amend import in_words
from diloco.train.exchange import Outside
from diloco.train.own_save import facts_to_go_on, inner_state, restore_inner
from diloco.train.rounds import Together
from diloco.train.sync import Membership
from diloco.train.trainer import describe_device


class Run:
    """Made by `diloco.connect`; for one thread."""

    def __init__(
        self,
        config: Config,
        model: OwnModel,
        optimizer: torch.optim.Optimizer | None,
        events: Events,
        outside: Outside,
        ticket: str | None = None,
    ) -> None:
        self.config, self.optimizer, self.ticket = config, optimizer, ticket
        self._model, self._events, self._outside = model, events, outside
        place = Place(0, 1, model.device, None)
        self._membership = Membership(model, place, config, outside, self._after_round)
        self._amendments = 0  # that were told of
        self._passes = self._membership.passes  # when last looked at
        self._drawn: Ranges = ()  # samples since the last step
        self._losses: list[Tensor] = []
        self._meter = Meter(0.0, None)
        self._tell_start(place)
        self._tell_amendments()

    @property
    def step_count(self) -> int:
        """The run's clock: inner steps of the outer state, and those done here since. What a learning rate follows."""
        return self._membership.step

    @property
    def steps(self) -> int:
        """Where that ends."""
        return self._membership.config.inner.steps

    @property
    def round(self) -> int:
        return self._membership.round

    @property
    def finished(self) -> bool:
        return self._membership.finished

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
        self._outside.ask(want)
        seed = self.config.seed if shuffle else None
        return self._batches(dataset, batch_size, want, seed, collate)

    def _batches(
        self, dataset: Any, count: int, most: int, seed: int | None, collate: Callable[[list[Any]], Any]
    ) -> Iterator[Any]:
        while not self.finished:
            batch = first(minus(self._membership.pool, self._drawn), count)
            if size(batch) == count:
                self._drawn = normal((*self._drawn, *batch))
                if size(self._drawn) > most:
                    raise LoopError(
                        f"{size(self._drawn)} samples were drawn without a step: call run.step() after each optimizer "
                        "step, and if several batches make up one, say so: run.batches(..., per_step=4)"
                    )
                yield collate([dataset[index] for index in indices(batch, len(dataset), seed)])
            else:
                self._membership.without_samples(size(self._drawn) + count)

    def step(self, tokens: int | None = None, loss: Tensor | float | None = None) -> bool:
        """After each step of the optimizer: what is due is sent, what has come is taken in. True while the run goes on.

        `tokens` is the weight of what was trained, by default the number of samples.
        """
        if self.finished:
            return False
        drawn, self._drawn = self._drawn, ()
        tokens = max(1, size(drawn)) if tokens is None else int(tokens)
        if tokens < max(1, size(drawn)):
            raise LoopError(f"run.step(tokens={tokens}) after {size(drawn)} samples: count at least one for each")
        self._membership.trained(drawn, tokens)
        self._observe(tokens, loss)
        waited_s = self._membership.waited_s
        self._membership.sync_if_due()
        self._meter.pause(self._membership.waited_s - waited_s)
        return not self.finished

    def outer_parameters(self) -> AbstractContextManager[None]:
        """What all islands agree on is in the model inside, for evaluation; what is trained here is put back."""
        return self._membership.exchange.outer_parameters()

    def leave(self) -> None:
        """Contribute what is left, say goodbye, save."""
        self._membership.leave()
        try:
            self.save()
        finally:
            self._events.emit("end", step=self.step_count, finished=self.finished)
            if isinstance(self._outside, Together):
                self._events.emit("agreed", **agreement(self._outside))

    @cached_property
    def saver(self) -> Saver:
        return Saver(
            self.folder,
            lambda step, path, seconds: self._events.emit("save", step=step, path=str(path), seconds=seconds),
            lambda error: self._events.emit("note", text=f"training goes on, but {error}"),
        )

    def _save_if_possible(self) -> None:
        """In the background. A full disk is no reason to stop: there may be space for the next one."""
        inner = inner_state(self._model.module, self.optimizer)
        self.saver.begin(self.step_count, inner=inner, outer=self._outer_to_save(), facts=self._facts())

    def save(self) -> Path:
        """On disk when it returns."""
        self.saver.wait()
        started = time.perf_counter()
        inner = inner_state(self._model.module, self.optimizer)
        path = write_save(self.folder, self.step_count, inner=inner, outer=self._outer_to_save(), facts=self._facts())
        seconds = time.perf_counter() - started
        self._events.emit("save", step=self.step_count, path=str(path), seconds=seconds)
        return path

    def resume(self, save: Path) -> None:
        """Go on from an earlier save of this loop, exactly where it stopped."""
        facts, vectors = facts_to_go_on(save, self.config), read_outer(save)
        restore_inner(save, self._model.module, self.optimizer)
        if isinstance(self._outside, Alone):
            self._outside.restore(vectors, facts)
            self._membership.exchange.restore(vectors)
        self._membership.exchange.set_facts(facts["exchange"])
        self._membership.look()
        self._membership.synced = self.step_count
        self._passes = self._membership.passes
        self._events.emit("resume", step=self.step_count, path=str(save))

    def _outer_to_save(self) -> dict[str, Tensor]:
        if isinstance(self._outside, Together):
            with self._outside.driver.replica.reading() as vectors:
                return {name: vector.clone() for name, vector in vectors.items()}
        anchor = self._membership.exchange.vectors(self._outside.parameters)
        return {**self._outside.vectors, **anchor, **self._outside.launched_vectors()}

    def _facts(self) -> dict[str, Any]:
        return {
            "round": self.round, "outer_step": self._membership.outer_step,
            "exchange": self._membership.exchange.facts(),
            "launched": self._outside.launched_facts() if isinstance(self._outside, Alone) else [],
            "position": self._membership.pool[0][0] if self._membership.pool else 0,
            "skipped": 0, "checked_at": (0, 0), "data": OWN_LOOP, "config": self.config.model_dump(mode="json"),
            "names": self._model.layout.names, "shapes": self._model.layout.shapes,
        }  # fmt: skip

    def _after_round(self) -> None:
        for story in self._outside.stories():
            self._events.emit("round", **story, round_s=self._membership.round_s)
        self._tell_amendments()
        passes = self._membership.passes
        if passes != self._passes and passes % self.config.checkpoint.snapshot_every == 0 and not self.finished:
            self._save_if_possible()
        self._passes = passes

    def _tell_amendments(self) -> None:
        """What the run's owner has changed."""
        for amendment in self._membership.amendments[self._amendments :]:
            self._events.emit("amended", number=amendment.number, text=in_words(amendment), steps=self.steps)
        self._amendments = len(self._membership.amendments)

    def _observe(self, tokens: int, loss: Tensor | float | None) -> None:
        """Losses are collected without waiting for the device; read and told every so often."""
        if loss is not None:
            self._losses.append(torch.as_tensor(loss).detach().float().mean())
        self._meter.count(tokens)
        if self.step_count % self.config.log.every and self.step_count != self.steps:
            return
        mean = torch.stack(self._losses).mean().item() if self._losses else math.nan
        rate = self._meter.tokens_per_s()
        self._events.emit("step", step=self.step_count, loss=mean, tokens_per_s=rate, mfu=None, skipped=0)
        self._losses.clear()
        self._meter.reset()

    def _tell_start(self, place: Place) -> None:
        module, config = self._model.module, self.config
        self._events.emit(
            "start", run=config.run, dir=config.dir, model=type(module).__name__,
            parameters=sum(p.numel() for p in module.parameters()), trained_parameters=self._model.layout.size,
            data=OWN_LOOP, data_tokens=None, device=describe_device(place.device), dtype="float32",
            mesh="fsdp 1 x tp 1", steps=self.steps, every=config.sync.every, tokens_per_step=None,
        )  # fmt: skip


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
