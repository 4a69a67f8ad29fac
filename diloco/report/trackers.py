"""Send events to experiment trackers: TensorBoard and Weights & Biases, each behind its extra.

A new sink is a class in a file of its own, made from the run's configuration, and a line in `SINKS`
(`diloco/config/schema.py`); `log.sinks: [NAME]` opens it.
"""

from pathlib import Path
from typing import Any

from diloco.config.schema import Config
from diloco.errors import ConfigError, MissingExtra
from diloco.report.events import Event, Round, Step, Validation

# the fields of an event that are worth a curve
CURVES: dict[type[Event], tuple[str, ...]] = {
    Step: ("loss", "lr", "gradient_norm", "tokens_per_s", "mfu", "skipped"),
    Validation: ("validation_loss",),
    Round: ("round_s", "tokens", "islands", "pseudo_gradient_norm"),
}


def curves(event: Event) -> tuple[int, dict[str, float]]:
    """Return an event's step, and its numbers that are worth a curve, as `kind/field`; None is left out."""
    if not isinstance(event, Step | Validation | Round):
        return 0, {}
    found = {name: getattr(event, name) for name in CURVES[type(event)]}
    return event.step, {f"{event.kind}/{name}": value for name, value in found.items() if value is not None}


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
        step, found = curves(event)
        for name, value in found.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Send curves to Weights & Biases, with the run's configuration. The package comes with the extra `wandb`.

    The islands of a run are one group there, of the run's name; each is called as its folder.
    """

    def __init__(self, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "log.wandb") from None
        try:
            self._run: Any = wandb.init(
                project="diloco", group=config.run, name=Path(config.dir).name, dir=config.dir,
                config=config.model_dump(),
            )  # fmt: skip
        except wandb.errors.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"log.wandb=true: {reason}: run `wandb login`, or set WANDB_MODE=offline") from None

    def emit(self, event: Event) -> None:
        """Log the event's numbers at its step; events without any are ignored."""
        step, found = curves(event)
        if found:
            self._run.log(found, step=step)

    def close(self) -> None:
        """Finish the W&B run, so that everything is uploaded."""
        self._run.finish()
