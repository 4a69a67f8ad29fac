"""A model that the user made and trains: its trainable parameters as one vector, and how it can be cut."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.config.schema import SyncConfig
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import ConfigError, ModelError
from diloco.island.flat import Shards
from diloco.island.layout import Layout, fragments_of
from diloco.island.mesh import ProcessMesh
from diloco.model.build import refuse_float_buffers


class OwnShards(Shards):
    """Copy the parameters of a user's model, whose optimizer changes them without calling `settle` first."""

    def start_reading(self, out: Tensor | None, names: Collection[str] | None = None) -> Callable[[], None]:
        """Start to read, and settle at once: on the device, whatever the user's loop does next follows the copies."""
        read = super().start_reading(out, names)
        self.settle()
        return read


@dataclass(eq=False)
class OwnModel:
    """Wrap a user's model, which is held by one process. FrozenDigests parameters stay out of its vector."""

    module: nn.Module
    trainable: dict[str, nn.Parameter]
    shards: Shards

    @classmethod
    def of(cls, module: nn.Module) -> "OwnModel":
        """Wrap a module, compiled or not. Raise ModelError if islands cannot exchange its parameters."""
        module = getattr(module, "_orig_mod", module)  # torch.compile puts a prefix before all names
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ModelError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in module.named_parameters():
            _refuse_unfit(name, parameter)
        if len(devices := {str(parameter.device) for parameter in trainable.values()}) > 1:
            raise ModelError(f"the model lies on {' and '.join(sorted(devices))}: diloco.connect takes one device")
        refuse_float_buffers(module)
        place = ProcessMesh(0, 1, next(iter(trainable.values())).device, None)
        return cls(module, trainable, OwnShards(trainable, place))

    @property
    def layout(self) -> Layout:
        """Return the names and shapes of the trainable parameters, in canonical order."""
        return self.shards.layout

    @property
    def device(self) -> torch.device:
        """Return the one device that holds all trainable parameters."""
        return next(iter(self.trainable.values())).device

    def fragments(self, sync: SyncConfig) -> Fragments:
        """Divide the parameters by the longest list of modules, which holds the blocks of nearly every deep model."""
        if sync.fragments == 1:
            return Fragments.whole(self.layout.size)
        lists = {name: len(part) for name, part in self.module.named_modules() if isinstance(part, nn.ModuleList)}
        if not lists:
            raise ConfigError(
                f"sync.fragments={sync.fragments} needs a model that keeps its blocks in an nn.ModuleList, and this "
                "one has none: set sync.fragments=1"
            )
        return fragments_of(self.layout, sync.fragments, sync.pattern, max(lists, key=lambda name: lists[name]))


def _refuse_unfit(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ModelError(
            f"{name} is a DTensor: diloco.connect takes part with one process an island, so leave the model unsharded "
            "(FSDP and tensor parallelism are for `diloco run`)"
        )
    if parameter.requires_grad and parameter.dtype != torch.float32:
        raise ModelError(
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}: islands exchange float32, so keep trainable "
            "parameters in that and compute in less with torch.autocast"
        )
