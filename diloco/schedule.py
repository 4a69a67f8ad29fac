"""When things happen, as pure functions of the step: inner learning rates, and which round is launched or applied."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from diloco.config import InnerConfig


@dataclass(frozen=True)
class Launch:
    """Contribute this fragment's pseudo-gradient to a round."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """Take the result of this fragment's round into the island."""

    fragment: int


Work = Launch | Apply


@dataclass(frozen=True)
class Classic:
    """DiLoCo: everything at once, every H steps, and at the end of the run."""

    every: int
    steps: int

    def after(self, step: int) -> list[Work]:
        due = step % self.every == 0 or step >= self.steps
        return [Launch(0), Apply(0)] if due else []


def fair_share(every: int, step_ms: int, others_ms: Iterable[int]) -> int:
    """Inner steps until the fastest island has done `every`; at least one."""
    known = [ms for ms in others_ms if ms > 0]
    if not step_ms or not known:
        return every
    return max(1, min(every, every * min(known) // step_ms))


def learning_rate(config: InnerConfig, step: int) -> float:
    """For inner step 1, 2, …: linear warm-up, then the schedule's shape, down to `final_lr` of the peak at the end."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    final = config.lr * config.final_lr
    match config.schedule:
        case "constant":
            return config.lr
        case "cosine":
            progress = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
            return final + (config.lr - final) * 0.5 * (1 + math.cos(math.pi * progress))
        case "wsd":
            decay_steps = max(1, round(config.decay * config.steps))
            left = max(0, config.steps - step)
            return final + (config.lr - final) * min(1.0, left / decay_steps)
