"""One island's part in a run, whoever owns the training loop.

The built-in trainer (`trainer.py`) and users' own loops (`diloco.connect`) are both participants: they train, and this
module contributes, applies outer updates, reports, saves and resumes. All processes of an island call the same methods
in the same order; only the leader has rounds.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.checkpoint.log.writing import Pieces
from diloco.checkpoint.save.saver import Saver, read_outer, write_save
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP, Samples
from diloco.elastic.protocol.record import Amendment
from diloco.elastic.runtime.fragments import Fragments
from diloco.island.flat import Shards
from diloco.island.layout import Layout
from diloco.island.mesh import ProcessMesh, accelerator_peak, describe_device
from diloco.model.flops import Meter
from diloco.model.frozen import FrozenDigests
from diloco.report.events import Amended, End, Note, Resume, Saved, Start, Step, Wait
from diloco.report.sinks import Events
from diloco.train.amend import in_words, key_end
from diloco.train.outer import outer_vectors
from diloco.train.resume import EarlierSave, fold_back
from diloco.train.rounds import Rounds
from diloco.train.sync import SyncLoop


class Participant(ABC):
    """Take one island's part in a run: contribute, apply outer updates, report, save and resume. `samples` is None for
    a loop that brings its own data."""

    is_witness = False

    def __init__(
        self,
        config: Config,
        place: ProcessMesh,
        events: Events,
        shards: Shards,
        fragments: Fragments,
        samples: Samples | None,
    ) -> None:
        self.config, self.place, self.events = config, place, events
        self.shards, self.fragments, self.samples = shards, fragments, samples
        self.paused = False
        self.ramp_steps = 0  # of inner steps whose learning rate is smaller, for an optimizer that starts empty
        self._losses: list[Tensor] = []
        self._amendments: tuple[Amendment, ...] = ()  # that were reported
        self._resumed_from: Path | None = None
        self.meter = Meter(0.0, None)

    # what differs: what is not trained, how a model's own state is saved and loaded, and what is done after each pass

    @property
    @abstractmethod
    def frozen(self) -> FrozenDigests:
        """Return the digests of what this island does not train and every other must have alike."""

    @abstractmethod
    def inner_state(self) -> dict[str, Any]:
        """Return what the next inner step depends on, in the form that a save holds."""

    @abstractmethod
    def load_inner(self, save: Path, facts: dict[str, Any]) -> None:
        """Restore from a save what `inner_state` returned; `facts` is the content of the save's `facts.json`."""

    def own_facts(self) -> dict[str, Any]:
        """Return what else a save's `facts.json` is to hold, for this kind of participant."""
        return {"skipped": 0, "checked_at": (0, 0)}

    def after_amendments(self) -> None:  # noqa: B027 -- a loop of one's own heeds none
        """Apply the settings that the run's owner has changed. Called on joining and after every change."""

    @property
    def validates(self) -> bool:
        """Tell whether this island validates after the pass that is complete now."""
        return False

    def after_pass(self, *, validate: bool) -> None:  # noqa: B027 -- nor does it validate
        """Do what is due when every fragment has had another outer update, or the run has ended."""

    # getting in

    @property
    def layout(self) -> Layout:
        """Return the names and shapes of the trainable parameters, in canonical order."""
        return self.shards.layout

    @cached_property
    def data(self) -> str:
        """Return the fingerprint of the data; a constant for a loop that brings its own."""
        return OWN_LOOP if self.samples is None else self.samples.source.fingerprint()

    def initial_vectors(self) -> dict[str, Tensor]:
        """Return the outer state of a run that begins with the parameters held now; empty except on the leader."""
        where = self.place.outer_device(self.config.island)
        parameters = torch.empty(self.layout.size, device=where) if self.place.leader else None
        self.shards.read(parameters)
        return {} if parameters is None else outer_vectors(self.config.outer, parameters)

    def join(self, rounds: Rounds | None, earlier: EarlierSave | None = None) -> None:
        """Take part from the current state of the run on, with what an earlier life of this island has saved."""
        self.rounds = rounds
        self.sync = SyncLoop(self.shards, self.place, self.config, rounds, self._after_round)
        self.after_amendments()
        if earlier is not None:
            self._resume(earlier)
        elif self.step_count > 0:
            self.ramp_steps = min(self.config.inner.warmup, self.config.sync.phase_steps)
        self._passes = self.sync.passes  # when last looked at

    def _resume(self, earlier: EarlierSave) -> None:
        """Continue exactly where a pause stopped; else with the saved inner state, from where the run is now."""
        facts, exchange = earlier.facts, self.sync.exchange
        self.load_inner(earlier.path, facts)
        self.ramp_steps = (facts["together"] or {}).get("ramp_steps", 0)
        self._resumed_from = earlier.path
        if earlier.paused is None:
            self.sync.policy.start_again(facts["exchange"]["steps"])
            exchange.start_again()
            return
        counts = facts["exchange"]
        if self.rounds is not None:
            vectors = read_outer(earlier.path)
            if earlier.moved is not None:
                counts = fold_back(counts, vectors, earlier.uncontained(vectors, self.fragments), self.fragments)
                self.rounds.session.forget_taken(earlier.behind())
            else:
                self.rounds.session.restore(earlier.paused["session"], vectors)
            exchange.restore(vectors)
        self.sync.policy.set_facts(self.place.share(counts))
        self.sync.set_facts(earlier.paused["membership"])
        if self.place.leader:
            earlier.mark_taken()

    def report_start(self, module: nn.Module, **figures: Any) -> None:
        """Report what is trained, from which save it resumes, and what the run's owner has changed."""
        config = self.config
        self.events.emit(
            Start(
                run=config.run, dir=config.dir, parameters=sum(p.numel() for p in module.parameters()),
                trained_parameters=self.layout.size, device=describe_device(self.place.device),
                steps=self.sync.config.inner.steps, every=config.sync.every, **figures,
            )
        )  # fmt: skip
        if self._resumed_from is not None:
            self.events.emit(Resume(step=self.step_count, path=str(self._resumed_from)))
        self.report_amendments()

    # while it trains

    @property
    def step_count(self) -> int:
        """Return the run's clock: the inner steps of the outer state, and those done here since."""
        return self.sync.policy.step

    @property
    def finished(self) -> bool:
        """Tell whether the run has ended: its schedule is complete, or its samples are consumed."""
        return self.sync.finished

    def after_step(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Do what the schedule wants after an inner step: contribute a pseudo-gradient, apply an outer update."""
        waited_s = self.sync.waited_s
        self.sync.sync_if_due(should_stop)
        waited_s = self.sync.waited_s - waited_s
        self.meter.pause(waited_s)
        self.report_wait(waited_s)

    def observe(self, tokens: int, loss: Tensor | None, **figures: Any) -> None:
        """Collect losses without waiting for the device; read and report them every `log.every` steps."""
        if loss is not None:
            self._losses.append(loss)
            self.sync.add_loss(loss)
        self.meter.count(tokens)
        if self.step_count % self.config.log.every and self.step_count != self.sync.config.inner.steps:
            return
        mean = self.place.mean(torch.stack(self._losses).mean() if self._losses else None)
        rate = self.meter.tokens_per_s()
        read = {name: value() if callable(value) else value for name, value in figures.items()}
        self.events.emit(Step(step=self.step_count, loss=mean, tokens_per_s=rate, mfu=self.meter.mfu(rate), **read))
        self._losses.clear()
        self.meter.reset()

    def report_wait(self, seconds: float) -> None:
        """Report a wait of so many seconds that ends now: for a round, for what is done after it, or for samples."""
        if seconds > 0 and self.rounds is not None:
            self.events.emit(Wait(seconds=seconds))

    def _after_round(self) -> None:
        """Report the rounds that are over, and do what is due after a pass: validate, save."""
        passes = self.sync.passes
        due = passes != self._passes or self.finished
        validate = due and self.validates
        if self.rounds is not None:
            rounds = self.rounds.round_events()
            last = max((round.round for round in rounds if round.contributors), default=0)
            for round in rounds:
                validated = validate and round.round == last  # a validation follows
                self.events.emit(replace(round, round_s=self.sync.round_s, validated=validated))
            for change in self.rounds.roster_events():
                self.events.emit(change)
        self.report_amendments()
        if not due:
            return
        self._passes = passes
        self.after_pass(validate=validate)
        if passes % self.config.checkpoint.snapshot_every == 0 and not self.finished:
            self.begin_save()

    def _name_of(self, peer: str) -> str:
        return key_end(peer) if self.rounds is None else self.rounds.name_of(peer)

    def report_amendments(self) -> None:
        """Apply and report what the run's owner has changed since the last call.

        Learning rates and schedules follow by themselves.
        """
        before, self._amendments = self._amendments, self.sync.amendments
        if before == self._amendments:
            return
        self.after_amendments()
        for amendment in self._amendments:
            if amendment not in before:
                steps = self.sync.config.inner.steps
                self.events.emit(Amended(number=amendment.number, text=in_words(amendment, self._name_of), steps=steps))

    # leaving

    def leave(self, *, pause: bool = False) -> None:
        """Contribute what is left, leave the run, and save. For a pause, save only: nobody is notified."""
        self.paused = pause and not self.finished
        if self.paused:
            self.sync.pause()
        else:
            self.sync.leave()
        try:
            self.save()
        finally:
            peak = accelerator_peak(self.place.device)
            self.events.emit(End(step=self.step_count, finished=self.finished, accelerator_bytes=peak))
            if self.rounds is not None:
                self.events.emit(self.rounds.agreement())

    @cached_property
    def saver(self) -> Saver:
        """Create the writer of saves in the background; one that fails is reported, and training continues."""
        return Saver(
            Path(self.config.dir),
            lambda step, path, seconds: self.events.emit(Saved(step=step, path=str(path), seconds=seconds)),
            lambda error: self.events.emit(Note(text=f"training goes on, but {error}")),
        )

    def begin_save(self) -> None:
        """Write a save, the end of it in the background. A full disk is no reason to stop: there may be space for the
        next one."""
        with self.place.activity.during("a save", long=True), ExitStack() as outer:
            contents = self._contents(outer)
            self.saver.begin(self.step_count, **contents, written=outer.pop_all().close)

    def save(self) -> Path:
        """Write a save; it is on disk when this returns."""
        with self.place.activity.during("a save", long=True), ExitStack() as outer:
            self.saver.wait()
            started = time.perf_counter()
            path = write_save(Path(self.config.dir), self.step_count, **self._contents(outer), group=self.place.group)
        self.events.emit(Saved(step=self.step_count, path=str(path), seconds=time.perf_counter() - started))
        return path

    def _contents(self, stack: ExitStack) -> dict[str, Any]:
        """Collect what a save holds. Its outer state is that of one named round, whatever is committed meanwhile, until
        the stack is closed."""
        outer: dict[str, Tensor | Pieces] = {}
        facts: dict[str, Any] = {}
        if self.rounds is not None:
            replica = self.rounds.driver.replica
            with replica.reading() as vectors:
                state, pinned = self.rounds.driver.applied, replica.pin_now(once=not self.paused)
                stack.callback(pinned.release)
                if self.paused:  # whoever trains on offers more: only then can what was launched be gone on with
                    outer |= self.sync.exchange.vectors(vectors["parameters"])
            outer |= {name: pinned.part(name, 0, count) for name, count in pinned.counts.items()}
            facts = {**self._facts(self.rounds), "round": state.head.round, "outer_step": state.step}
            if self.paused:
                outer |= self.rounds.session.tensors()
        return {"inner": self.inner_state(), "outer": outer, "facts": facts}

    def _facts(self, rounds: Rounds) -> dict[str, Any]:
        pause = {"session": rounds.session.facts(), "membership": self.sync.facts()} if self.paused else None
        return {
            "exchange": self.sync.policy.facts(), "data": self.data, "config": self.config.model_dump(mode="json"),
            "names": self.layout.names, "shapes": self.layout.shapes, **self.own_facts(),
            "together": {
                "head": rounds.session.state.head.digest, "finished": self.finished, "ramp_steps": self.ramp_steps,
                "paused": pause,
            },
        }  # fmt: skip
