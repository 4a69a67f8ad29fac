"""The training loop. `Trainer.run` is the whole algorithm; everything else in this file serves it."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diloco.alone import Alone
from diloco.batches import Batches, open_samples, validation_batches
from diloco.checkpoint.save import read_facts, read_inner, read_outer, saves, write_save
from diloco.config import Config
from diloco.elastic.ranges import Ranges, first, minus, normal, size
from diloco.errors import SaveError, TrainingDiverged
from diloco.events import Events
from diloco.island import Island
from diloco.network import build_network
from diloco.outer import OuterState, outer_lr
from diloco.place import Place
from diloco.schedule import Apply, Classic, Launch, Work, fair_share, learning_rate
from diloco.speed import Meter, flops_per_token, peak_flops
from diloco.together import Together

LOOK_S = 0.1  # how often an island without samples looks again


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
        self.batches = Batches(self.samples, config.island, place)
        self.schedule = Classic(config.sync.every, config.inner.steps)
        self.outside: Alone | Together | None = self._alone()  # the leader's
        self.local_steps = 0  # since the base, of progress that the outer state does not contain
        self.finished = False
        self._tokens = 0  # since the last cut
        self._used: Ranges = ()
        self._pool: Ranges = ()  # samples to train on
        self._phase_steps = self._step_ms = self._steps_here = self._ramp_steps = 0
        self._phase_began = time.perf_counter()
        self._look()
        self.validation_losses: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._skipped_before = 0  # this phase
        self._started = time.perf_counter()
        self._model_name = network.name
        self._resumed_from: Path | None = None

    def join(self, outside: Together | None) -> None:
        """Take part in a run with others, from where they are. Only the leader has a connection."""
        self.outside = outside
        self.island.write(self._base)
        if self.place.share(outside is not None and outside.step > 0):
            self._ramp_steps = min(self.config.inner.warmup, self.config.sync.every)
        self._look()

    @property
    def step(self) -> int:
        """The run's clock: the outer state's, and what was trained since."""
        return self._outer_step + self.local_steps

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train to the end, or until asked to stop; then contribute what is left, and save."""
        self._first_step = self.step
        with closing(self.batches):
            self._tell_start()
            if self.step == 0 and self.config.evaluate.every:
                self._validate()
            self.meter.reset()
            while not self.finished and not self.place.any(should_stop()):
                self.advance(should_stop)
            self._leave()
            self.save()
        self.events.emit("end", step=self.step, finished=self.finished)
        return self._outcome()

    def advance(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """One inner step, and whatever the schedule wants after it; or a look at what others have done."""
        if not self._train_step():
            self._without_samples(should_stop)
        else:
            for work in self._due():
                match work:
                    case Launch(fragment):
                        self._launch(fragment)
                    case Apply(fragment):
                        self._finish(fragment, should_stop)
        if self.place.any(self.outside is not None and self.outside.poll()):
            self._rebase(at_cut=False)

    def _due(self) -> list[Work]:
        """What the schedule wants; an island that is slower than others may be at its share already."""
        early = self.config.elastic.adaptive and self._phase_steps >= self._share
        return [Launch(0), Apply(0)] if early else self.schedule.after(self.step)

    def _train_step(self) -> bool:
        batch = first(self._pool, self.config.island.batch)
        if size(batch) < self.config.island.batch:
            return False
        self._pool = minus(self._pool, batch)
        self.local_steps += 1
        loss = self.island.step(self.batches.read(batch, first(self._pool, size(batch))), self._learning_rate)
        self._used = normal((*self._used, *batch))
        self._tokens += self._tokens_per_step
        self._phase_steps += 1
        self._steps_here += 1
        self._observe(loss)
        return True

    def _without_samples(self, should_stop: Callable[[], bool]) -> None:
        """Nothing is leased to this island: contribute what it has, or wait until something is."""
        if self._tokens or self.place.any(self.outside is not None and self.outside.owes):
            self._launch(0)
            self._finish(0, should_stop)
        elif isinstance(self.outside, Together):
            self.outside.wait(LOOK_S)

    def _launch(self, fragment: int) -> None:
        """Contribute base - local, where base is the outer parameters that this phase started from."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()  # steps still queued belong to training, not to the round
        self._started = time.perf_counter()
        displacement = self._displacement()
        if self.outside is not None and displacement is not None:
            self._step_ms = round(1000 * (self._started - self._phase_began) / max(1, self._phase_steps))
            self.outside.start(
                fragment, displacement, tokens=self._tokens, samples=self._used, step=self.step, step_ms=self._step_ms
            )
        self._tokens, self._used = 0, ()

    def _finish(self, fragment: int, should_stop: Callable[[], bool]) -> None:
        """Wait until the round is over, with or without this island's part in it."""
        over = self.outside is not None and self.outside.finish(fragment, should_stop)
        if self.place.any(over):
            self._rebase(at_cut=True)
            self._after_round()
            self._phase_steps, self._phase_began = 0, time.perf_counter()

    def _displacement(self) -> torch.Tensor | None:
        """Progress that the outer state does not contain, on the leader. All processes call it."""
        local = torch.empty_like(self.outside.parameters) if self.outside is not None else None
        self.island.read(local)
        return None if self.outside is None or local is None else torch.sub(self.outside.parameters, local, out=local)

    def _rebase(self, *, at_cut: bool) -> None:
        """The outer parameters moved from G to G': the island's become G' + progress that G' does not contain."""
        change, before = None, self.outside.parameters if self.outside is not None else None
        if self.outside is not None:
            change = self.outside.take()
            for round_told in change.told:
                self._tell_round(round_told)
        if self.place.any(change is not None and not (at_cut and change.contained)):
            self._carry_over(before, change.adjust if change is not None else None)
        else:
            self.island.write(self._base)
            self.local_steps = 0
        self._look()

    def _carry_over(self, before: torch.Tensor | None, adjust: torch.Tensor | None) -> None:
        local = torch.empty_like(before) if before is not None else None
        self.island.read(local)
        if self.outside is not None and local is not None and before is not None:
            local.sub_(before).add_(self.outside.parameters)
            if adjust is not None:
                local.sub_(adjust)
        self.island.write(local)

    def _look(self) -> None:
        """What the leader knows, for all processes: the clock, the samples, whether the run is over."""
        seen = None
        if self.outside is not None:
            finished = self.outside.step >= self.config.inner.steps or self.outside.exhausted()
            paces = self.outside.paces() if self.config.elastic.adaptive else []
            share = fair_share(self.config.sync.every, self._step_ms, paces)
            seen = self.outside.step, self.outside.round, self.outside.available(self._used), finished, share
        self._outer_step, self.round, self._pool, self.finished, self._share = self.place.share(seen)

    def _leave(self) -> None:
        """Contribute what is trained so far, if a round comes in time; then say goodbye."""
        if not self.place.any(isinstance(self.outside, Together)):
            return
        owes = self.place.any(self.outside is not None and self.outside.owes)
        if (self._tokens or owes) and not self.finished:
            deadline = time.monotonic() + self.config.elastic.grace_s
            self._launch(0)
            self._finish(0, lambda: time.monotonic() > deadline)
        if self.outside is not None:
            self.outside.leave()

    def _after_round(self) -> None:
        """What is done now and then between rounds: validate, save, and notice a run that is beyond help."""
        self._refuse_divergence()
        if self._is_validated() and self.place.any(self._speaks):
            self._validate()
        if self.round % self.config.checkpoint.snapshot_every == 0 and not self.finished:
            self.save()
        self.meter.pause(time.perf_counter() - self._started)

    def _is_validated(self) -> bool:
        every = self.config.evaluate.every
        return self.local_steps == 0 and every > 0 and (self.finished or self.round % every == 0)

    @property
    def _speaks(self) -> bool:
        """All islands hold the same outer parameters: one of them validates."""
        return isinstance(self.outside, Alone) or (isinstance(self.outside, Together) and self.outside.first)

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
            "step", step=self.step, loss=mean, lr=self._learning_rate, tokens_per_s=rate,
            mfu=self.meter.mfu(rate), skipped=int(self.island.skipped.item()),
        )  # fmt: skip
        self._losses.clear()
        self.meter.reset()

    def _refuse_divergence(self) -> None:
        """A whole phase without one finite gradient will not get better by itself."""
        skipped = int(self.island.skipped.item())
        phase = (self.step - 1) % self.config.sync.every + 1
        if skipped and skipped - self._skipped_before >= phase:
            again = ", and go on from the last save with --resume" if saves(Path(self.config.dir)) else ""
            raise TrainingDiverged(
                f"all {phase} steps up to step {self.step} had infinite or NaN gradients: lower inner.lr{again}"
            )
        self._skipped_before = skipped

    def save(self) -> Path:
        started = time.perf_counter()
        outer, facts = {}, {}
        if isinstance(self.outside, Alone):
            state = self.outside.outer
            outer = {"parameters": state.parameters, "momentum": state.momentum}
            facts = self._facts(state.round, state.step)
        elif isinstance(self.outside, Together):
            with self.outside.driver.replica.reading() as vectors:
                outer = {name: vector.clone() for name, vector in vectors.items()}
            facts = self._facts(self.outside.round, self.outside.step)
        path = write_save(Path(self.config.dir), self.step, inner=self.island.state(), outer=outer, facts=facts)
        self.events.emit("save", step=self.step, path=str(path), seconds=time.perf_counter() - started)
        return path

    def _facts(self, round_number: int, outer_step: int) -> dict[str, Any]:
        return {
            "round": round_number, "outer_step": outer_step,
            "position": self._pool[0][0] if self._pool else 0,
            "skipped": int(self.island.skipped.item()), "skipped_before": self._skipped_before,
            "data": self._data_fingerprint, "config": self.config.model_dump(mode="json"),
        }  # fmt: skip

    def resume(self) -> None:
        """Go on from the run folder's last save, exactly where it stopped."""
        found = saves(Path(self.config.dir))
        if not found:
            raise SaveError(f"{self.config.dir} holds no save to resume from: start without --resume")
        facts = read_facts(found[-1])
        self._refuse_other_run(facts, found[-1])
        if isinstance(self.outside, Alone):
            outer = self.outside.outer
            for name, vector in read_outer(found[-1]).items():
                getattr(outer, name).copy_(vector)
            outer.round, outer.step = facts["round"], facts["outer_step"]
            self.outside.position = facts["position"]
        state = self.island.state()
        read_inner(found[-1], into=state)
        self.island.set_state(state)
        self._skipped_before = facts["skipped_before"]
        self.island.skipped.fill_(facts["skipped"])
        self.local_steps = facts["step"] - facts["outer_step"]
        self._tokens = self.local_steps * self._tokens_per_step
        self._look()
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

    def _alone(self) -> Alone | None:
        outer = OuterState.zeros(self.island.layout) if self.place.leader else None
        self.island.read(outer.parameters if outer is not None else None)
        if outer is None:
            return None
        setting = self.config.outer
        momentum = setting.momentum if setting.optimizer == "nesterov" else 0.0
        return Alone(self.config.run, outer, lr=outer_lr(setting.lr, islands=1), momentum=momentum)

    @property
    def outer(self) -> OuterState:
        assert isinstance(self.outside, Alone)
        return self.outside.outer

    @property
    def _base(self) -> torch.Tensor | None:
        return None if self.outside is None else self.outside.parameters

    @property
    def _learning_rate(self) -> float:
        """A newcomer's optimizer starts empty: its first steps are smaller."""
        ramp = min(1.0, (self._steps_here + 1) / max(1, self._ramp_steps))
        return learning_rate(self.config.inner, self.step) * ramp

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

    def _tell_round(self, told: dict[str, Any]) -> None:
        self.events.emit("round", **told, round_s=time.perf_counter() - self._started)

    def _outcome(self) -> Outcome:
        trained = self.step > self._first_step
        return Outcome(self.step, self.round, self.finished, self.validation_losses, trained, self.place.leader)


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
