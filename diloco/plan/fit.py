"""Whether an island fits into its machine's memory: said by `diloco plan`, and in one line before its first step."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.config.schema import Config
from diloco.errors import DilocoError
from diloco.plan.memory import FP32, Memory, memory_of
from diloco.plan.predict import Workload
from diloco.run.machine import TOGETHER, available_memory
from diloco.units import counted, format_size

if TYPE_CHECKING:  # a plan needs no torch
    from diloco.island.mesh import ProcessMesh

RUNTIME = {"cpu": 0.35 * 2**30, "cuda": 3e9}  # of a process: torch, its libraries, and CUDA's part in host memory
LIVES = "TORCHELASTIC_RESTART_COUNT"  # how often the island's processes were restarted


@dataclass(frozen=True)
class Need:
    """Hold the bytes that one island takes of its leader's machine, from its start to its end, saves included."""

    host: float
    accelerator: float | None  # of the leader's, which takes the most; None: it trains on a CPU


def need_of(memory: Memory, trained: int, config: Config, *, on_cpu: bool, processes: int) -> Need:
    """Add up what an island takes, with so many of its processes on this machine."""
    if on_cpu:
        return Need(memory.host + processes * (memory.accelerator + RUNTIME["cpu"]), None)
    runtime = processes * RUNTIME["cuda"]
    if config.island.outer == "device":
        return Need(memory.payloads + runtime, memory.accelerator + memory.vectors)
    staged = FP32 * trained if config.sync.trains_on else 0.0  # what the island holds, copied while it trains on
    return Need(memory.payloads + memory.vectors + staged + runtime, memory.accelerator)


def least_need(work: Workload, config: Config, dtype: str, *, on_cpu: bool, processes: int) -> Need:
    """Return what an island takes at least: with island.accumulate=auto, on an accelerator, one sample at a time."""
    island = config.island
    if island.accumulate == "auto":
        least = 1 if on_cpu else island.batch // island.fsdp
        config = config.model_copy(update={"island": island.model_copy(update={"accumulate": least})})
    memory = memory_of(work, config, dtype, islands=2, step_s=1.0)
    return need_of(memory, work.trained, config, on_cpu=on_cpu, processes=processes)


def shortage(
    need: Need, config: Config, *, host: float | None, accelerator: float | None, islands: tuple[int, int]
) -> str:
    """Say what is missing where so many islands, some of them on one GPU, find this much free; empty if nothing is."""
    island, (here, on_gpu) = config.island, islands
    fewer = ["start fewer islands here"] if here > 1 else []
    if need.accelerator is not None and accelerator is not None and on_gpu * need.accelerator > accelerator:
        ways = [] if island.accumulate == "auto" else ["set island.accumulate=auto"]
        ways += [] if island.activation_checkpointing else ["set island.activation_checkpointing=true"]
        ways += ["set island.outer=host"] if island.outer == "device" else ["raise island.fsdp"]
        fewer = fewer if on_gpu > 1 else []
        return _short("GPU", on_gpu, need.accelerator, accelerator, fewer or ways)
    if host is not None and here * need.host > host:
        if need.accelerator is None:
            most = island.batch // island.fsdp
            ways = [f"raise island.accumulate, up to {most}"] if most > island.least_accumulate else []
        else:
            ways = ["set island.outer=device"] if island.outer == "host" else []
        return _short("machine", here, need.host, host, fewer or ways)
    return ""


def _short(what: str, islands: int, each: float, free: float, ways: list[str]) -> str:
    take = "an island takes" if islands == 1 else f"{counted(islands, 'island')} take"
    need, there = format_size(islands * each), format_size(free)
    remedy = " or ".join([*ways, "take a smaller model"])
    return f"memory: {take} about {need} of this {what}'s memory, and {there} are free: {remedy}"


def shortage_here(config: Config, place: "ProcessMesh") -> str:
    """Say in one line what to change if this island, and those that are started with it, will not fit in here.

    Empty where they will, where another island looks for all, and where it cannot be known.
    """
    import torch

    from diloco.data.batches import open_samples
    from diloco.island.island import compute_dtype
    from diloco.plan.workload import workload_of

    here, on_gpu = map(int, os.environ.get(TOGETHER, "1 1").split())
    if not here or os.environ.get(LIVES, "0") != "0":  # the others have their memory already
        return ""
    on_cpu = place.device.type == "cpu"
    dtype = "bf16" if compute_dtype(config.island.dtype, place.device) == torch.bfloat16 else "fp32"
    with suppress(DilocoError):  # whoever opens the model and the data says it better
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", place.world))
        need = least_need(workload_of(config), config, dtype, on_cpu=on_cpu, processes=processes)
        free = None if on_cpu else float(torch.cuda.mem_get_info(place.device)[0])
        found = shortage(need, config, host=available_memory(), accelerator=free, islands=(here, on_gpu))
        if found:
            open_samples(config)  # a sequence or a batch that the data has not is what is wrong then
        return found
    return ""
