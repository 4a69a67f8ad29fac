"""The outer optimizers: how the mean of the islands' pseudo-gradients changes the outer state.

An update uses individually rounded operations only, so that it gives the same bits on every platform: no fused
multiply-add, no `alpha=`, no reductions, divisions of tensors by tensors. A new optimizer is a class in a file of its
own and a line in `OUTER_OPTIMIZERS` (`diloco/config/schema.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pkgutil import resolve_name

import numpy as np
import torch
from torch import Tensor

from diloco.config.schema import OUTER_OPTIMIZERS, OuterConfig
from diloco.elastic.protocol.record import Settings
from diloco.errors import ConfigError

TINY = 2.0**-100  # moments below this become zero: denormals differ between platforms


class OuterOptimizer(ABC):
    """Update the outer state by the mean pseudo-gradient of a round, with the same bits on every platform."""

    vectors: tuple[str, ...] = ("momentum", "parameters")  # what it keeps, each as large as the model
    forgets = False  # whether its momentum, where that is `auto`, is less in short runs

    def settings(self, config: OuterConfig, lr: float, momentum: float, number: int) -> Settings:
        """Compute the scalars of a fragment's update number 1, 2, …, to be stored: libm differs between platforms."""
        return Settings(lr, momentum, "", "", config.optimizer)

    @abstractmethod
    def step(self, vectors: Mapping[str, Tensor], gradient: Tensor, settings: Settings) -> None:
        """Change a stretch of the outer vectors in place, by the mean pseudo-gradient of that stretch."""


def optimizer_named(name: str) -> OuterOptimizer:
    """Create the outer optimizer that `OUTER_OPTIMIZERS` lists under this name. Raise ConfigError if there is none."""
    if name not in OUTER_OPTIMIZERS:
        raise ConfigError(f"there is no outer optimizer {name[:60]!r}: there are {', '.join(OUTER_OPTIMIZERS)}")
    made: OuterOptimizer = resolve_name(OUTER_OPTIMIZERS[name])()
    return made


class Nesterov(OuterOptimizer):
    """Apply Nesterov's momentum to the mean pseudo-gradient D: v <- D + b v ; theta <- theta - lr (D + b v)."""

    forgets = True

    def step(self, vectors: Mapping[str, Tensor], gradient: Tensor, settings: Settings) -> None:
        parameters, velocity = vectors["parameters"], vectors["momentum"]
        lr, momentum = _scalar(settings.lr, gradient), _scalar(settings.momentum, gradient)
        velocity.mul_(momentum).add_(gradient)
        velocity.masked_fill_(velocity.abs() < TINY, 0.0)
        parameters.sub_((velocity * momentum).add_(gradient).mul_(lr))


class Sgd(Nesterov):
    """Subtract the mean pseudo-gradient times lr: Nesterov's update with momentum 0."""

    forgets = False

    def settings(self, config: OuterConfig, lr: float, momentum: float, number: int) -> Settings:
        return super().settings(config, lr, 0.0, number)


class Adam(OuterOptimizer):
    """Apply Adam to the mean pseudo-gradient D, with bias corrections m^ and v^.

    m <- b m + (1-b) D ; v <- c v + (1-c) D^2 ; theta <- theta - lr (m / m^) / (sqrt(v / v^) + eps).
    """

    vectors = ("momentum", "parameters", "variance")

    def settings(self, config: OuterConfig, lr: float, momentum: float, number: int) -> Settings:
        """Compute the bias corrections of update n as well: 1 - b^n and 1 - c^n."""
        corrections = 1 - momentum**number, 1 - config.beta2**number
        return Settings(lr, momentum, "", "", config.optimizer, config.beta2, config.eps, *corrections)

    def step(self, vectors: Mapping[str, Tensor], gradient: Tensor, settings: Settings) -> None:
        first, second = vectors["momentum"], vectors["variance"]
        first.mul_(_scalar(settings.momentum, first)).add_(gradient * _scalar(1 - settings.momentum, first))
        first.masked_fill_(first.abs() < TINY, 0.0)
        square = (gradient * gradient).mul_(_scalar(1 - settings.beta2, second))
        second.mul_(_scalar(settings.beta2, second)).add_(square)
        second.masked_fill_(second < TINY, 0.0)
        mean = first / torch.full_like(first, settings.beta1_correction)
        root = _square_root(second / torch.full_like(second, settings.beta2_correction))
        root.add_(_scalar(settings.eps, root))
        vectors["parameters"].sub_((mean / root).mul_(_scalar(settings.lr, mean)))


def _square_root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots. On a CPU, torch's own are not, where it is built with Intel's library."""
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)  # copied there, it would wait
