"""The training loop. `Trainer.run` is the whole algorithm; everything else in this file serves it."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diloco.batches import Batches, open_samples, validation_batches
from diloco.checkpoint.save import read_facts, read_inner, read_outer, saves, write_save
from diloco.config import Config
from diloco.elastic.rounds import AloneRounds, Update
from diloco.errors import SaveError, TrainingDiverged
from diloco.events import Events
from diloco.island import Island
from diloco.network import build_network
from diloco.outer import OuterState, apply, outer_lr
from diloco.place import Place
from diloco.schedule import Apply, Classic, Launch, learning_rate
from diloco.speed import Meter, flops_per_token, peak_flops


@dataclass(frozen=True)
class Outcome:
    step: int
    round: int
    finished: bool  # False: stopped early, saved, can be resumed
    validation_losses: list[float]  # of this session, first to last
    trained: bool  # False: there was nothing left to do
    leader: bool


class Trainer:
    def __init__(self, config: Config, place: Place, events: Events) -> None:
        self.config, self.place, self.events = config, place, events
        self.samples = open_samples(config)
        torch.manual_seed(config.seed + place.data_rank)  # dropout, where a model has it
        vocab, sequence = self.samples.source.vocab, config.data.sequence
        network = build_network(config.model, data_vocab=vocab, sequence=sequence, seed=config.seed)
        peak = peak_flops(place.device)
        self.meter = Meter(flops_per_token(network, sequence), peak and peak * place.world)
        self.island = Island(network, place, config.island, config.inner)
        self.outer = OuterState.zeros(self.island.layout) if place.leader else None
        self.island.read(self._outer_parameters)
        self.batches = Batches(self.samples, config.island, place)
        self.schedule = Classic(config.sync.every, config.inner.steps)
        self.rounds = self._open_rounds(round=0)
        self.step = self.round = 0
        self.validation_losses: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._skipped_before = 0  # this phase
        self._model_name = network.name
        self._resumed_from: Path | None = None

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train to the end, or until asked to stop; then save."""
        self._first_step = self.step
        with closing(self.batches):
            self._tell_start()
            if self.step == 0 and self.config.evaluate.every:
                self._validate()
            self.meter.reset()
            while self.step < self.config.inner.steps and not self.place.any(should_stop()):
                self.advance()
            self.save()
        self.events.emit("end", step=self.step, finished=self.step >= self.config.inner.steps)
        return self._outcome()

    def advance(self) -> None:
        """One inner step, and whatever the schedule wants after it."""
        self.step += 1
        loss = self.island.step(next(self.batches), learning_rate(self.config.inner, self.step))
        self._observe(loss)
        for work in self.schedule.after(self.step):
            match work:
                case Launch(fragment):
                    self._launch(fragment)
                case Apply(fragment):
                    self._apply(fragment)
                    self._after_round()

    def _launch(self, fragment: int) -> None:
        """Contribute base - local, where base is the outer parameters that this phase started from."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()  # steps still queued belong to training, not to the round
        self._started = time.perf_counter()
        local = torch.empty_like(self.outer.parameters) if self.outer else None
        self.island.read(local)
        if self.outer is not None and local is not None:
            pseudo_gradient = torch.sub(self.outer.parameters, local, out=local)
            tokens = (self.step - self.outer.step) * self._tokens_per_step
            self.rounds.start(fragment, pseudo_gradient, weight=tokens, step=self.step)

    def _apply(self, fragment: int) -> None:
        if self.outer is not None:
            update = self.rounds.finish(fragment)
            apply(self.outer, update)
            self._tell_round(update)
        self.island.write(self._outer_parameters)
        self.round += 1

    def _after_round(self) -> None:
        """What is done now and then between rounds: validate, save, and notice a run that is beyond help."""
        self._refuse_divergence()
        last = self.step == self.config.inner.steps
        if (every := self.config.evaluate.every) and (last or self.round % every == 0):
            self._validate()
        if self.round % self.config.checkpoint.snapshot_every == 0 and not last:
            self.save()
        self.meter.pause(time.perf_counter() - self._started)

    def _validate(self) -> None:
        """Loss of the outer parameters, which the island holds before the first step and right after applying."""
        count = min(self.config.evaluate.samples, self.samples.validation_count)
        loss = self.island.evaluate(validation_batches(self.samples, self.config.island, self.place, count))
        self.validation_losses.append(loss)
        self.events.emit("validation", step=self.step, round=self.round, validation_loss=loss)

    def _observe(self, loss: torch.Tensor) -> None:
        """Collect losses without waiting for the device; read and report them every so often."""
        self._losses.append(loss)
        self.meter.count(self._tokens_per_step)
        if self.step % self.config.log.every and self.step != self.config.inner.steps:
            return
        mean = self.island.mean(torch.stack(self._losses).mean())
        rate = self.meter.tokens_per_s()
        self.events.emit(
            "step", step=self.step, loss=mean, lr=learning_rate(self.config.inner, self.step), tokens_per_s=rate,
            mfu=self.meter.mfu(rate), skipped=int(self.island.skipped.item()),
        )  # fmt: skip
        self._losses.clear()
        self.meter.reset()

    def _refuse_divergence(self) -> None:
        """A whole phase without one finite gradient will not get better by itself."""
        skipped = int(self.island.skipped.item())
        phase = (self.step - 1) % self.config.sync.every + 1
        if skipped - self._skipped_before >= phase:
            again = ", and go on from the last save with --resume" if saves(Path(self.config.dir)) else ""
            raise TrainingDiverged(
                f"all {phase} steps up to step {self.step} had infinite or NaN gradients: lower inner.lr{again}"
            )
        self._skipped_before = skipped

    def save(self) -> Path:
        started = time.perf_counter()
        outer, facts = {}, {}
        if self.outer is not None:
            outer = {"parameters": self.outer.parameters, "momentum": self.outer.momentum}
            facts = {
                "round": self.outer.round, "outer_step": self.outer.step, "position": self.batches.position,
                "skipped": int(self.island.skipped.item()), "skipped_before": self._skipped_before,
                "data": self._data_fingerprint, "config": self.config.model_dump(mode="json"),
            }  # fmt: skip
        path = write_save(Path(self.config.dir), self.step, inner=self.island.state(), outer=outer, facts=facts)
        self.events.emit("save", step=self.step, path=str(path), seconds=time.perf_counter() - started)
        return path

    def resume(self) -> None:
        """Go on from the run folder's last save, exactly where it stopped."""
        found = saves(Path(self.config.dir))
        if not found:
            raise SaveError(f"{self.config.dir} holds no save to resume from: start without --resume")
        facts = read_facts(found[-1])
        self._refuse_other_run(facts, found[-1])
        if self.outer is not None:
            for name, vector in read_outer(found[-1]).items():
                getattr(self.outer, name).copy_(vector)
            self.outer.round, self.outer.step = facts["round"], facts["outer_step"]
        state = self.island.state()
        read_inner(found[-1], into=state)
        self.island.set_state(state)
        self.step, self.round, self._skipped_before = facts["step"], facts["round"], facts["skipped_before"]
        self.island.skipped.fill_(facts["skipped"])
        self.batches.seek(facts["position"])
        self.rounds = self._open_rounds(facts["round"])
        self._resumed_from = found[-1]

    def _refuse_other_run(self, facts: dict[str, Any], save: Path) -> None:
        """A save fits only the model, data and seed it was made with; everything else may change."""
        now, then = self.config.model_dump(mode="json"), facts["config"]
        for name in ("seed", "model", "data"):
            if changed := first_difference(name, then.get(name), now[name]):
                raise SaveError(f"{save} was made with {changed}: undo that or use --fresh")
        if facts["data"] != self._data_fingerprint:
            raise SaveError(f"{save}: {self.samples.source.name} has changed since then: bring it back or use --fresh")
        if facts["step"] > self.config.inner.steps:
            raise SaveError(f"{save} is past inner.steps={self.config.inner.steps}: raise inner.steps to go on")

    @cached_property
    def _data_fingerprint(self) -> str:
        return self.samples.source.fingerprint()

    def _open_rounds(self, round: int) -> AloneRounds:
        outer = self.config.outer
        momentum = outer.momentum if outer.optimizer == "nesterov" else 0.0
        return AloneRounds(self.config.run, lr=outer_lr(outer.lr, islands=1), momentum=momentum, round=round)

    @property
    def _outer_parameters(self) -> torch.Tensor | None:
        return None if self.outer is None else self.outer.parameters

    @property
    def _tokens_per_step(self) -> int:
        return self.config.island.batch * self.config.data.sequence

    def _tell_start(self) -> None:
        config, source = self.config, self.samples.source
        self.events.emit(
            "start",
            run=config.run,
            dir=config.dir,
            model=self._model_name,
            parameters=sum(p.numel() for p in self.island.module.parameters()),
            trained_parameters=self.island.layout.size,
            data=source.name,
            data_tokens=len(source),
            device=describe_device(self.place.device),
            dtype=str(self.island.compute_dtype).removeprefix("torch."),
            mesh=f"fsdp {config.island.fsdp} x tp {config.island.tp}",
            steps=config.inner.steps,
            every=config.sync.every,
            tokens_per_step=self._tokens_per_step,
        )
        if self._model_name.endswith("weights loaded)") and config.data.tokenizer == "bytes" and source.vocab == 256:
            self.events.emit(
                "note", text="the loaded weights are trained on bytes: is data.tokenizer set as they expect?"
            )
        if self._resumed_from is not None:
            self.events.emit("resume", step=self.step, path=str(self._resumed_from))

    def _tell_round(self, update: Update) -> None:
        self.events.emit(
            "round", step=update.step, round=update.round, contributors=update.contributors, tokens=update.tokens,
            outer_lr=update.lr, update_norm=torch.linalg.vector_norm(update.mean).item(),
            round_s=time.perf_counter() - self._started,
        )  # fmt: skip

    def _outcome(self) -> Outcome:
        finished = self.step >= self.config.inner.steps
        trained = self.step > self._first_step
        return Outcome(self.step, self.round, finished, self.validation_losses, trained, self.place.leader)


def first_difference(name: str, then: Any, now: Any) -> str | None:
    if isinstance(then, dict) and isinstance(now, dict):
        differences = (first_difference(f"{name}.{key}", then.get(key), now.get(key)) for key in {**then, **now})
        return next((found for found in differences if found), None)
    return None if then == now else f"{name}={then}, now it is {now}"


def describe_device(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)})"
    )
