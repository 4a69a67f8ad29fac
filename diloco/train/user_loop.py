"""A run, as a user's own training loop sees it: batches to train on, a step after each, everything else in between.

What `Trainer` is for the built-in model, `Run` is for a user's: the loop belongs to the user, the rounds to diloco.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from diloco.checkpoint.save.inner import OF_ONE_RANK, Keys, Like
from diloco.checkpoint.save.saver import read_inner_tree
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP
from diloco.data.shuffle import over_epochs
from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size
from diloco.errors import DataError, LoopError, SaveError
from diloco.island.mesh import ProcessMesh
from diloco.island.parallel import reshard, whole
from diloco.island.user_model import OwnModel
from diloco.model.frozen import FrozenDigests, frozen_of
from diloco.report.sinks import Events
from diloco.train.participant import Participant
from diloco.train.sync import never, samples_ahead


class Run(Participant):
    """Connect a user's own training loop to a run. Made by `diloco.connect`; for one thread."""

    ticket: str | None = None  # what others join with, where they can
    should_stop: Callable[[], bool] = staticmethod(never)  # a signal has come
    leaving = False  # as all processes of the island know: it was asked to stop, and the loop is to end

    def __init__(
        self, config: Config, model: OwnModel, optimizer: torch.optim.Optimizer | None, events: Events
    ) -> None:
        super().__init__(config, model.place, events, model.shards, model.fragments(config.sync), None)
        self.optimizer = optimizer
        self._model = model
        self._frozen = frozen_of(model.module)  # now, by all processes: of what is sharded they need each other
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
        mesh: DeviceMesh | None = None,
    ) -> Iterator[Any]:
        """Yield batches until the run ends; over all islands, each sample comes once in an epoch.

        `dataset` is anything with a length and an index. Islands share the work by position, so they need the same data
        in the same order. Each epoch has an order of its own that follows from the run's seed, unless `shuffle` is off.
        `per_step` is the number of batches that make up one optimizer step. An island of several processes names the
        `mesh` over which they train on different samples: `batch_size` is the island's, each process gets its part.
        """
        batch_size = batch_size or self.config.island.batch
        _refuse_unfit(dataset, batch_size, per_step)
        part = part_of(batch_size, mesh, self.place.world)
        want = samples_ahead(self.config, batch_size * per_step)
        if self.rounds is not None:
            self.rounds.session.request_samples(want)
        seed = self.config.seed if shuffle else None
        return self._batches(batch_size, want, lambda batch: collate(
            [dataset[index] for index in indices(batch, len(dataset), seed)[part]]
        ))  # fmt: skip

    def _batches(self, count: int, most: int, read: Callable[[Ranges], Any]) -> Iterator[Any]:
        while not self.finished and not self.leaving:
            if size(self._drawn) + count > most:
                raise LoopError(
                    f"{size(self._drawn)} samples were drawn without a step: call run.step() after each optimizer step "
                    "(and if several batches make up one, say so: run.batches(..., per_step=4))"
                )
            batch = first(minus(self.sync.pool, self._drawn), count)
            if size(batch) == count:
                self._drawn = normal((*self._drawn, *batch))
                yield read(batch)
            else:
                self.sync.without_samples(size(self._drawn) + count, self.should_stop)
                self.leaving = self.place.any(self.should_stop())

    def step(self, tokens: int | None = None, loss: Tensor | float | None = None) -> bool:
        """Send what is due and apply what has come, after each optimizer step. Return False when the run has ended, or
        this program was asked to stop (SIGTERM): then leave the block.

        `tokens` is the weight of what the island has trained, by default the number of its samples. All processes of
        an island call this; the loss that is reported is the mean of theirs.
        """
        if self.finished:
            return False
        drawn, self._drawn = self._drawn, ()
        tokens = max(1, size(drawn)) if tokens is None else int(tokens)
        if tokens < max(1, size(drawn)):
            raise LoopError(f"run.step(tokens={tokens}) after {size(drawn)} samples: count at least one for each")
        self.sync.trained(drawn, tokens)
        value = None if loss is None else whole(torch.as_tensor(loss).detach()).float().mean()
        self.observe(tokens, value, skipped=0)
        self.after_step(self.should_stop)
        self.leaving = self.place.any(self.should_stop())
        return not self.finished and not self.leaving

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Evaluate inside this context: the model holds what all islands agree on, and gets its own values back after
        it."""
        return self.sync.exchange.outer_parameters()

    @property
    def frozen(self) -> FrozenDigests:
        return self._frozen

    def inner_state(self) -> dict[str, Any]:
        reshard(self._model.module)  # a save holds what each process has, not what it has gathered
        return inner_state(self._model.module, self.optimizer, self.place)

    def load_inner(self, save: Path, facts: dict[str, Any]) -> None:
        reshard(self._model.module)
        restore_inner(save, self._model.module, self.optimizer, self.place)

    def begin(self) -> None:
        """Report what is trained and from where, then carry out what an earlier life of this island was waiting for."""
        module = self._model.module
        self.report_start(
            module, model=type(module).__name__, data=OWN_LOOP, data_tokens=None, dtype="float32",
            mesh=f"{self.place.world} process{'es' * (not self.place.alone)}", tokens_per_step=None,
        )  # fmt: skip
        self.sync.finish_step()


def indices(batch: Ranges, length: int, seed: int | None) -> list[int]:
    """Return the samples at these positions, which continue over epochs, as indices into the user's data."""
    positions = np.concatenate([np.arange(lo, hi) for lo, hi in batch])
    return [int(place) for place in over_epochs(positions, length, seed)]


def part_of(batch_size: int, mesh: DeviceMesh | None, processes: int) -> slice:
    """Return which part of an island's batch this process trains on: its own along the mesh, or all of it."""
    if mesh is None:
        if processes > 1:
            raise LoopError(
                f"run.batches on {processes} processes: say which of them share a batch, as run.batches(..., "
                'mesh=mesh["fsdp"]); those along a tensor-parallel dimension get the same samples'
            )
        return slice(0, batch_size)
    coordinate = mesh.get_coordinate()
    if coordinate is None or batch_size % mesh.size():
        raise LoopError(
            f"run.batches: batch_size={batch_size} is to be a multiple of the mesh's {mesh.size()} processes"
        )
    rank = 0
    for at, length in zip(coordinate, mesh.mesh.shape, strict=True):
        rank = rank * length + at
    count = batch_size // mesh.size()
    return slice(rank * count, (rank + 1) * count)


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


def inner_state(module: nn.Module, optimizer: torch.optim.Optimizer | None, place: ProcessMesh) -> dict[str, Any]:
    """Collect what a save holds: the model, the state of the user's optimizer, and the random numbers' states."""
    dice = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        dice["cuda"] = torch.cuda.get_rng_state()
    state = {"model": module.state_dict(), _dice(place): dice, "optimizer": _name(optimizer)}
    return state if optimizer is None else {**state, "moments": optimizer.state_dict()["state"]}


def restore_inner(save: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, place: ProcessMesh) -> None:
    """Load what `inner_state` collected, except for the optimizer's settings. Another model or optimizer is refused.

    Random numbers are restored where the save has them: one of fewer processes lacks those of others.
    """
    state = read_inner_tree(save, _cut_like(module, optimizer), place.group)
    if state["optimizer"] != _name(optimizer):
        raise SaveError(f"{save} was made with optimizer={state['optimizer']}, now it is {_name(optimizer)}: {AGAIN}")
    try:
        module.load_state_dict(state["model"])
    except RuntimeError as error:
        raise SaveError(f"{save} is of another model ({str(error).splitlines()[-1].strip()}): {AGAIN}") from None
    if optimizer is not None:
        moments = state.get("moments", {})
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    dice = state.get(_dice(place), {})
    if "cpu" in dice:
        torch.set_rng_state(dice["cpu"])
    if "cuda" in dice and torch.cuda.is_available():
        torch.cuda.set_rng_state(dice["cuda"])


def _dice(place: ProcessMesh) -> str:
    """Name what holds a process' random numbers in a save; each process but the leader has an entry of its own."""
    return "rng" if place.leader else f"{OF_ONE_RANK}{place.rank}"


def _cut_like(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Like:
    """Return how the tensors of a save are cut here: the state of the optimizer as the parameter that it belongs to."""
    model = module.state_dict()
    groups = optimizer.param_groups if optimizer is not None else []
    parameters = [parameter for group in groups for parameter in group["params"]]

    def like(path: Keys) -> Tensor | None:
        if path[0] == "moments" and isinstance(path[1], int) and path[1] < len(parameters):
            return parameters[path[1]]
        return model.get(str(path[1])) if path[0] == "model" else None

    return like


def _name(optimizer: torch.optim.Optimizer | None) -> str:
    return "none" if optimizer is None else type(optimizer).__name__
