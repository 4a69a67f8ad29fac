"""An island's part in a run: what it may train on, when it contributes, and what it waits for.

All processes of an island call the same methods in the same order; only the leader has an outside.
"""

import time
from collections.abc import Callable

import torch

from diloco.config import ElasticConfig, SyncConfig
from diloco.elastic.ranges import Ranges, first, minus, size
from diloco.exchange import Exchange, Outside, Parameters
from diloco.place import Place
from diloco.schedule import Apply, Launch, Schedule, Work, fair_share
from diloco.together import Together

LOOK_S = 0.1  # how often an island without samples looks again


def never() -> bool:
    return False


class Membership:
    def __init__(
        self,
        parameters: Parameters,
        place: Place,
        sync: SyncConfig,
        elastic: ElasticConfig,
        schedule: Schedule,
        outside: Outside | None,
        after_round: Callable[[], None],
    ) -> None:
        self.place, self.sync, self.elastic, self.schedule, self.outside = place, sync, elastic, schedule, outside
        self.exchange = Exchange(parameters, place, sync, outside)
        self.waited_s = 0.0  # for rounds, and for what is done after them
        self.launched_at = time.perf_counter()
        self._after_round = after_round
        self._phase_steps = self._step_ms = 0
        self._phase_began = time.perf_counter()
        self.look()
        self.exchange.step = self.synced = self.outer_step  # the schedule was followed up to there

    @property
    def step(self) -> int:
        """The run's clock: the outer state's, and what was trained since."""
        return self.exchange.step

    @property
    def passes(self) -> int:
        """Over all fragments."""
        return self.updates // len(self.exchange.fragments)

    def look(self) -> None:
        """What the leader knows, for all processes: the clock, the samples, whether the run is over."""
        seen = None
        if self.outside is not None:
            over = self.schedule.is_over(self.outside.step, self.outside.updates)
            finished = over or self.outside.exhausted()
            paces = self.outside.paces() if self.elastic.adaptive else []
            share = fair_share(self.sync.every, self._step_ms, paces)
            pool = self.outside.available(self.exchange.used)
            seen = self.outside.step, self.outside.round, self.outside.updates, pool, finished, share
        self.outer_step, self.round, self.updates, self.pool, self.finished, self._share = self.place.share(seen)

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

    def without_samples(self, should_stop: Callable[[], bool] = never) -> None:
        """Nothing is leased to this island: contribute what it has, or wait until something is."""
        if self._has_something_to_give():
            self._give_everything(should_stop)
        elif isinstance(self.outside, Together):
            self.outside.wait(LOOK_S)
        self._follow()

    def leave(self) -> None:
        """Contribute what is trained so far, if rounds come in time; then say goodbye."""
        if not self.place.any(isinstance(self.outside, Together)):
            return
        if self._has_something_to_give() and not self.finished:
            deadline = time.monotonic() + self.elastic.grace_s
            self._give_everything(lambda: time.monotonic() > deadline)
        if self.outside is not None:
            self.outside.leave()

    def _follow(self) -> None:
        if self.exchange.take_what_moved():
            self._tell_and_look()

    def _due(self) -> list[Work]:
        """An island that is slower than others may be at its share already."""
        early = self.elastic.adaptive and self._phase_steps >= self._share
        several = len(self.exchange.fragments) > 1  # then others may have moved the clock past a launch
        passed = range((min(self.synced, self.step - 1) if several else self.step - 1) + 1, self.step + 1)
        self.synced = self.step
        return [Launch(0), Apply(0)] if early else [work for step in passed for work in self.schedule.after(step)]

    def _carry_out(self, works: list[Work], should_stop: Callable[[], bool]) -> None:
        for work in works:
            match work:
                case Launch(fragment):
                    self._launch(fragment)
                case Apply(fragment):
                    self._finish(fragment, should_stop)

    def _launch(self, fragment: int) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()  # steps still queued belong to training, not to the round
        now = time.perf_counter()
        step_ms = round(1000 * (now - self._phase_began) / max(1, self._phase_steps))
        if self.exchange.launch(fragment, step_ms=step_ms):
            self.launched_at, self._step_ms = now, step_ms
            self._phase_steps, self._phase_began = 0, time.perf_counter()

    def _finish(self, fragment: int, should_stop: Callable[[], bool]) -> None:
        """Wait until the round is over, with or without this island's part in it."""
        began = time.perf_counter()
        if self.exchange.finish(fragment, should_stop):
            self._tell_and_look()
        waited = time.perf_counter() - began
        self.waited_s += waited
        self._phase_began += waited

    def _tell_and_look(self) -> None:
        self.look()
        self._after_round()

    def _has_something_to_give(self) -> bool:
        return any(self.exchange.owes(fragment) for fragment in range(len(self.exchange.fragments)))

    def _give_everything(self, should_stop: Callable[[], bool]) -> None:
        """Fragment after fragment, in the order of their rounds; what is in flight first."""
        count = len(self.exchange.fragments)
        order = [(self.updates + more) % count for more in range(count)]
        works = (work for f in order for work in (Apply(f), Launch(f), Apply(f)))
        self._carry_out(list(works), should_stop)
