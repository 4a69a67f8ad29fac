"""Send events to experiment trackers: TensorBoard and Weights & Biases, each behind its extra.

A new sink is a class in a file of its own, made from the run's configuration, and a line in `SINKS`
(`diloco/config/schema.py`); `log.sinks: [NAME]` opens it.
"""

from pathlib import Path
from typing import Any

from diloco.config.schema import Config
from diloco.errors import ConfigError, MissingExtra
from diloco.report.events import Event

# event kind -> the fields worth a curve
CURVES = {
    "step": ("loss", "lr", "tokens_per_s", "mfu", "skipped"),
    "validation": ("validation_loss",),
    "round": ("round_s", "update_norm"),
}


def curves(event: Event) -> dict[str, float]:
    """Return an event's numbers that are worth a curve, as `kind/field`; values that are None are left out."""
    kind = event["event"]
    return {f"{kind}/{name}": event[name] for name in CURVES.get(kind, ()) if event.get(name) is not None}


class TensorBoard:
    """Write curves into the run's folder for TensorBoard; without that package raise MissingExtra."""

    def __init__(self, config: Config) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "log.tensorboard") from None
        self._writer: Any = SummaryWriter(str(Path(config.dir) / "tensorboard"))

    def emit(self, event: Event) -> None:
        """Add the event's numbers as scalars at its step."""
        for name, value in curves(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Send curves to Weights & Biases, with the run's configuration. The package comes with the extra `wandb`."""

    def __init__(self, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "log.wandb") from None
        try:
            self._run: Any = wandb.init(project="diloco", name=config.run, dir=config.dir, config=config.model_dump())
        except wandb.errors.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"log.wandb=true: {reason}: run `wandb login`, or set WANDB_MODE=offline") from None

    def emit(self, event: Event) -> None:
        """Log the event's numbers at its step; events without any are ignored."""
        if values := curves(event):
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        """Finish the W&B run, so that everything is uploaded."""
        self._run.finish()
