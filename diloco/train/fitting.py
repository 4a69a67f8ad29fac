"""`island.accumulate: auto`: how many micro-batches a step is cut into, so that it fits into the accelerator's memory.

Each try is a whole step, optimizer included, of an island that is thrown away. So what trains is the same, to the bit,
as if the number that was found had been written down.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from diloco.config.schema import Config
from diloco.errors import DeviceError
from diloco.island.island import Island
from diloco.island.mesh import ProcessMesh, describe_device
from diloco.units import counted

OUTER = 12  # bytes of a parameter that `island.outer: device` will take from the leader's GPU
SPARE = (
    512 << 20
)  # bytes of a GPU for what else will be there: buckets of parameters, chunks of updates, logits in validation
# in what torch raises besides OutOfMemoryError: where the system refuses memory, and where cuBLAS gets none
REFUSALS = "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"


def with_accumulate(config: Config, place: ProcessMesh, build: Callable[[], Island]) -> tuple[Config, str]:
    """Return the configuration with a number for `auto`, and a line for people about what was found.

    All processes of the island call it at once, and find the same number: the smallest with which a step fits.
    """
    island, device = config.island, place.device
    rows, failed = island.batch // place.data_ranks, list[int]()
    with equal_headroom(place):
        for count in (count for count in range(1, rows + 1) if rows % count == 0):
            if not place.any(not fits(build, config, place, count)):
                found = config.model_copy(update={"island": island.model_copy(update={"accumulate": count})})
                return found, _told(found, place, failed)
            failed.append(count)
    raise DeviceError(
        f"island.accumulate=auto: not even one sample of {config.data.sequence} tokens at a time fits into the memory "
        f"of {describe_device(device)}: set island.activation_checkpointing=true, raise island.fsdp, lower "
        "data.sequence or take a smaller model"
    )


def fits(build: Callable[[], Island], config: Config, place: ProcessMesh, count: int) -> bool:
    """Tell whether a step of so many micro-batches gets the memory that it wants. Nothing of it is left."""
    try:
        _try_step(build, config, place, count)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in REFUSALS):
            raise
        return False
    finally:
        gc.collect()
        if config.island.compile:
            torch.compiler.reset()  # else it would compile for any number of rows, which is slower
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _try_step(build: Callable[[], Island], config: Config, place: ProcessMesh, count: int) -> None:
    island, rows = build(), config.island.batch // place.data_ranks // count
    outer = island.layout.size * OUTER if config.island.outer == "device" and place.leader else 0
    spare = SPARE + outer if place.device.type == "cuda" else 0
    kept = torch.empty(spare, dtype=torch.uint8, device=place.device)
    tokens = torch.zeros(rows, config.data.sequence + 1, dtype=torch.int64, device=place.device)
    # the second one finds the gradients of the first in memory: it takes as much as any later one
    island.step([tokens] * min(count, 2), lr=0.0)
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    del kept


@contextmanager
def equal_headroom(place: ProcessMesh) -> Iterator[None]:
    """Let all processes of a mesh have as much memory left as the one that has the least: so they fail at the same
    operation, and none waits for another that has failed."""
    if place.device.type != "cuda" or place.alone:
        yield
        return
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place.device)
    allowed = torch.cuda.memory_reserved(place.device) + min(place.gather(free))
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), place.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)


def _told(config: Config, place: ProcessMesh, failed: list[int]) -> str:
    island = config.island
    rows = island.batch // place.data_ranks // island.accumulate
    each = " on each process" if place.data_ranks > 1 else ""
    text = f"island.accumulate=auto: {island.accumulate}, for {counted(rows, 'sample')} at a time{each}"
    if failed:
        return f"{text}; with {', '.join(map(str, failed))} a step did not fit into {describe_device(place.device)}"
    if place.device.type == "cpu":
        return f"{text}; more only where the system refuses memory: without a limit, a CPU's cannot be tried"
    return text
