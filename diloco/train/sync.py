"""The loop that carries out what the sync policy decides: it draws samples, waits, and keeps the time. `policy.py`
decides when an island contributes and what it waits for, `exchange.py` moves the parameters.

All processes of an island call the same methods in the same order; only the leader has rounds.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from diloco.config.schema import Config
from diloco.elastic.protocol.ranges import Ranges, first, minus, size
from diloco.elastic.protocol.record import Amendment
from diloco.elastic.runtime.work import StepsDone
from diloco.island.flat import Shards
from diloco.island.mesh import ProcessMesh
from diloco.train.amend import AmendedConfig
from diloco.train.exchange import Exchange
from diloco.train.policy import AppliedResult, SyncPolicy, View, Waits
from diloco.train.rounds import Rounds
from diloco.train.schedule import Apply, Launch, TimedSchedule, fair_share, schedule_of

PHASES_AHEAD = 2  # worth of samples that an island leases
FOR_OTHERS = "the wait for other islands"
LOOK_S = 0.1  # how often an island without samples looks again


def never() -> bool:
    """Return False: the default for callers that never ask an island to stop."""
    return False


def samples_ahead(config: Config, per_step: int) -> int:
    """Return how many samples an island would like to hold: what it trains on in two phases."""
    return PHASES_AHEAD * config.sync.phase_steps * per_step


class SyncLoop:
    """Carry out the decisions of the sync policy on a real island: draw samples, wait, and keep the time."""

    def __init__(
        self, shards: Shards, place: ProcessMesh, config: Config, rounds: Rounds | None, after_round: Callable[[], None]
    ) -> None:
        self.place, self.sync, self.elastic, self.rounds = place, config.sync, config.elastic, rounds
        self._config = AmendedConfig(config)
        self.amendments: tuple[Amendment, ...] = ()  # that are heeded
        self.exchange = Exchange(shards, place, config, rounds)
        view = place.share(rounds.refresh() if rounds is not None else None)
        self.policy = SyncPolicy(self, schedule_of(config.sync, config.inner), view)
        self._reported = view.head
        self.waited_s = 0.0  # for rounds, and for what is done after them
        self.round_s = 0.0  # from this island's last launch to the last news
        self._after_round = after_round
        self._phase_steps = self._step_ms = 0
        self._phase_losses: list[Tensor] = []  # not read yet: reading waits for the device
        self._losses_before: list[float] = []  # of the same phase, before a pause
        self._phase_began = time.perf_counter()
        self._heed(place.share(rounds.session.state.amendments if rounds is not None else None))
        self._launched_at = self._updated_at = self._phase_start()
        self.refresh_samples()

    def _phase_start(self) -> float:
        """Return when the phase began that the others are in, where phases last a time: whoever comes back in the
        middle of one ends it with them. It is now if all have been away for longer, nobody has begun, or nobody else is
        there."""
        schedule, passed_s = self.policy.schedule, 0.0
        if self.rounds is not None and isinstance(schedule, TimedSchedule) and self.rounds.islands > 1:
            since_s = self.rounds.since_last_s()
            passed_s = since_s if 0 < since_s < schedule.every_s else 0.0
        return time.perf_counter() - self.place.share(passed_s)

    @property
    def config(self) -> Config:
        """Return the configuration with what the run's owner has changed so far. (How islands meet does not change.)"""
        return self._config.now

    @property
    def passes(self) -> int:
        """Return the number of complete passes over all fragments."""
        return self.view.updates // len(self.exchange.fragments)

    @property
    def view(self) -> View:
        """Return what the policy has last seen of the run."""
        return self.policy.view

    @property
    def finished(self) -> bool:
        """Tell whether the run has ended: its schedule is complete, or its samples are consumed."""
        return self.policy.over or self._exhausted

    def refresh_samples(self) -> None:
        """Share with all processes what only the leader knows: the samples, and this island's share of a phase."""
        seen = None
        if self.rounds is not None:
            last = self.rounds.session.last_round() if self.elastic.adaptive else ()
            share = fair_share(self.sync.phase_steps, self._step_ms, [each.offer.step_ms for each in last])
            seen = self.rounds.session.available(self.policy.used), self.rounds.exhausted(), share
        self.pool, self._exhausted, self._share = self.place.share(seen)

    def add_loss(self, loss: Tensor) -> None:
        """Note an inner step's loss; it is read when the phase's progress is contributed."""
        self._phase_losses.append(loss)

    def _phase_loss(self) -> float:
        """Return the mean loss of this phase's steps on this process, in five digits; 0 if it is not known."""
        mean = fmean(self._read_losses() or [0.0])
        self._losses_before.clear()
        self._phase_losses.clear()
        return float(f"{mean:.5g}")

    def _read_losses(self) -> list[float]:
        read = torch.stack(self._phase_losses).tolist() if self._phase_losses else []
        return [*self._losses_before, *filter(math.isfinite, read)]

    def _heed(self, amendments: tuple[Amendment, ...]) -> None:
        """Apply the amendments that the log contains now: the schedule follows them."""
        if amendments != self.amendments:
            self.amendments, now = amendments, self._config.at(amendments)
            self.policy.schedule = schedule_of(now.sync, now.inner)

    def draw(self, count: int, tokens: int) -> Ranges:
        """Take the samples for one inner step of so many tokens, and count the step; none if fewer are leased."""
        batch = first(self.pool, count)
        if size(batch) < count:
            return ()
        self.trained(batch, tokens)
        return batch

    def trained(self, batch: Ranges, tokens: int) -> None:
        """Count one inner step on these samples, which leave the pool."""
        self.exchange.keep_anchor()
        self.pool = minus(self.pool, batch)
        self.policy.trained(batch, tokens)
        self._phase_steps += 1

    def sync_if_due(self, should_stop: Callable[[], bool] = never) -> None:
        """Do what the schedule wants after an inner step, and look at what others have done."""
        round_s = 0.0
        if isinstance(self.policy.schedule, TimedSchedule):  # by the leader's clock
            round_s = self.place.share(time.perf_counter() - max(self._launched_at, self._updated_at))
        early = self.elastic.adaptive and self._phase_steps >= self._share
        self.wait_out(self.policy.after_step(round_s=round_s, early=early), should_stop)
        self._follow()

    def finish_step(self, should_stop: Callable[[], bool] = never) -> None:
        """Carry out what an earlier life of this island was waiting for after its last step."""
        if self.policy.left:
            self.wait_out(self.policy.finish_step(), should_stop)
            self._follow()

    def without_samples(self, count: int, should_stop: Callable[[], bool] = never) -> None:
        """Contribute what there is, or wait a moment. Called when fewer than `count` samples are leased here."""
        if self.policy.owes_something:
            self.wait_out(self.policy.without_samples(lambda: self._may_continue(count)), should_stop)
            self.refresh_samples()
        else:
            if self.rounds is not None:
                with self.place.activity.during(FOR_OTHERS, waits=True):
                    self.rounds.session.wait(LOOK_S)
            self._phase_began, self._updated_at = time.perf_counter(), self._phase_start()
        self._follow()

    def _may_continue(self, count: int) -> bool:
        """Tell whether there are enough samples, or there will be no more, in which case nobody comes to rounds."""
        rounds, used = self.rounds, self.policy.used
        enough = rounds is not None and (rounds.exhausted() or size(rounds.session.available(used)) >= count)
        return self.place.any(enough)

    def wait_out(self, waits: Waits, should_stop: Callable[[], bool]) -> bool:
        """Carry out a decision to its end. Return False if asked to stop before."""
        done = self._wait_out(waits, should_stop)
        self.exchange.keep_anchor()
        return done

    def _wait_out(self, waits: Waits, should_stop: Callable[[], bool]) -> bool:
        for head in waits:
            with self._waiting():
                news = None
                if self.rounds is not None:
                    with self.place.activity.during(FOR_OTHERS, waits=True):
                        news = self.rounds.session.wait_for_news(head, should_stop)
                news = self.place.share(news)
            if not news:
                waits.close()
                return False
        return True

    def _follow(self) -> None:
        """Apply what others have done, then do what is due between rounds.

        That comes last: a save in the middle could not be resumed from.
        """
        taken, head = self.policy.follow(), self.policy.view.head
        if taken or head != self._reported:
            with self._waiting():
                self._reported = head
                self.refresh_samples()
                self.round_s = time.perf_counter() - self._launched_at
                self._after_round()

    def leave(self) -> None:
        """Contribute what is trained so far, if rounds come within `elastic.grace_s`; then leave the run."""
        if self.policy.owes_something and not self.policy.over:
            deadline = time.monotonic() + self.elastic.grace_s
            self.wait_out(self.policy.contribute_all(), lambda: time.monotonic() > deadline)
            self._follow()
        if self.rounds is not None:
            self.rounds.leave()

    def pause(self) -> None:
        """Stop without notifying anyone, to resume from a save later. What is in flight is not waited for."""
        if self.rounds is not None:
            self.rounds.driver.pause()

    def facts(self) -> dict[str, Any]:
        """Return what a save must hold for the same island to continue among the others."""
        now = time.perf_counter()
        return {
            "synced": self.policy.synced, "updates": self.view.updates, "losses": self._read_losses(),
            "phase_steps": self._phase_steps, "step_ms": self._step_ms,
            "left": [[type(work) is Launch, work.fragment] for work in self.policy.left],
            "phase_s": now - self._phase_began, "since_s": now - max(self._launched_at, self._updated_at),
        }  # fmt: skip

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Restore what `facts` returned; the time away does not count towards a phase or a round, unless the others
        have committed one meanwhile."""
        now = time.perf_counter()
        self._phase_steps, self._step_ms, self.policy.synced = facts["phase_steps"], facts["step_ms"], facts["synced"]
        self._losses_before = list(facts["losses"])
        self.policy.left = [(Launch if launch else Apply)(fragment) for launch, fragment in facts["left"]]
        self.refresh_samples()
        self._phase_began = now - facts["phase_s"]
        in_this_phase = facts.get("updates") == self.view.updates
        self._launched_at = self._updated_at = now - facts["since_s"] if in_this_phase else self._phase_start()

    # what the policy has done

    def refresh(self) -> View:
        """Return the leader's view of the run on every process, and apply new amendments."""
        before, seen = self.policy.view, None
        if self.rounds is not None:
            seen = self.rounds.refresh(), self.rounds.session.state.amendments
        if not self.place.any(seen is not None and seen[0] != before):
            return before
        view, amendments = self.place.share(seen)
        self._heed(amendments)
        if view.updates != before.updates:
            self._updated_at = self._phase_start()  # whoever catches up learns of it late
        return view

    def launch(self, fragment: int, tokens: int, samples: Ranges, steps: int) -> None:
        """Contribute a fragment's progress, and start to time the next phase."""
        if self.place.device.type == "cuda" and not self.sync.delay:
            torch.cuda.synchronize()  # steps still queued belong to training, not to the round that is waited for
        now = time.perf_counter()
        step_ms = 0  # what is committed says it only where it matters: else it is the same in every run
        if self.elastic.adaptive:
            step_ms = round(1000 * (now - self._phase_began) / max(1, self._phase_steps))
        self.exchange.launch(fragment, StepsDone(tokens, samples, steps, self._phase_loss()), step_ms=step_ms)
        self._ask_for_a_phase(size(samples), now - self._phase_began)
        self._launched_at, self._step_ms = now, step_ms
        self._phase_steps, self._phase_began = 0, time.perf_counter()

    def _ask_for_a_phase(self, samples: int, seconds: float) -> None:
        """Request samples for a phase of a given time: how many steps fit into it is known when some are done."""
        schedule = self.policy.schedule
        if isinstance(schedule, TimedSchedule) and self.rounds is not None and samples:
            self.rounds.session.request_samples(math.ceil(PHASES_AHEAD * samples * schedule.every_s / seconds))

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        """Apply a fragment's result to the parameters; the time for it counts as waiting."""
        with self._waiting():
            return self.exchange.apply_result(fragment, steps, launched=launched)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside as waiting, and not as part of the phase."""
        began = time.perf_counter()
        yield
        waited = time.perf_counter() - began
        self.waited_s += waited
        self._phase_began += waited
