"""When things happen, as pure functions of step and time: learning rates, and which round is launched or applied."""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median_high
from typing import NamedTuple

from diloco.config.schema import InnerConfig, SyncConfig
from diloco.elastic.protocol.record import Contribution


@dataclass(frozen=True)
class Launch:
    """Contribute this fragment's pseudo-gradient to a round."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """Take the result of this fragment's round into the island's parameters."""

    fragment: int


Action = Launch | Apply


@dataclass(frozen=True)
class Schedule:
    """Map the steps of the run's clock to the fragments that are launched or applied after them. A pass over the
    fragments takes `every` steps; each is launched once in it, at its own time, and applied `delay` steps later.

    When training has ended, every fragment is launched once more, so that the outer state contains all of it.
    """

    launches: Sequence[int]  # the steps after which update 1, 2, … is launched
    fragments: int = 1
    delay: int = 0
    eager: bool = False

    @staticmethod
    @lru_cache(maxsize=4)
    def of(sync: SyncConfig, inner: InnerConfig) -> "Schedule":
        """Build the schedule of a configuration, once: a long run has hundreds of thousands of launches.

        Phases are equally long, or grow as the learning rate falls: max(every, (growth / lr)^2).
        """
        launches, start = [], 0
        while start < inner.steps:
            length = sync.phase_steps
            if sync.growth:
                reached = max(start + 1, inner.warmup)  # a warm-up's small rates are no sign of an end
                rate = learning_rate(inner, reached)  # 0 at the end of some schedules
                length = max(length, math.floor((sync.growth / rate) ** 2) if rate else inner.steps)
            launches += [start + round(length * part / sync.fragments) for part in range(1, sync.fragments + 1)]
            start += length
        inside = [step for step in launches if step < inner.steps]
        eager = sync.apply == "eager"
        return Schedule((*inside, inner.steps), sync.fragments, 0 if eager else sync.delay, eager)

    @property
    def steps(self) -> int:
        """Return the step of the run's clock at which training ends."""
        return self.launches[-1]

    def next(self, step: int, trained: int = 0) -> int:
        """Return the run's clock after the update that follows `step`, however many steps are behind it."""
        return self.launches[min(bisect.bisect_right(self.launches, step), len(self.launches) - 1)]

    def behind(self, step: int) -> int:
        """Count the launches up to this step, which is included."""
        return bisect.bisect_right(self.launches, step)

    def is_over(self, step: int, updates: int) -> bool:
        """Tell whether the clock has come to its end, and every other fragment has had one more turn since.

        From there on the run is over, however many rounds others have added before this island looks. (Alone, a run may
        continue with another `every`: then there are fewer updates than launches.)
        """
        last_turn = len(self.launches) + self.fragments - 1
        return step >= self.steps and (updates >= last_turn or (updates - last_turn) % self.fragments == 0)

    def after(self, step: int) -> list[Action]:
        """List what is launched and applied after this step, in order."""
        if step >= self.steps:
            return self._end()
        here, before = self._launched_at(step), self._launched_at(step - self.delay)
        launches, applies = [Launch(fragment) for fragment in here], [Apply(fragment) for fragment in before]
        if self.eager:  # the last result first: the next phase starts from it
            return [*(Apply(fragment) for fragment in here), *launches]
        return [*launches, *applies]

    def _launched_at(self, step: int) -> list[int]:
        where = bisect.bisect_left(self.launches, step)
        found = where < len(self.launches) and self.launches[where] == step
        return [where % self.fragments] if found else []

    def _end(self) -> list[Action]:
        """List what is in flight first; then the last launch, and every other fragment's remaining progress."""
        last = len(self.launches) - 1
        order = [(last + more) % self.fragments for more in range(self.fragments)]
        flight: list[Action] = [Apply((last - back) % self.fragments) for back in range(self.fragments, 0, -1)]
        return [*flight, *(work for fragment in order for work in (Launch(fragment), Apply(fragment)))]


class Since(NamedTuple):
    """Hold the time since the last round, and the inner steps since the launch of what is in flight."""

    round_s: float  # of wall time since a round was over, or this island launched one
    launch: int | None  # steps since the launch of what is in flight


@dataclass(frozen=True)
class TimedSchedule:
    """Launch all parameters at once, when so much wall time has passed since the last round was over. Islands of any
    speed come to a round together, each with the steps that it has done; the clock advances by what is usual among
    them."""

    every_s: float
    steps: int
    delay: int = 0
    eager: bool = False

    def next(self, step: int, trained: int = 0) -> int:
        """Return the run's clock after an update: `trained` steps later, at least one, but not past the end."""
        return min(self.steps, step + max(1, trained))

    def is_over(self, step: int, updates: int) -> bool:
        """Tell whether the clock has come to its end, however many updates there were."""
        return step >= self.steps

    def after(self, step: int, since: Since) -> list[Action]:
        """List what is launched and applied after this step, by what has passed since the last round and launch."""
        if step >= self.steps:
            return [Apply(0), Launch(0), Apply(0)]
        if since.launch is not None and not self.eager:
            return [Apply(0)] if since.launch >= self.delay else []
        if since.round_s < self.every_s:
            return []
        if self.eager:
            return [Apply(0), Launch(0)]
        return [Launch(0)] if self.delay else [Launch(0), Apply(0)]


def schedule_of(sync: SyncConfig, inner: InnerConfig) -> Schedule | TimedSchedule:
    """Build the schedule of a configuration: by wall time where `sync.every` is one, else by steps."""
    if sync.every_s is None:
        return Schedule.of(sync, inner)
    eager = sync.apply == "eager"
    return TimedSchedule(sync.every_s, inner.steps, 0 if eager else sync.delay, eager)


def usual_steps(contributions: Iterable[Contribution]) -> int:
    """Return the usual number of inner steps behind contributions that are on time, or behind all if none is. It is the
    upper median, so that a few cannot end a run for all."""
    offers = [contribution.offer for contribution in contributions]
    return median_high([offer.steps for offer in offers if not offer.late] or [offer.steps for offer in offers])


def fair_share(every: int, step_ms: int, others_ms: Iterable[int]) -> int:
    """Return the inner steps until the fastest island has done `every`, at least one; `every` if speeds are unknown."""
    known = [ms for ms in others_ms if ms > 0]
    if not step_ms or not known:
        return every
    return max(1, min(every, every * min(known) // step_ms))


def learning_rate(config: InnerConfig, step: int) -> float:
    """Return the learning rate of inner step 1, 2, …

    A linear warm-up is followed by the schedule's shape, down to `final_lr` of the peak at the end.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    final = config.lr * config.final_lr
    match config.schedule:
        case "constant":
            return config.lr
        case "cosine":
            progress = min(1.0, (step - config.warmup) / (config.steps - config.warmup))
            return final + (config.lr - final) * 0.5 * (1 + math.cos(math.pi * progress))
        case "wsd":
            decay_steps = max(1, round(config.decay * config.steps))
            left = max(0, config.steps - step)
            return final + (config.lr - final) * min(1.0, left / decay_steps)
