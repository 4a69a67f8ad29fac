"""A run that stays open between the calls of a framework: `diloco.connect` as a pair of calls instead of a block."""

import atexit
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.api import connect
from diloco.config.schema import Config
from diloco.errors import LoopError
from diloco.train.user_loop import Run


class OpenRun:
    """Hold a run from a framework's first call to its last. `where` and `options` are those of `diloco.connect`."""

    def __init__(self, where: str | Path | Mapping[str, Any] | Config, options: Mapping[str, Any]) -> None:
        self._where, self._options = where, options
        self._stack = ExitStack()
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """Return the run. Raise LoopError before training has begun."""
        if self._run is None:
            raise LoopError("the run is open while the framework trains: look at it after training has begun")
        return self._run

    def open(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Run:
        """Found, join or resume. A program that ends without closing it leaves at once, and saves nothing."""
        if self._run is not None and not self._run.finished:
            self.abandon(LoopError("training begins anew"))
        self._run = self._stack.enter_context(connect(self._where, model, optimizer, **self._options))
        atexit.register(self.abandon, LoopError("the program ended while it trained"))
        return self._run

    def close(self) -> None:
        """Contribute what is left, leave the run and save."""
        atexit.unregister(self.abandon)
        self._stack.close()

    def abandon(self, error: BaseException) -> None:
        """Leave at once, as an exception inside the block of `diloco.connect` does."""
        atexit.unregister(self.abandon)
        with suppress(type(error)):  # it comes back out of the block that it is thrown into
            self._stack.__exit__(type(error), error, None)


def skip_step(model: nn.Module) -> None:
    """Let an optimizer step change nothing: the run has ended, and its result is what the model holds."""
    for parameter in model.parameters():
        parameter.grad = None


def follow_clock(scheduler: Any, step: int) -> None:
    """Set a schedule of the learning rate to the run's clock, for an island that resumes, joins late or catches up.

    Schedules that are a function of the step (LambdaLR) can be set; others go on counting their own calls.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    if isinstance(scheduler, LambdaLR) and scheduler.last_epoch != step:
        scheduler.last_epoch = step
        for group, base, rule in zip(
            scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * rule(step)
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
