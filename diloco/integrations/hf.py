"""Hugging Face `Trainer` in a run: `Trainer(..., callbacks=[DilocoCallback("run.yaml")])`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from diloco.config.schema import Config
from diloco.errors import MissingExtra
from diloco.integrations.open_run import OpenRun, follow_clock, skip_step
from diloco.train.user_loop import Run

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError:
    raise MissingExtra("transformers", "hf", "diloco.integrations.hf") from None


class DilocoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Take part in a run while a Hugging Face `Trainer` trains. Arguments are those of `diloco.connect`.

    The run's clock counts: training ends when the run does, and a learning rate that is a function of the step follows
    it. `max_steps` is to be the run's `inner.steps`; the trainer counts the steps of this program only. Its own
    checkpoints are not needed to resume.
    """

    def __init__(self, where: str | Path | Mapping[str, Any] | Config, **options: Any) -> None:
        self._open = OpenRun(where, options)
        self._loss: float | None = None

    @property
    def run(self) -> Run:
        """Return the run, as `diloco.connect` would yield it."""
        return self._open.run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Found, join or resume the run with the trainer's model and optimizer."""
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate wraps it
        run = self._open.open(kwargs["model"], optimizer)
        follow_clock(kwargs["lr_scheduler"], run.step_count)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """Change nothing more when the run has ended: the trainer does a step before it looks."""
        if self.run.finished:
            skip_step(model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Contribute and apply what is due, and end with the run."""
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        control.should_training_stop |= not self.run.step(tokens=samples, loss=self._loss)
        follow_clock(kwargs["lr_scheduler"], self.run.step_count)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, float],
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Remember the loss that the trainer has computed, for the run's own events."""
        self._loss = logs.get("loss", self._loss)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Contribute what is left, leave the run and save."""
        self._open.close()
