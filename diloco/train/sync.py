"""An island's part in a run: what it may train on, when it contributes, and what it waits for.

All processes of an island call the same methods in the same order; only the leader has rounds.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from diloco.config.schema import Config
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.ranges import Ranges, first, minus, size
from diloco.island.flat import Shards
from diloco.island.mesh import Place
from diloco.train.amend import InForce
from diloco.train.exchange import Exchange
from diloco.train.rounds import Rounds
from diloco.train.schedule import Apply, Launch, Since, TimedSchedule, Work, fair_share, schedule_of

PHASES_AHEAD = 2  # worth of samples that an island leases
LOOK_S = 0.1  # how often an island without samples looks again


def never() -> bool:
    return False


def samples_ahead(config: Config, per_step: int) -> int:
    """How many samples an island would like to hold."""
    return PHASES_AHEAD * config.sync.phase_steps * per_step


class SyncLoop:
    def __init__(
        self,
        shards: Shards,
        place: Place,
        config: Config,
        rounds: Rounds | None,
        after_round: Callable[[], None],
    ) -> None:
        self.place, self.sync, self.elastic, self.rounds = place, config.sync, config.elastic, rounds
        self._config = InForce(config)
        self.amendments: tuple[Amendment, ...] = ()  # that are heeded
        self.schedule = schedule_of(config.sync, config.inner)
        self.exchange = Exchange(shards, place, config.sync, rounds)
        self.waited_s = 0.0  # for rounds, and for what is done after them
        self.round_s = 0.0  # from this island's last launch to the last news
        self._launched_at = self._updated_at = time.perf_counter()
        self._after_round = after_round
        self.updates = self._phase_steps = self._step_ms = 0
        self._phase_began = time.perf_counter()
        self._left: list[Work] = []  # of what the schedule wanted after the last step, when it was asked to stop
        self.refresh()
        self.exchange.step = self.synced = self.outer_step  # the schedule was followed up to there

    @property
    def step(self) -> int:
        """The run's clock: the outer state's, and what was trained since."""
        return self.exchange.step

    @property
    def config(self) -> Config:
        """With what the run's owner has changed by now. (Not how islands meet: that stays.)"""
        return self._config.now

    @property
    def passes(self) -> int:
        """Over all fragments."""
        return self.updates // len(self.exchange.fragments)

    def refresh(self) -> None:
        """What the leader knows, for all processes: the clock, the samples, whether the run is over."""
        seen = None
        if self.rounds is not None:
            self._heed(self.rounds.amendments)
            over = self.schedule.is_over(self.rounds.step, self.rounds.updates)
            paces = self.rounds.paces() if self.elastic.adaptive else []
            share = fair_share(self.sync.phase_steps, self._step_ms, paces)
            pool = self.rounds.available(self.exchange.used)
            clock = self.rounds.step, self.rounds.round, self.rounds.updates
            ended = over, over or self.rounds.exhausted()
            seen = clock, pool, ended, share, self.rounds.amendments
        before = self.updates
        clock, self.pool, ended, self._share, amendments = self.place.share(seen)
        self.outer_step, self.round, self.updates = clock
        self._over, self.finished = ended
        self._heed(amendments)
        if self.updates != before:
            self._updated_at = time.perf_counter()

    def _heed(self, amendments: tuple[Amendment, ...]) -> None:
        if amendments != self.amendments:
            self.amendments, now = amendments, self._config.at(amendments)
            self.schedule = schedule_of(now.sync, now.inner)

    def draw(self, count: int, tokens: int) -> Ranges:
        """Samples for one inner step of so many tokens; none, if fewer are leased to this island."""
        batch = first(self.pool, count)
        if size(batch) < count:
            return ()
        self.trained(batch, tokens)
        return batch

    def trained(self, batch: Ranges, tokens: int) -> None:
        """One inner step on these samples."""
        self.pool = minus(self.pool, batch)
        self.exchange.trained(batch, tokens)
        self._phase_steps += 1

    def sync_if_due(self, should_stop: Callable[[], bool] = never) -> None:
        """After an inner step: whatever the schedule wants, and a look at what others have done."""
        self._carry_out(self._due(), should_stop)
        self._follow()

    def finish_step(self, should_stop: Callable[[], bool] = never) -> None:
        """What an earlier life of this island was waiting for after its last step."""
        if self._left:
            self._carry_out(self._left, should_stop)
            self._follow()

    def without_samples(self, count: int, should_stop: Callable[[], bool] = never) -> None:
        """Fewer than `count` are leased to this island: contribute what it has, or wait until more are."""
        if self._has_something_to_give():
            self._give_everything(lambda: should_stop() or self._may_go_on(count))
            self._left = []  # it will look again
            self.refresh()
        else:
            if self.rounds is not None:
                self.rounds.wait(LOOK_S)
            self._phase_began = self._updated_at = time.perf_counter()
        self._follow()

    def leave(self) -> None:
        """Contribute what is trained so far, if rounds come in time; then say goodbye."""
        if self._has_something_to_give() and not self._over:
            deadline = time.monotonic() + self.elastic.grace_s
            self._give_everything(lambda: time.monotonic() > deadline)
        if self.rounds is not None:
            self.rounds.leave()

    def pause(self) -> None:
        """Go without a word, to come back and go on from a save. What is in flight is not waited for."""
        if self.rounds is not None:
            self.rounds.pause()

    def facts(self) -> dict[str, Any]:
        """What a save must hold for the same island to go on among the others."""
        now = time.perf_counter()
        return {
            "synced": self.synced, "phase_steps": self._phase_steps, "step_ms": self._step_ms,
            "left": [[type(work) is Launch, work.fragment] for work in self._left],
            "phase_s": now - self._phase_began, "since_s": now - max(self._launched_at, self._updated_at),
        }  # fmt: skip

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        self.synced, self._phase_steps, self._step_ms = facts["synced"], facts["phase_steps"], facts["step_ms"]
        self._left = [(Launch if launch else Apply)(fragment) for launch, fragment in facts["left"]]
        self.refresh()
        self._phase_began = now - facts["phase_s"]
        self._launched_at = self._updated_at = now - facts["since_s"]

    def _follow(self) -> None:
        if self.exchange.apply_remote_updates():
            self.refresh()
            self.round_s = time.perf_counter() - self._launched_at
            self._after_round()

    def _due(self) -> list[Work]:
        """An island that is slower than others may be at its share already."""
        if isinstance(self.schedule, TimedSchedule):
            return self.schedule.after(self.step, self._since())
        early = self.elastic.adaptive and self._phase_steps >= self._share
        several = len(self.exchange.fragments) > 1  # then others may have moved the clock past a launch
        passed = range((min(self.synced, self.step - 1) if several else self.step - 1) + 1, self.step + 1)
        self.synced = self.step
        return [Launch(0), Apply(0)] if early else [work for step in passed for work in self.schedule.after(step)]

    def _since(self) -> Since:
        """By the leader's clock."""
        round_s = self.place.share(time.perf_counter() - max(self._launched_at, self._updated_at))
        return Since(round_s, self.exchange.since_cut(0) if self.exchange.in_flight else None)

    def _carry_out(self, works: list[Work], should_stop: Callable[[], bool]) -> None:
        """What is done between rounds comes when all is done: a save in the middle of it could not be gone on from."""
        news, self._left = False, []
        for number, work in enumerate(works):
            match work:
                case Launch(fragment):
                    self._launch(fragment)
                case Apply(fragment):
                    news |= self._finish(fragment, should_stop)
                    if fragment in self.exchange.in_flight:  # asked to stop
                        self._left = works[number:]
                    if self._over or self._left:  # over: nobody comes any more
                        break
        if news:
            with self._waiting():
                self._after_round()

    def _launch(self, fragment: int) -> None:
        if self.place.device.type == "cuda" and not self.sync.delay:
            torch.cuda.synchronize()  # steps still queued belong to training, not to the round that is waited for
        now = time.perf_counter()
        step_ms = 0  # what is committed says it only where it matters: else it is the same in every run
        if self.elastic.adaptive:
            step_ms = round(1000 * (now - self._phase_began) / max(1, self._phase_steps))
        samples = size(self.exchange.used)
        if self.exchange.launch(fragment, step_ms=step_ms):
            self._ask_for_a_phase(samples, now - self._phase_began)
            self._launched_at, self._step_ms = now, step_ms
            self._phase_steps, self._phase_began = 0, time.perf_counter()

    def _ask_for_a_phase(self, samples: int, seconds: float) -> None:
        """How many steps fit into a phase that lasts a given time is known when some are done."""
        if isinstance(self.schedule, TimedSchedule) and self.rounds is not None and samples:
            self.rounds.request_samples(math.ceil(PHASES_AHEAD * samples * self.schedule.every_s / seconds))

    def _finish(self, fragment: int, should_stop: Callable[[], bool]) -> bool:
        """Wait until the round is over, with or without this island's part in it. Whether it is."""
        with self._waiting():
            over = self.exchange.finish(fragment, should_stop)
            if over:
                self.refresh()
                self.round_s = time.perf_counter() - self._launched_at
        return over

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        waited = time.perf_counter() - began
        self.waited_s += waited
        self._phase_began += waited

    def _has_something_to_give(self) -> bool:
        return any(self.exchange.owes(fragment) for fragment in range(len(self.exchange.fragments)))

    def _may_go_on(self, count: int) -> bool:
        """Rounds may need what is trained on new samples; and if there will be none, nobody comes. On the leader."""
        assert self.rounds is not None
        return self.rounds.exhausted() or size(self.rounds.available(self.exchange.used)) >= count

    def _give_everything(self, should_stop: Callable[[], bool]) -> None:
        """Fragment after fragment, in the order of their rounds; what is in flight first."""
        count = len(self.exchange.fragments)
        order = [(self.updates + more) % count for more in range(count)]
        works = (work for f in order for work in (Apply(f), Launch(f), Apply(f)))
        self._carry_out(list(works), should_stop)
