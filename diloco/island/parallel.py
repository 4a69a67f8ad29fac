"""How a model is cut over a mesh: tensor parallel inside each block, FSDP2 around it.

What torch does not do by itself and this file does: keep tied embeddings tied (`parallelize_module` unties them),
sum the gradient of QK-norms over the heads of all tensor-parallel ranks, and take one gradient norm over parameters
that live on different meshes (`clip_grad_norm_` refuses).
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from diloco.checkpoint.save.inner import is_cut, offset_of
from diloco.errors import ModelError
from diloco.island.layout import Box
from diloco.island.mesh import ProcessMesh
from diloco.model.build import Anatomy

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

ATTENTION_IN, FEED_FORWARD_IN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def shard(module: nn.Module, anatomy: Anatomy, place: ProcessMesh, compute_dtype: torch.dtype) -> None:
    """Turn the parameters of `module` (on the meta device) into DTensors on the place's mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    assert place.mesh is not None
    # torch warns that gathering a parameter cut in both dimensions takes two steps; it does, and it is right
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ties = tied_names(module)
    if place.mesh["tp"].size() > 1:
        check_tensor_parallel(module, anatomy, place.mesh["tp"].size())
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        parallelize_module(module, place.mesh["tp"], tensor_parallel_plan(module, anatomy))
        retie(module, ties)
        for name in frozen:  # parameters made anew are trainable again
            module.get_parameter(name).requires_grad_(False)
    # inputs stay as they are: the residual stream already has the compute type, and rotary angles must not lose theirs
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    frees = place.mesh["fsdp"].size() > 1  # else nothing has to be gathered anew for the backward pass
    for block in blocks_of(module, anatomy):
        fully_shard(block, mesh=place.mesh["fsdp"], mp_policy=policy, reshard_after_forward=frees)
    fully_shard(module, mesh=place.mesh["fsdp"], mp_policy=policy)


def tensor_parallel_plan(module: nn.Module, anatomy: Anatomy) -> dict[str, "ParallelStyle"]:
    """Split columns of q, k, v, gate and up, rows of o and down, and the vocabulary, but not the residual stream."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    attention = f"{anatomy.blocks}.*.{anatomy.attention}"
    feed_forward = f"{anatomy.blocks}.*.{anatomy.feed_forward}"
    plan: dict[str, ParallelStyle] = {
        anatomy.embed: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        anatomy.head: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        **{f"{attention}.{name}": ColwiseParallel() for name in ATTENTION_IN},
        f"{attention}.o_proj": RowwiseParallel(),
        **{f"{feed_forward}.{name}": ColwiseParallel() for name in FEED_FORWARD_IN},
        f"{feed_forward}.down_proj": RowwiseParallel(),
    }
    for norm in ("q_norm", "k_norm"):
        if any(name.endswith(f"{anatomy.attention}.{norm}") for name, _ in module.named_modules()):
            # [B, S, heads, E] split along heads: each rank sees some heads, so the weight's gradient is a partial sum
            plan[f"{attention}.{norm}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def check_tensor_parallel(module: nn.Module, anatomy: Anatomy, tp: int) -> None:
    """Refuse what the plan would cut wrongly, before torch does so in its own words."""

    def part(name: str) -> Any:
        try:
            return module.get_submodule(name)
        except AttributeError:
            raise ModelError(f"island.tp={tp} needs a Llama-type model; this one has no {name}: use tp=1") from None

    part(anatomy.embed), part(anatomy.head)
    for number, _ in part(anatomy.blocks).named_children():
        block = f"{anatomy.blocks}.{number}"
        attention, feed_forward = f"{block}.{anatomy.attention}", f"{block}.{anatomy.feed_forward}"
        head_dim = part(attention).head_dim
        counts = {f"{attention}.{name}": part(f"{attention}.{name}").out_features // head_dim for name in ATTENTION_IN}
        counts |= {f"{feed_forward}.{name}": part(f"{feed_forward}.{name}").out_features for name in FEED_FORWARD_IN}
        for name, count in counts.items():
            if count % tp:
                raise ModelError(
                    f"island.tp={tp} does not divide the {count} heads or columns of {name}: use another tp"
                )


def blocks_of(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Return the transformer blocks in order, which are sharded, checkpointed or compiled one by one."""
    return list(module.get_submodule(anatomy.blocks).children())


def norms_of(module: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Return the small parts with parameters that stand beside the blocks, the embedding and the head: norms."""
    beside = (f"{anatomy.blocks}.", f"{anatomy.embed}.", f"{anatomy.head}.")
    owners = {name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False)}
    return [module.get_submodule(name) for name in sorted(owners) if name and not f"{name}.".startswith(beside)]


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the groups of parameter names that are one tensor."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def retie(module: nn.Module, ties: list[list[str]]) -> None:
    """Give all names of each group the tensor of its first one again, as `tied_names` found them."""
    for first, *others in ties:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


def gather_gradients(module: nn.Module, on: bool) -> None:
    """Let the next backward pass of a module that `shard` has cut reduce gradients over the processes, or only add."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(on)


def reshard(module: nn.Module) -> None:
    """Let FSDP free the whole parameters that it keeps gathered after a forward pass, in all parts of a module."""
    if "torch.distributed.fsdp" not in sys.modules:
        return  # so nothing of it is FSDP's
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm over all gradients, as a plain tensor that is equal on every process."""
    by_mesh: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[cut_over(gradient)].append(local(gradient))
    norms = []
    for (mesh, dimensions), group in by_mesh.items():
        norm = get_total_norm(group)
        if mesh is not None and dimensions:
            norm = norm.square()
            for dimension in dimensions:
                dist.all_reduce(norm, group=mesh.get_group(dimension))
            norm = norm.sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def cut_over(tensor: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return a tensor's mesh, and those of its dimensions along which processes hold different parts of the tensor."""
    if not is_cut(tensor):
        return None, ()
    assert not any(way.is_partial() for way in tensor.placements), "FSDP2 reduces gradients before anybody sees them"
    dimensions = (dimension for dimension, way in enumerate(tensor.placements) if not way.is_replicate())
    return tensor.device_mesh, tuple(dimensions)


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. Every process of the mesh must call this."""
    return tensor.full_tensor() if is_cut(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if is_cut(tensor) else tensor


@dataclass(frozen=True)
class Held:
    """Describe what this process holds of a parameter: a box of it."""

    parameter: Tensor
    offset: tuple[int, ...]  # in the whole parameter
    gives: bool  # of several processes that have the same, one gives it out

    @property
    def values(self) -> Tensor:
        """Return the local part of the parameter, sharing its memory."""
        return local(self.parameter)


def held(parameter: Tensor, place: ProcessMesh) -> Held:
    """Locate what this process holds of a parameter, and choose which one of equal holders gives it out."""
    if not is_cut(parameter):
        return Held(parameter, (0,) * parameter.ndim, place.leader)
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a process holds parameters of its own meshes only"
    first = all(at == 0 for at, way in zip(coordinate, placements, strict=True) if way.is_replicate())
    # a mesh over some of the processes has brothers with the same values: the leader's holds all of them
    return Held(parameter, offset_of(parameter), first and 0 in mesh.mesh)


Slices = tuple[slice, ...]


def overlap(box: Box, mine: Held) -> tuple[Slices, Slices] | None:
    """Return where a box of the whole parameter overlaps the part held here, in that part and in the box; else None."""
    ends = zip(box, mine.offset, mine.values.shape, strict=True)
    shared = tuple((max(lo, at), min(hi, at + length)) for (lo, hi), at, length in ends)
    if any(lo >= hi for lo, hi in shared):
        return None
    here = slices(tuple((lo - at, hi - at) for (lo, hi), at in zip(shared, mine.offset, strict=True)))
    there = slices(tuple((lo - at, hi - at) for (lo, hi), (at, _) in zip(shared, box, strict=True)))
    return here, there


def slices(box: Box) -> Slices:
    """Turn a box into the index that selects it in a tensor."""
    return tuple(slice(lo, hi) for lo, hi in box)


def fill(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter, sharded or not, from the whole value, which every process of its mesh has."""
    if not is_cut(parameter):
        parameter.copy_(value)
        return
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * parameter.device_mesh.ndim
    replicated = DTensor.from_local(value, parameter.device_mesh, everywhere, run_check=False)
    parameter.to_local().copy_(replicated.redistribute(placements=parameter.placements).to_local())
