"""Lightning in a run: `Trainer(..., callbacks=[DilocoCallback("run.yaml")])`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diloco.config.schema import Config
from diloco.errors import ConfigError, MissingExtra
from diloco.integrations.open_run import OpenRun, follow_clock, skip_step
from diloco.train.user_loop import Run

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError:
    raise MissingExtra("lightning", "lightning", "diloco.integrations.lightning") from None


class DilocoCallback(Callback):  # type: ignore[misc]  # lightning is not typed for us
    """Take part in a run while a Lightning `Trainer` fits. Arguments are those of `diloco.connect`.

    The run's clock counts: fitting ends when the run does, and a learning rate that is a function of the step follows
    it. `max_steps` is to be the run's `inner.steps`, or -1. Lightning's own checkpoints are not needed to resume.
    """

    def __init__(self, where: str | Path | Mapping[str, Any] | Config, **options: Any) -> None:
        self._open = OpenRun(where, options)
        self._steps = self._samples = 0

    @property
    def run(self) -> Run:
        """Return the run, as `diloco.connect` would yield it."""
        return self._open.run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Found, join or resume the run with the module and its optimizer."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers and a run takes one: return one "
                "from configure_optimizers, with a group of parameters for each"
            )
        run = self._open.open(pl_module, trainer.optimizers[0])
        self._steps, self._samples = trainer.global_step, 0
        self._follow(trainer)
        trainer.should_stop |= run.finished

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Change nothing more when the run has ended."""
        if self.run.finished:
            skip_step(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Contribute and apply what is due after an optimizer step, and end with the run."""
        self._samples += extract_batch_size(batch) * trainer.world_size
        if trainer.global_step == self._steps:  # gradients are still accumulated
            return
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        trainer.should_stop |= not self.run.step(tokens=self._samples, loss=loss)
        self._steps, self._samples = trainer.global_step, 0
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                follow_clock(config.scheduler, self.run.step_count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Contribute what is left, leave the run and save."""
        self._open.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave at once: nothing is contributed, and no save is made."""
        self._open.abandon(exception)
