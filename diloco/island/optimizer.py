"""Inner optimizers."""

import difflib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.config.schema import InnerConfig
from diloco.errors import ConfigError
from diloco.island.muon import Muon, hidden_matrices


def build_optimizer(module: nn.Module, config: InnerConfig, device: torch.device) -> torch.optim.Optimizer:
    """Matrices decay, norms and biases do not."""
    return _muon(module, config) if config.optimizer == "muon" else _adamw(module, config, device)


def _adamw(module: nn.Module, config: InnerConfig, device: torch.device) -> torch.optim.AdamW:
    """Fused kernels refuse to mix meshes: each has its groups."""
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


def _muon(module: nn.Module, config: InnerConfig) -> Muon:
    hidden = {id(matrix) for matrix in hidden_matrices(module)}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups["muon" if id(parameter) in hidden else "adamw", parameter.ndim >= 2].append(parameter)
    return Muon(
        [
            {"params": parameters, "rule": rule, "weight_decay": config.weight_decay if decays else 0.0}
            for (rule, decays), parameters in groups.items()
        ],
        lr=config.lr,
        momentum=config.momentum,
        betas=config.betas,
        eps=config.eps,
    )


def named_optimizer(name: str, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """Any class of torch.optim, as `Adagrad` or `torch.optim.Adagrad`; nothing else is looked up or imported."""
    kinds = {kind.__name__: kind for kind in vars(torch.optim).values() if _is_optimizer(kind)}
    short = name.removeprefix("torch.optim.")
    if short not in kinds:
        cases = {kind.lower(): kind for kind in kinds}
        close = difflib.get_close_matches(short.lower(), cases, n=1)
        hint = f"did you mean {cases[close[0]]}?" if close else f"there are {', '.join(sorted(kinds))}"
        raise ConfigError(f"torch.optim has no optimizer {name!r}: {hint}")
    try:
        return kinds[short](parameters, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch.optim.{short} refuses its options: {error}") from None


def _is_optimizer(kind: object) -> bool:
    base = torch.optim.Optimizer
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


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


def set_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Of matrices, as `build_optimizer` has grouped them."""
    for group in optimizer.param_groups:
        group["weight_decay"] = decay if group["params"][0].ndim >= 2 else 0.0


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
    if isinstance(optimizer, Muon):
        return True
    first = optimizer.param_groups[0]
    return bool(first.get("fused")) and not isinstance(first["params"][0], DTensor)
