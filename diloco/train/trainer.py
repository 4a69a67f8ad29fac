"""The training loop. `Trainer.run` is the whole algorithm; everything else in this file serves it."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.save import Saver, read_facts, read_inner, read_outer, saves, write_save
from diloco.config.file import first_difference
from diloco.config.schema import Config
from diloco.data.batches import Batches, open_samples, validation_batches
from diloco.data.samples import OWN_LOOP
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.ranges import first, size
from diloco.errors import SaveError, TrainingDiverged
from diloco.island.fragments import fragments_of
from diloco.island.island import Island
from diloco.island.mesh import Place
from diloco.model.build import build_network
from diloco.model.flops import Meter, flops_per_token, peak_flops
from diloco.report.events import Events
from diloco.train.alone import Alone
from diloco.train.amend import in_words
from diloco.train.resume import Earlier
from diloco.train.rounds import Together
from diloco.train.schedule import learning_rate
from diloco.train.sync import Membership


@dataclass(frozen=True)
class Outcome:
    step: int
    round: int
    finished: bool  # False: stopped early, saved, can be resumed
    validation_losses: list[float]  # of this session, first to last
    trained: bool  # False: there was nothing left to do
    leader: bool
    paused: bool = False  # among others: nobody was told, and it will go on as if nothing had happened


class Trainer:
    def __init__(self, config: Config, place: Place, events: Events, *, slowness: float = 1.0) -> None:
        """`slowness`: inner steps take so many times longer, in a simulation."""
        self.config, self.place, self.events = config, place, events
        self.samples = open_samples(config)
        torch.manual_seed(config.seed + place.data_rank)  # dropout, where a model has it
        vocab, sequence = self.samples.source.vocab, config.data.sequence
        network = build_network(config.model, data_vocab=vocab, sequence=sequence, seed=config.seed)
        peak = peak_flops(place.device)
        self.meter = Meter(flops_per_token(network, sequence), peak and peak * place.world)
        self.island = Island(network, place, config.island, config.inner)
        self.batches = Batches(self.samples, config.island, place)
        self.fragments = fragments_of(
            self.island.layout, config.sync.fragments, config.sync.pattern, network.anatomy.blocks
        )
        self._ramp_steps = 0
        self._paused = False
        self._slowness = slowness
        self._idle_s = 0.0  # without samples, since the last step
        self.validation_losses: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._checked_at = 0, 0  # inner steps done here, and those of them that were skipped, up to the last phase
        self._model_name = network.name
        self._resumed_from: Path | None = None
        self._meet(self._alone())

    def _meet(self, outside: Alone | Together | None) -> None:
        """Only the leader has an outside."""
        self.outside = outside
        self.membership = Membership(self.island, self.place, self.config, outside, self._after_round)
        self._amendments: tuple[Amendment, ...] = ()  # that were told of
        self.island.tune(self.membership.config.inner)
        self._passes = self.membership.passes  # when last validated or saved

    def join(self, outside: Together | None, earlier: Earlier | None = None) -> None:
        """Take part in a run with others, from where they are, with what an earlier life of this island has left."""
        self._meet(outside)
        if earlier is not None:
            self._go_on(earlier)
        elif self.step > 0:
            self._ramp_steps = min(self.config.inner.warmup, self.config.sync.phase_steps)

    @property
    def step(self) -> int:
        return self.membership.step

    @property
    def finished(self) -> bool:
        return self.membership.finished

    def run(
        self, should_stop: Callable[[], bool] = lambda: False, pausing: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Train to the end, or until asked to stop; then contribute what is left (not if that is a pause), and save."""
        self._first_step = self.step
        with closing(self.batches), closing(self._saver):
            self._tell_start()
            self._heed_amendments()
            if self.step == 0 and self.config.evaluate.every and self.place.any(self._speaks):
                self._validate()
            self.meter.reset()
            self.membership.finish_step(should_stop)
            while not self.finished and not self.place.any(should_stop()):
                self.advance(should_stop)
            self._tell_wait(self._idle_s)
            self._paused = not self.finished and self.place.any(pausing())
            if self._paused:
                self.membership.pause()
            else:
                self.membership.leave()
            self.save()
        self.events.emit("end", step=self.step, finished=self.finished)
        return self._outcome()

    def advance(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """One inner step and whatever the schedule wants after it; or a look at what others have done."""
        if batch := self.membership.draw(self.config.island.batch, self._tokens_per_step):
            self._tell_wait(self._idle_s)
            self._idle_s = 0.0
            upcoming = first(self.membership.pool, size(batch))
            began = time.perf_counter()
            self._observe(self.island.step(self.batches.read(batch, upcoming), self._learning_rate))
            if self._slowness > 1:
                time.sleep((self._slowness - 1) * (time.perf_counter() - began))
            waited_s = self.membership.waited_s
            self.membership.sync_if_due(should_stop)
            waited_s = self.membership.waited_s - waited_s
            self.meter.pause(waited_s)
            self._tell_wait(waited_s)
        else:
            began = time.perf_counter()
            self.membership.without_samples(self.config.island.batch, should_stop)
            self._idle_s += time.perf_counter() - began

    def _after_round(self) -> None:
        """What is done now and then between rounds: tell, validate, save, and notice a run that is beyond help."""
        if self.outside is not None:
            for story in self.outside.stories():
                self._tell_round(story)
        self._heed_amendments()
        passes = self.membership.passes
        if passes == self._passes and not self.finished:
            return
        self._passes = passes
        self._refuse_divergence()
        every = self.config.evaluate.every
        if every and (self.finished or passes % every == 0) and self.place.any(self._speaks):
            self._validate()
        if passes % self.config.checkpoint.snapshot_every == 0 and not self.finished:
            self._save_if_possible()

    def _heed_amendments(self) -> None:
        """What the run's owner has changed: learning rates and schedules follow by themselves."""
        before, self._amendments = self._amendments, self.membership.amendments
        if before == self._amendments:
            return
        self.island.tune(self.membership.config.inner)
        for amendment in self._amendments:
            if amendment not in before:
                steps = self.membership.config.inner.steps
                self.events.emit("amended", number=amendment.number, text=in_words(amendment), steps=steps)

    @property
    def _speaks(self) -> bool:
        """All islands hold the same outer parameters: one of them validates."""
        return isinstance(self.outside, Alone) or (isinstance(self.outside, Together) and self.outside.first)

    def _validate(self) -> None:
        """Loss of the outer parameters, which the island holds in between for as long as that takes."""
        count = min(self.config.evaluate.samples, self.samples.validation_count)
        with self.membership.exchange.outer_parameters():
            loss = self.island.evaluate(validation_batches(self.samples, self.config.island, self.place, count))
        self.validation_losses.append(loss)
        step, number = self.membership.outer_step, self.membership.round
        self.events.emit("validation", step=step, round=number, validation_loss=loss)

    def _observe(self, loss: torch.Tensor) -> None:
        """Collect losses without waiting for the device; read and report them every so often."""
        self._losses.append(loss)
        self.meter.count(self._tokens_per_step)
        if self.step % self.config.log.every and self.step != self.membership.config.inner.steps:
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
        steps, (steps_before, skipped_before) = self.membership.exchange.steps, self._checked_at
        phase = steps - steps_before
        if 0 < phase <= skipped - skipped_before:
            again = ", and go on from the last save with --resume" if saves(Path(self.config.dir)) else ""
            raise TrainingDiverged(
                f"all {phase} steps up to step {self.step} had infinite or NaN gradients: lower inner.lr{again}"
            )
        self._checked_at = steps, skipped

    @cached_property
    def _saver(self) -> Saver:
        return Saver(
            Path(self.config.dir),
            lambda step, path, seconds: self.events.emit("save", step=step, path=str(path), seconds=seconds),
            lambda error: self.events.emit("note", text=f"training goes on, but {error}"),
        )

    def _save_if_possible(self) -> None:
        """In the background. A full disk is no reason to stop: there may be space for the next one."""
        self._saver.begin(self.step, **self._contents())

    def save(self) -> Path:
        """On disk when it returns."""
        self._saver.wait()
        started = time.perf_counter()
        path = write_save(Path(self.config.dir), self.step, **self._contents())
        self.events.emit("save", step=self.step, path=str(path), seconds=time.perf_counter() - started)
        return path

    def _contents(self) -> dict[str, Any]:
        """The outer state is that of one round, and says of which, whatever is committed meanwhile."""
        outer, facts = {}, {}
        if self.outside is not None:
            outer, facts = self._outer_to_save(), self._facts()
        if isinstance(self.outside, Together):
            driver, state = self.outside.driver, None
            while driver.applied is not state:
                state = driver.applied
                outer = self._outer_to_save()
            facts |= {"round": state.head.round, "outer_step": state.step}
        return {"inner": self.island.state(), "outer": outer, "facts": facts}

    def _outer_to_save(self) -> dict[str, torch.Tensor]:
        """With what this island has launched and the outer state does not contain. Among others that can only be gone
        on with after a pause: whoever trains on offers more."""
        assert self.outside is not None
        vectors = self.outside.outer()
        if isinstance(self.outside, Together) and not self._paused:
            return vectors
        return {**vectors, **self.membership.exchange.vectors(vectors["parameters"]), **self.outside.launched_vectors()}

    def _facts(self) -> dict[str, Any]:
        return {
            "round": self.membership.round, "outer_step": self.membership.outer_step,
            "exchange": self.membership.exchange.facts(),
            "launched": self.outside.launched_facts() if isinstance(self.outside, Alone) else [],
            "position": self.membership.pool[0][0] if self.membership.pool else 0,
            "skipped": int(self.island.skipped.item()), "checked_at": self._checked_at,
            "data": self._data_fingerprint, "config": self.config.model_dump(mode="json"),
            "together": self._facts_among_others(),
        }  # fmt: skip

    def _facts_among_others(self) -> dict[str, Any] | None:
        if not isinstance(self.outside, Together):
            return None
        session = self.outside.session
        return {
            "head": session.state.head.digest, "finished": self.finished, "ramp_steps": self._ramp_steps,
            "paused": {"session": session.facts(), "membership": self.membership.facts()} if self._paused else None,
        }  # fmt: skip

    def resume(self) -> None:
        """Go on from the run folder's last save, exactly where it stopped."""
        found = saves(Path(self.config.dir))
        if not found:
            raise SaveError(f"{self.config.dir} holds no save to resume from: start without --resume")
        facts = read_facts(found[-1])
        self._refuse_other_run(facts, found[-1])
        if isinstance(self.outside, Alone):
            vectors = read_outer(found[-1])
            self.outside.restore(vectors, facts)
            self.membership.exchange.restore(vectors)
        self.membership.exchange.set_facts(facts["exchange"])
        self._resume_inner(found[-1], facts)
        self.membership.look()
        self.membership.synced = self.step
        self._passes = self.membership.passes

    def _resume_inner(self, save: Path, facts: dict[str, Any]) -> None:
        state = self.island.state()
        read_inner(save, into=state)
        self.island.set_state(state)
        self._checked_at = tuple(facts["checked_at"])
        self.island.skipped.fill_(facts["skipped"])
        self._resumed_from = save

    def _go_on(self, earlier: Earlier) -> None:
        """After a pause, exactly where it stopped; else with the optimizer of then, from where the others are."""
        facts, exchange = earlier.facts, self.membership.exchange
        self._resume_inner(earlier.path, facts)
        self._ramp_steps = facts["together"]["ramp_steps"]
        if not earlier.paused:
            exchange.start_again(facts["exchange"]["steps"])
            return
        if isinstance(self.outside, Together):
            vectors = read_outer(earlier.path)
            exchange.restore(vectors)
            self.outside.session.restore(earlier.paused["session"], vectors)
        exchange.set_facts(facts["exchange"])
        self.membership.set_facts(earlier.paused["membership"])
        self._passes = self.membership.passes
        if self.place.leader:
            earlier.take()

    def _refuse_other_run(self, facts: dict[str, Any], save: Path) -> None:
        """A save fits only the model, data, seed, optimizers and fragments it was made with; all else may change."""
        if facts["data"] == OWN_LOOP:
            raise SaveError(f"{save} is of a program of its own (diloco.connect): start that program to go on with it")
        now, then = self.config.model_dump(mode="json"), facts["config"]
        fixed = {name: (then.get(name), now[name]) for name in ("seed", "model", "data")}
        for name in ("inner.optimizer", "outer.optimizer", "sync.fragments", "sync.pattern"):
            section, key = name.split(".")
            fixed[name] = then[section].get(key), now[section][key]
        for name, (before, after) in fixed.items():
            if changed := first_difference(name, before, after):
                raise SaveError(f"{save} was made with {changed}: undo that or use --fresh")
        if facts["data"] != self._data_fingerprint:
            raise SaveError(f"{save}: {self.samples.source.name} has changed since then: bring it back or use --fresh")
        if facts["step"] > self.config.inner.steps:
            raise SaveError(f"{save} is past inner.steps={self.config.inner.steps}: raise inner.steps to go on")

    @cached_property
    def _data_fingerprint(self) -> str:
        return self.samples.source.fingerprint()

    def _alone(self) -> Alone | None:
        where = self.place.outer_device(self.config.island)
        parameters = torch.empty(self.island.layout.size, device=where) if self.place.leader else None
        self.island.read(parameters)
        if parameters is None:
            return None
        return Alone(self.config, parameters, self.fragments)

    @property
    def outer(self) -> dict[str, torch.Tensor]:
        """The vectors of an island alone."""
        assert isinstance(self.outside, Alone)
        return self.outside.vectors

    @property
    def _learning_rate(self) -> float:
        """A newcomer's optimizer starts empty: its first steps are smaller."""
        ramp = min(1.0, self.membership.exchange.steps / max(1, self._ramp_steps))
        return learning_rate(self.membership.config.inner, self.step) * ramp

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
            steps=self.membership.config.inner.steps,
            every=config.sync.every,
            tokens_per_step=self._tokens_per_step,
        )
        if self._model_name.endswith("weights loaded)") and config.data.tokenizer == "bytes" and source.vocab == 256:
            self.events.emit(
                "note", text="the loaded weights are trained on bytes: is data.tokenizer set as they expect?"
            )
        if self._resumed_from is not None:
            self.events.emit("resume", step=self.step, path=str(self._resumed_from))

    def _tell_wait(self, seconds: float) -> None:
        """It ends now: for a round of several islands, for what is done after it, or for samples."""
        if seconds > 0 and isinstance(self.outside, Together):
            self.events.emit("wait", seconds=seconds)

    def _tell_round(self, told: dict[str, Any]) -> None:
        self.events.emit("round", **told, round_s=self.membership.round_s)

    def _outcome(self) -> Outcome:
        trained = self.step > self._first_step
        round, losses, leader = self.membership.round, self.validation_losses, self.place.leader
        return Outcome(self.step, round, self.finished, losses, trained, leader, self._paused)


def describe_device(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)})"
    )
