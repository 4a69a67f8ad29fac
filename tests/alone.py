"""An island alone, as `diloco run` has it: a run of one in its folder."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from diloco.bench.team import Heard
from diloco.config.schema import Config
from diloco.island.mesh import ProcessMesh
from diloco.report.events import Step, of_kind
from diloco.report.sinks import Events
from diloco.run.folder import release
from diloco.run.start import RunEntry
from diloco.train.trainer import Outcome, Trainer

SILENCE_S = 0.5  # nobody else is there
HERE = ProcessMesh(rank=0, world=1, device=torch.device("cpu"), mesh=None)


@dataclass(frozen=True)
class Life:
    trainer: Trainer
    heard: Heard
    outcome: Outcome

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in of_kind(self.heard.events, Step)]

    @property
    def outer(self) -> dict[str, torch.Tensor]:
        return self.trainer.rounds.outer()

    def events(self, kind: str) -> list[dict]:
        return [event.plain() for event in self.heard.events if event.kind == kind]


def train(
    config: Config,
    *,
    place: ProcessMesh = HERE,
    until: int | None = None,
    resume: bool = False,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> Life:
    """Train to the end, or until a step, where it is paused."""
    # one that resumes leads once it has heard nobody for so long
    config = config.model_copy(update={"elastic": config.elastic.model_copy(update={"silence_s": SILENCE_S})})
    heard = Heard()
    with ExitStack() as stack:
        events = Events([heard])
        stack.callback(release, Path(config.dir))

        def build(config: Config) -> Trainer:
            trainer = Trainer(config, place, events)
            prepare(trainer)
            return trainer

        entrance = RunEntry(place, events, stack, None, build, view=False)
        trainer = entrance.resume(config) if resume else entrance.found(config, fresh=False)

        def stop() -> bool:
            return until is not None and trainer.step_count >= until

        return Life(trainer, heard, trainer.run(stop, stop))
