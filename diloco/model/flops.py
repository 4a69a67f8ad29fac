"""How fast a run is: tokens a second, and model FLOPs utilisation (MFU) where the device's peak is known."""

import time

import torch

from diloco.model.accelerators import called
from diloco.model.build import Network


def flops_per_token(network: Network, sequence: int) -> float:
    """Return the FLOPs of the forward and backward pass for one token.

    That is 6 for each parameter in a matrix product, and 12 x blocks x width x sequence for attention.
    """
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
    """Return the bf16 peak of a GPU, in FLOPs per second; None where it is unknown, and on a CPU."""
    if device.type != "cuda":
        return None
    found = called(torch.cuda.get_device_name(device))
    return None if found is None else found.bf16_flops


class Meter:
    """Count tokens against the time spent training; `pause` takes out what is not (rounds, validation, saves)."""

    def __init__(self, flops_per_token: float, peak_flops: float | None) -> None:
        self.flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.reset()

    def reset(self) -> None:
        """Start a new measurement from now on."""
        self._tokens, self._paused_s = 0, 0.0
        self._since = time.perf_counter()

    def count(self, tokens: int) -> None:
        """Add the tokens of a step that was trained."""
        self._tokens += tokens

    def pause(self, seconds: float) -> None:
        """Exclude so many seconds from the time spent training."""
        self._paused_s += seconds

    def tokens_per_s(self) -> float:
        """Return the speed since the last reset, without pauses."""
        return self._tokens / max(1e-9, time.perf_counter() - self._since - self._paused_s)

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the share of the device's peak that this speed reaches; None where the peak is unknown."""
        return None if self._peak_flops is None else tokens_per_s * self.flops_per_token / self._peak_flops
