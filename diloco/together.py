"""An island among others, as its trainer sees it: where the outer state is, what to train on, when a round is over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diloco.config import Config
from diloco.elastic.driver import Driver
from diloco.elastic.ranges import Ranges
from diloco.elastic.record import Contribution, Record, Settings
from diloco.elastic.session import Change, Session
from diloco.elastic.state import RunState
from diloco.outer import outer_lr


def decider(config: Config) -> Callable[[RunState, int, tuple[Contribution, ...]], tuple[Settings, int]]:
    """What a coordinator fixes at *begin*: the outer settings for so many islands, and the run's clock after it."""
    outer, steps = config.outer, config.inner.steps
    momentum = outer.momentum if outer.optimizer == "nesterov" else 0.0

    def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
        if not contributions:
            return Settings(), state.step
        lr = outer_lr(outer.lr, islands=len(contributions))
        return Settings(lr, momentum, config.sync.codec), min(state.step + config.sync.every, steps)

    return decide


class Together:
    def __init__(self, driver: Driver, config: Config, names: Callable[[str], str]) -> None:
        self.driver, self.session = driver, Session(driver, config.sync.codec)
        self._names = names  # of islands, for people
        self._batch = config.island.batch
        count = driver.run.count
        self.parameters, self._spare = torch.empty(count), torch.empty(count)
        self.session.take(self.parameters)
        self._told = self.session.state.head.round

    @property
    def step(self) -> int:
        return self.session.state.step

    @property
    def round(self) -> int:
        return self.session.state.head.round

    @property
    def first(self) -> bool:
        """Of those who take part: it speaks for all where one is enough."""
        return self.session.state.roster[:1] == (self.driver.node.me,)

    def start(
        self, fragment: int, pseudo_gradient: Tensor, *, tokens: int, samples: Ranges, step: int, step_ms: int
    ) -> None:
        self.session.start(fragment, pseudo_gradient, tokens=tokens, samples=samples, step_ms=step_ms)

    def paces(self) -> list[int]:
        """What an inner step took on each island of the last round, in milliseconds."""
        return [contribution.offer.step_ms for contribution in self.session.last_round()]

    def finish(self, fragment: int, should_stop: Callable[[], bool]) -> bool:
        return self.session.finish(fragment, should_stop)

    def poll(self) -> bool:
        return self.session.poll()

    def wait(self, seconds: float) -> None:
        self.session.wait(seconds)

    def take(self) -> Change:
        contained, adjust = self.session.take(self._spare)
        self.parameters, self._spare = self._spare, self.parameters
        return Change(contained, adjust, tuple(self._tell()))

    def _tell(self) -> list[dict[str, Any]]:
        records = [record for record in self.session.records() if record.proposal.key.round > self._told]
        self._told = max(self._told, self.round)
        return [self._story(record) for record in records if record.proposal.key.round <= self.round]

    def _story(self, record: Record) -> dict[str, Any]:
        proposal = record.proposal
        return {
            "round": proposal.key.round,
            "contributors": tuple(self._names(island) for island in proposal.islands),
            "islands": len(proposal.roster),
            "tokens": proposal.tokens,
            "outer_lr": proposal.settings.lr,
            "step": proposal.step,
            "digest": record.digest,
            "late": sum(contribution.offer.late for contribution in proposal.contributions),
            "samples": [contribution.offer.samples for contribution in proposal.contributions],
        }

    def available(self, used: Ranges) -> Ranges:
        return self.session.available(used)

    @property
    def owes(self) -> bool:
        return self.session.owes

    def exhausted(self) -> bool:
        """All samples of the run are consumed."""
        return self.session.state.ledger.exhausted(self._batch)

    def leave(self) -> None:
        self.driver.leave()
