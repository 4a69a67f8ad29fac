"""Where this process sits in its island: rank, device and the mesh (fsdp x tp) it is part of."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diloco.checkpoint.save.saver import PATIENCE
from diloco.config.schema import IslandConfig
from diloco.errors import DeviceError, DilocoError, LeaderFailed
from diloco.island.activity import Activity
from diloco.island.signs import giving_signs


@dataclass(frozen=True)
class ProcessMesh:
    """Describe where a process sits in its island, and let the island's processes agree on values."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None  # fsdp x tp, of the built-in model; None: nothing is cut, or the user has cut it
    group: dist.ProcessGroup | None = None  # by which the processes agree; None: the default one
    activity: Activity = field(default_factory=Activity, compare=False)

    @property
    def alone(self) -> bool:
        """Tell whether this process is the whole island."""
        return self.world == 1

    @property
    def leader(self) -> bool:
        """Tell whether this is the process of rank 0, the only one that has vectors of the outer state."""
        return self.rank == 0

    def outer_device(self, config: IslandConfig) -> torch.device:
        """Return the device on which the leader keeps the outer state."""
        return self.device if config.outer == "device" else torch.device("cpu")

    @property
    def data_rank(self) -> int:
        """Return which slice of the batch is this process'; tensor-parallel neighbours share one."""
        return 0 if self.mesh is None else self.mesh["fsdp"].get_local_rank()

    @property
    def data_ranks(self) -> int:
        """Return the number of slices that a batch is divided into: the mesh's size along fsdp."""
        return 1 if self.mesh is None else self.mesh["fsdp"].size()

    def any(self, flag: bool) -> bool:
        """Return True on every process if the flag is true on at least one."""
        if self.alone:
            return flag
        self.activity.count()
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        return bool(votes.item())

    def mean(self, value: torch.Tensor | None) -> float:
        """Return the mean over the processes that have a value, for which the caller waits; NaN if none has."""
        if self.alone:
            return float("nan") if value is None else value.item()
        self.activity.count()
        total = torch.tensor([0.0, 0.0] if value is None else [value.item(), 1.0], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return (total[0] / total[1]).item()

    def share(self, value: Any) -> Any:
        """Return the leader's value on every process; what the others pass is ignored.

        Torch pickles it on the way. That stays inside one island: its processes are one program of one owner, started
        together, and neither files nor other islands get here.
        """
        if self.alone:
            return value
        self.activity.count()
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank, on every process."""
        if self.alone:
            return [value]
        self.activity.count()
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def leader_first(self, work: Callable[[], None]) -> None:
        """Let the leader do something for all; if it fails, every process stops, and only the leader says why."""
        error: DilocoError | None = None
        if self.leader:
            try:
                work()
            except DilocoError as failed:
                error = failed
        if self.any(error is not None):
            raise error or LeaderFailed("the leader process stopped; its message says why")


@contextmanager
def joined_processes(device: torch.device) -> Iterator[ProcessMesh]:
    """Describe this process among those of a user's own program, which has started torch.distributed by itself.

    They agree by a group of their own: the user's may serve GPUs only, and its timeout is one of training, while the
    leader may wait for other islands for hours.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
            raise DeviceError(
                "several processes were started and torch.distributed was not: call init_device_mesh (or "
                "init_process_group) and shard the model before diloco.connect"
            )
        yield ProcessMesh(0, 1, device, None)
        return
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield ProcessMesh(dist.get_rank(), dist.get_world_size(), device, None, group)
    finally:
        if dist.is_initialized():  # a program that fails may have ended it before
            dist.destroy_process_group(group)


@contextmanager
def open_mesh(config: IslandConfig) -> Iterator[ProcessMesh]:
    """Join the island's other processes (as torchrun or processes.py describe them), and leave them at the end."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    _check_processes(config, world)
    device = pick_device(config.device)
    if world == 1:
        yield ProcessMesh(0, 1, device, None)
        return
    meeting, activity = os.environ.get("DILOCO_MEETING"), Activity()  # no meeting: torchrun says where
    with giving_signs(activity, rank, world, config.hang_s):
        # the leader may wait for other islands for hours: by its signs, not by a timeout, one is known that hangs
        dist.init_process_group(
            _backend(device), meeting, PATIENCE, rank=rank, world_size=world, store=_store_of_this_life()
        )
        try:
            mesh = init_device_mesh(device.type, (config.fsdp, config.tp), mesh_dim_names=("fsdp", "tp"))
            yield ProcessMesh(rank, world, device, mesh, activity=activity)
            dist.barrier()  # nobody hangs up while another one still talks: gloo may abort then
        finally:
            dist.destroy_process_group()


def _store_of_this_life() -> Any:
    """Return torchrun's store under a name of this life; None where torch finds one by itself.

    torchrun keeps one store for all restarts (torch 2.13 at least): a process would find where one of the last life
    listened, and wait for it for ever.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "DILOCO_MEETING" in os.environ:
        return None
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, timeout=PATIENCE, wait_for_workers=False)
    return PrefixStore(f"diloco/life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _check_processes(config: IslandConfig, world: int) -> None:
    needed = config.fsdp * config.tp
    if needed == world:
        return
    mesh = f"island.fsdp={config.fsdp} x island.tp={config.tp}"
    if needed > world:
        raise DeviceError(
            f"{mesh} needs {needed} processes and there {'is' if world == 1 else 'are'} {world}: "
            f"start with `torchrun --nproc-per-node {needed} -m diloco run …` or make the mesh smaller"
        )
    raise DeviceError(
        f"{mesh} uses {needed} of the {world} processes that were started: "
        f"set island.fsdp and island.tp so that their product is {world}"
    )


def pick_device(asked: str) -> torch.device:
    """Choose this process' device and make it the current one: on CUDA, the GPU of its LOCAL_RANK."""
    if asked not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"there is no device {asked!r}: use auto, cpu or cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "device cuda, but torch sees no CUDA device here: use cpu (island.device=cpu), or see `diloco doctor`"
        )
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device) -> str:
    """Choose how tensors travel: a CPU's always by gloo, CUDA's by NCCL, which wants a GPU for each process."""
    if device.type == "cpu":
        return "gloo"
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if here > gpus:
        raise DeviceError(
            f"{here} processes were started on a machine with {gpus} GPU{'s' if gpus > 1 else ''}: each needs its own, "
            f"so start at most {gpus} here, or set island.device=cpu"
        )
    return "cpu:gloo,cuda:nccl"


def describe_device(device: torch.device) -> str:
    """Name the device for people: a GPU's model, or a CPU with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' * (threads > 1)})"


def accelerator_peak(device: torch.device) -> int | None:
    """Return the most bytes of a GPU that this process' tensors took at once so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
