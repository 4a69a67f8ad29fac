"""How fast a run is: tokens a second, and model FLOPs utilisation (MFU) where the device's peak is known."""

import time

import torch

from diloco.model.accelerators import called
from diloco.model.build import Network


def flops_per_token(network: Network, sequence: int) -> float:
    """Forward and backward: 6 for each parameter in a matrix product, 12 x blocks x width x sequence for attention."""
    module = network.module
    matrices = sum(p.numel() for p in module.parameters() if p.ndim >= 2)
    embed = module.get_parameter(f"{network.anatomy.embed}.weight") if network.anatomy.embed else None
    head = module.get_parameter(f"{network.anatomy.head}.weight") if network.anatomy.head else embed
    if embed is not None and embed is not head:
        matrices -= embed.numel()  # untied: the lookup multiplies nothing
    blocks = len(module.get_submodule(network.anatomy.blocks))  # type: ignore[arg-type]
    width = embed.shape[1] if embed is not None else 0
    return 6.0 * matrices + 12.0 * blocks * width * sequence


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    found = called(torch.cuda.get_device_name(device))
    return None if found is None else found.bf16_flops


class Meter:
    """Counts tokens against the time spent training; `pause` takes out what is not (rounds, validation, saves)."""

    def __init__(self, flops_per_token: float, peak_flops: float | None) -> None:
        self.flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.reset()

    def reset(self) -> None:
        self._tokens, self._paused_s = 0, 0.0
        self._since = time.perf_counter()

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def pause(self, seconds: float) -> None:
        self._paused_s += seconds

    def tokens_per_s(self) -> float:
        return self._tokens / max(1e-9, time.perf_counter() - self._since - self._paused_s)

    def mfu(self, tokens_per_s: float) -> float | None:
        return None if self._peak_flops is None else tokens_per_s * self.flops_per_token / self._peak_flops
