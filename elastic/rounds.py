"""Rounds as the trainer sees them: hand in a pseudo-gradient, get back the committed update.

`AloneRounds` serves an island that has no peers: its contribution is the mean.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One committed outer update of one fragment. It holds all that `apply` and a later replay need."""

    round: int
    fragment: int
    step: int  # the run's clock after this update
    mean: Tensor  # fp32, weighted mean of the contributions
    lr: float
    momentum: float
    contributors: tuple[str, ...]
    tokens: int


class Rounds(Protocol):
    def start(self, fragment: int, pseudo_gradient: Tensor, *, weight: int, step: int) -> None:
        """Contribute; `weight` is the number of tokens behind it, `step` the clock it brings the run to."""

    def finish(self, fragment: int) -> Update:
        """The committed update of the round that was started for this fragment, waiting if need be."""

    def poll(self) -> list[Update]:
        """Updates committed meanwhile, in order, without waiting."""


class AloneRounds:
    def __init__(self, island: str, *, lr: float, momentum: float, round: int = 0) -> None:
        self._island, self._lr, self._momentum = island, lr, momentum
        self._round = round
        self._committed: list[Update] = []

    def start(self, fragment: int, pseudo_gradient: Tensor, *, weight: int, step: int) -> None:
        self._round += 1
        update = Update(
            self._round, fragment, step, pseudo_gradient, self._lr, self._momentum, (self._island,), tokens=weight
        )
        self._committed.append(update)

    def finish(self, fragment: int) -> Update:
        index = next(i for i, update in enumerate(self._committed) if update.fragment == fragment)
        return self._committed.pop(index)

    def poll(self) -> list[Update]:
        committed, self._committed = self._committed, []
        return committed
