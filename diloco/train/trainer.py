"""The built-in trainer. `Trainer.run` is DiLoCo as the papers have it; everything else in this file serves it.

    inner step      one optimizer step of the island on its own samples
    launch          contribute the pseudo-gradient: the outer parameters that the phase began with, less the local ones
    apply           the outer optimizer's update, made of everybody's mean pseudo-gradient, enters the local parameters

`schedule.py` says after which inner steps a launch or an apply is due, `exchange.py` has the arithmetic of both, and
`outer.py` the outer update.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.save.facts import saves
from diloco.checkpoint.save.saver import read_inner
from diloco.config.schema import Config
from diloco.data.batches import Batches, open_samples, validation_batches
from diloco.data.samples import Samples
from diloco.elastic.protocol.ranges import Ranges, first, size
from diloco.errors import TrainingDiverged
from diloco.island.island import Island
from diloco.island.layout import fragments_of
from diloco.island.mesh import ProcessMesh
from diloco.model.build import Network, build_network
from diloco.model.flops import Meter, flops_per_token, peak_flops
from diloco.model.frozen import FrozenDigests
from diloco.report.events import Note, Validation
from diloco.report.sinks import Events
from diloco.train.fitting import with_accumulate
from diloco.train.participant import Participant
from diloco.train.schedule import learning_rate
from diloco.train.sync import never
from diloco.units import counted


@dataclass(frozen=True)
class Outcome:
    """Describe how a session of training has ended."""

    step: int
    round: int
    finished: bool  # False: stopped early, saved, can be resumed
    validation_losses: list[float]  # of this session, first to last
    trained: bool  # False: there was nothing left to do
    leader: bool
    paused: bool = False  # nobody was told, and it will resume as if nothing had happened


class Trainer(Participant):
    """Train the configured model by DiLoCo: inner steps, with launches and applies in between."""

    samples: Samples

    def __init__(self, config: Config, place: ProcessMesh, events: Events, *, slowness: float = 1.0) -> None:
        """Build the model, its island and its data. In a simulation, inner steps take `slowness` times as long."""
        samples = open_samples(config)
        vocab, sequence = samples.source.vocab, config.data.sequence

        def network_of() -> Network:
            return build_network(config.model, data_vocab=vocab, sequence=sequence, seed=config.seed)

        self._found = ""  # what is to be said of island.accumulate=auto
        if config.island.accumulate == "auto":
            build = partial(Island, place=place, island=config.island, inner=config.inner)
            config, self._found = with_accumulate(config, place, lambda: build(network_of()))
        torch.manual_seed(config.seed + place.data_rank)  # dropout, where a model has it
        network = network_of()
        self.island = Island(network, place, config.island, config.inner)
        blocks = network.anatomy.blocks
        fragments = fragments_of(self.island.layout, config.sync.fragments, config.sync.pattern, blocks)
        super().__init__(config, place, events, self.island.shards, fragments, samples)
        peak = peak_flops(place.device)
        self.meter = Meter(flops_per_token(network, sequence), peak and peak * place.world)
        self.batches = Batches(samples, config.island, place)
        self.validation_losses: list[float] = []
        self._model_name = network.name
        self._slowness = slowness
        self._idle_s = 0.0  # without samples, since the last step
        self._compiles = True  # in the first step, if at all
        self._checked_at = 0, 0  # inner steps done here, and those of them that were skipped, up to the last phase

    def run(self, should_stop: Callable[[], bool] = never, pausing: Callable[[], bool] = never) -> Outcome:
        """Train to the end, or until asked to stop; then contribute what is left (not if that is a pause), and save."""
        with closing(self.batches), closing(self.saver):
            self._begin(should_stop)
            while not self.finished and not self.place.any(should_stop()):
                self.advance(should_stop)
            self.report_wait(self._idle_s)
            self.leave(pause=self.place.any(pausing()))
        step, losses, trained = self.step_count, self.validation_losses, self.step_count > self._first_step
        return Outcome(step, self.sync.view.head.round, self.finished, losses, trained, self.place.leader, self.paused)

    def advance(self, should_stop: Callable[[], bool] = never) -> None:
        """Do one inner step and what the schedule wants after it; without samples, look at what others have done."""
        if batch := self.sync.draw(self.config.island.batch, self._tokens_per_step):
            self.report_wait(self._idle_s)
            self._idle_s = 0.0
            self._inner_step(batch)
            self.after_step(should_stop)  # launch, apply
        else:
            began = time.perf_counter()
            self.sync.without_samples(self.config.island.batch, should_stop)
            self._idle_s += time.perf_counter() - began

    def _inner_step(self, batch: Ranges) -> None:
        began = time.perf_counter()
        self.place.activity.begin(f"inner step {self.sync.policy.steps}", long=self._compiles)
        rate = self._learning_rate
        loss = self.island.step(self.batches.read(batch, first(self.sync.pool, size(batch))), rate)
        island = self.island  # what is on its device is read where it is reported, not in every step
        self.observe(
            self._tokens_per_step, loss, lr=rate, skipped=lambda: int(island.skipped.item()),
            gradient_norm=lambda: island.gradient_norm.item(),
        )  # fmt: skip
        self._compiles = False
        if self._slowness > 1:
            time.sleep((self._slowness - 1) * (time.perf_counter() - began))

    def _begin(self, should_stop: Callable[[], bool]) -> None:
        self._first_step = self.step_count
        self._report_start()
        if self.step_count == 0 and self.config.evaluate.every and self.place.any(self._speaks):
            self._validate()
        self.meter.reset()
        self.sync.finish_step(should_stop)

    @property
    def _learning_rate(self) -> float:
        """Return this step's learning rate. A newcomer's optimizer starts empty: its first steps are smaller."""
        ramp = min(1.0, self.sync.policy.steps / max(1, self.ramp_steps))
        return learning_rate(self.sync.config.inner, self.step_count) * ramp

    @property
    def _tokens_per_step(self) -> int:
        return self.config.island.batch * self.config.data.sequence

    def after_amendments(self) -> None:
        """Set gradient clipping and weight decay anew; learning rate and schedule follow by themselves."""
        self.island.tune(self.sync.config.inner)

    def after_pass(self, *, validate: bool) -> None:
        """Validate if that is due, and stop a run whose gradients are no longer finite."""
        self._refuse_divergence()
        if validate:
            self._validate()

    @property
    def validates(self) -> bool:
        """Tell whether this island validates now: every `evaluate.every` passes and at the end. Asks all processes."""
        every = self.config.evaluate.every
        return bool(every) and (self.finished or self.sync.passes % every == 0) and self.place.any(self._speaks)

    @property
    def _speaks(self) -> bool:
        """Tell whether this island validates for all: they hold the same outer parameters, so one is enough."""
        return self.rounds is not None and self.rounds.first

    def _validate(self) -> None:
        """Compute the loss of the outer parameters, which the island holds for as long as that takes."""
        count = min(self.config.evaluate.samples, self.samples.validation_count)
        with self.sync.exchange.outer_parameters():
            loss = self.island.evaluate(validation_batches(self.samples, self.config.island, self.place, count))
        self.validation_losses.append(loss)
        view = self.sync.view
        contributed, islands = ((), 1) if self.rounds is None else (self.rounds.contributors, self.rounds.islands)
        self.events.emit(
            Validation(
                step=view.step, round=view.head.round, validation_loss=loss, contributed=contributed, islands=islands
            )
        )  # fmt: skip

    def _refuse_divergence(self) -> None:
        """Raise TrainingDiverged after a whole phase without one finite gradient: it will not get better by itself."""
        skipped = int(self.island.skipped.item())
        steps, (steps_before, skipped_before) = self.sync.policy.steps, self._checked_at
        phase = steps - steps_before
        if 0 < phase <= skipped - skipped_before:
            again = ", and resume from the last save with --resume" if saves(Path(self.config.dir)) else ""
            raise TrainingDiverged(
                f"all {counted(phase, 'step')} up to step {self.step_count} had infinite or NaN gradients: "
                f"lower inner.lr{again} (with other islands: diloco rewind RUN ROUND --set inner.lr=…)"
            )
        self._checked_at = steps, skipped

    @property
    def frozen(self) -> FrozenDigests:
        return self.island.frozen

    def inner_state(self) -> dict[str, Any]:
        return self.island.state()

    def load_inner(self, save: Path, facts: dict[str, Any]) -> None:
        state = self.island.state()
        read_inner(save, into=state)
        self.island.set_state(state)
        self._checked_at = tuple(facts["checked_at"])
        self.island.skipped.fill_(facts["skipped"])

    def own_facts(self) -> dict[str, Any]:
        return {"skipped": int(self.island.skipped.item()), "checked_at": self._checked_at}

    def _report_start(self) -> None:
        config, source = self.config, self.samples.source
        self.report_start(
            self.island.module, model=self._model_name, data=source.name, data_tokens=len(source),
            dtype=str(self.island.compute_dtype).removeprefix("torch."),
            mesh=config.island.mesh, tokens_per_step=self._tokens_per_step, accumulate=config.island.accumulate,
        )  # fmt: skip
        if self._found:
            self.events.emit(Note(text=self._found))
        if self._model_name.endswith("weights loaded)") and config.data.tokenizer == "bytes" and source.vocab == 256:
            text = "the loaded weights are trained on bytes: is data.tokenizer set as they expect?"
            self.events.emit(Note(text=text))
