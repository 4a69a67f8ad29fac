"""Which GPUs of this machine belong to which island: each island's processes see their own only.

`CUDA_VISIBLE_DEVICES` says which there are, where it is set; it is also how an island is told its share.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.config.schema import IslandConfig
from diloco.errors import DeviceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVERS = "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"  # of NVIDIA, AMD, and of both on Windows' Linux


def has_driver() -> bool:
    """Return whether this machine has a driver of GPUs; found out without torch, which takes seconds to import."""
    return any(Path(driver).exists() for driver in DRIVERS)


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of this machine's GPUs that may be used, as `CUDA_VISIBLE_DEVICES` writes them."""
    if VISIBLE not in environment:
        if not has_driver():
            return []
        import torch

        return [str(number) for number in range(torch.cuda.device_count())]
    named = [name.strip() for name in environment[VISIBLE].split(",")]
    ends = [place for place, name in enumerate(named) if name in ("", "-1")]  # CUDA sees none from there on
    return named[: min(ends, default=len(named))]


def share_devices(devices: Sequence[str], islands: int, each: int) -> list[list[str]]:
    """Divide GPUs among islands of so many processes, a GPU for each process; neighbours stay together.

    Islands of one process share GPUs, in turn, where there are fewer than islands. Those of several cannot, because
    NCCL wants a GPU for each process.
    """
    if islands * each <= len(devices):
        return [list(devices[each * number : each * (number + 1)]) for number in range(islands)]
    if each == 1:
        return [[devices[number % len(devices)]] if devices else [] for number in range(islands)]
    raise DeviceError(
        f"{islands} islands of {each} processes need {islands * each} GPUs and this machine has {len(devices)}: "
        f"start at most {len(devices) // each} here (--islands), make the mesh smaller, or set island.device=cpu"
    )


def own_devices(number: int, sizes: Sequence[int], config: IslandConfig) -> dict[str, str]:
    """Return the variable that gives the island of this number its GPUs, where islands have so many processes each.

    Whoever is added later gets GPUs after those of the earlier ones, which keep theirs.
    """
    devices = [] if config.device == "cpu" else visible_devices()
    if not devices or len(set(sizes)) == 1:
        return _variable(share_devices(devices, len(sizes), sizes[0])[number] if devices else [])
    first, each = sum(sizes[:number]), sizes[number]
    if each > 1 and first + each > len(devices):
        raise DeviceError(
            f"island {number} of {each} processes needs GPUs {first} to {first + each - 1}, after those of the islands "
            f"before it, and this machine has {len(devices)}: make its mesh smaller, or launch it elsewhere"
        )
    return _variable([devices[(first + place) % len(devices)] for place in range(each)])


def _variable(devices: Sequence[str]) -> dict[str, str]:
    return {VISIBLE: ",".join(devices)} if devices else {}


def devices_of(number: int, islands: int, config: IslandConfig) -> dict[str, str]:
    """Return the variable that gives the island of this number, counted from 0, its GPUs; none where it uses none."""
    return own_devices(number, [config.fsdp * config.tp] * islands, config)


def usable_cores() -> int:
    """Return how many cores this process may use; where the system cannot tell, all of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
