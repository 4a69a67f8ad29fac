"""Inner optimizers."""

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.config import InnerConfig


def build_optimizer(module: nn.Module, config: InnerConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices decay, norms and biases do not. Fused kernels refuse to mix meshes: each has its groups."""
    groups: dict[tuple[bool, object], list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim >= 2, parameter.device_mesh if isinstance(parameter, DTensor) else None].append(
                parameter
            )
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=device.type in ("cuda", "cpu"),
    )
    make_state(optimizer)
    return optimizer


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer its (zero) state now, so that saving before the first step saves what is there."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    optimizer.zero_grad()


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor, lr: float) -> Tensor:
    """Step unless the gradient norm is infinite or NaN. Returns 1 if it was skipped, unread where possible."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    bad = (~torch.isfinite(norm)).float()
    if _skips_on_device(optimizer):
        optimizer.found_inf = bad  # type: ignore[attr-defined]  # the fused kernel then leaves everything as it was
        optimizer.step()
    elif not bad.item():
        optimizer.step()
    return bad


def _skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    first = optimizer.param_groups[0]
    return bool(first.get("fused")) and not isinstance(first["params"][0], DTensor)
