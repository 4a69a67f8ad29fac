"""A model that the user made, cut and trains: its trainable parameters as one vector, and how it can be divided."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.config.schema import SyncConfig
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import ConfigError, ModelError
from diloco.island.flat import Rule, Shards, Source
from diloco.island.layout import Layout, fragments_of
from diloco.island.mesh import ProcessMesh
from diloco.island.parallel import held, reshard
from diloco.model.build import refuse_float_buffers

WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module)\.")  # of torch.compile, of checkpointing


class OwnShards(Shards):
    """Copy the parameters of a user's model, whose optimizer changes them without calling `settle` first."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor], place: ProcessMesh) -> None:
        super().__init__(parameters, place)
        self._module = module

    def start_reading(self, out: Tensor | None, names: Collection[str] | None = None) -> Callable[[], None]:
        """Start to read, and settle at once: on the device, whatever the user's loop does next follows the copies."""
        read = super().start_reading(out, names)
        self.settle()
        return read

    def start_update(
        self, rule: Rule, *vectors: Tensor | Source | None, names: Collection[str] | None = None
    ) -> Callable[[], None]:
        """Change the parameters as `Shards` does, after FSDP has let go of what it gathered: those values are old."""
        reshard(self._module)
        return super().start_update(rule, *vectors, names=names)


@dataclass(eq=False)
class OwnModel:
    """Wrap a user's model: whole on one process, cut by FSDP2 and tensor parallelism, or with a copy on each process.
    Frozen parameters stay out of its vector."""

    module: nn.Module
    trainable: dict[str, nn.Parameter]
    shards: Shards
    place: ProcessMesh

    @classmethod
    def of(cls, module: nn.Module, place: ProcessMesh | None = None) -> "OwnModel":
        """Wrap a module, compiled or not. Raise ModelError if islands cannot exchange its parameters."""
        module = unwrapped(module)
        reshard(module)
        trainable = {WRAPPERS.sub("", name): p for name, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ModelError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in trainable.items():
            _refuse_unfit(name, parameter)
        if len(devices := {str(parameter.device) for parameter in trainable.values()}) > 1:
            raise ModelError(f"the model lies on {' and '.join(sorted(devices))}: diloco.connect takes one device")
        refuse_float_buffers(module)
        place = place or ProcessMesh(0, 1, device_of(module), None)
        _refuse_parts(trainable, place)
        return cls(module, trainable, OwnShards(module, trainable, place), place)

    @property
    def layout(self) -> Layout:
        """Return the names and shapes of the trainable parameters, in canonical order."""
        return self.shards.layout

    def fragments(self, sync: SyncConfig) -> Fragments:
        """Divide the parameters by the longest list of modules, which holds the blocks of nearly every deep model."""
        if sync.fragments == 1:
            return Fragments.whole(self.layout.size)
        modules = ((WRAPPERS.sub("", name), part) for name, part in self.module.named_modules())
        lists = {name: len(part) for name, part in modules if isinstance(part, nn.ModuleList)}
        if not lists:
            raise ConfigError(
                f"sync.fragments={sync.fragments} needs a model that keeps its blocks in an nn.ModuleList, and this "
                "one has none: set sync.fragments=1"
            )
        return fragments_of(self.layout, sync.fragments, sync.pattern, max(lists, key=lambda name: lists[name]))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's own module, without the wrappers that put a prefix before all names."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif (inner := getattr(module, "_orig_mod", None)) is not None:
            module = inner
        else:
            return module


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first trainable parameter, or the CPU where it has none."""
    return next((parameter.device for parameter in module.parameters() if parameter.requires_grad), torch.device("cpu"))


def _refuse_unfit(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype != torch.float32:
        raise ModelError(
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}: islands exchange float32, so keep trainable "
            "parameters in that and compute in less with torch.autocast"
        )


def _refuse_parts(trainable: Mapping[str, nn.Parameter], place: ProcessMesh) -> None:
    """Raise ModelError, on all processes, where they do not hold one whole model together."""
    if place.alone:
        return
    mine = [(name, tuple(parameter.shape)) for name, parameter in trainable.items()]
    if place.any(mine != place.share(mine)):
        raise ModelError(
            "the processes of this island hold parameters of different names or shapes (pipeline stages, FSDP1?): give "
            "every process the same model, cut by fully_shard, DTensors or not at all"
        )
    given = [part.values.numel() if part.gives else 0 for part in (held(p, place) for p in trainable.values())]
    counts = torch.tensor(given)
    dist.all_reduce(counts, group=place.group)
    for (name, parameter), count in zip(trainable.items(), counts.tolist(), strict=True):
        if count != parameter.numel():
            raise ModelError(
                f"{name}: the processes hold {count} of its {parameter.numel()} values: place it as Shard or Replicate "
                "on a mesh that the process of rank 0 is part of"
            )
