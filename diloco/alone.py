"""An island that has no peers: its contribution is the mean, and every round is its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from diloco.elastic.ranges import Ranges
from diloco.elastic.session import Change
from diloco.outer import OuterState, Update, apply

FOR_EVER = 1 << 62  # samples


class Alone:
    """What `Together` is for islands with peers (see together.py)."""

    def __init__(self, island: str, outer: OuterState, *, lr: float, momentum: float) -> None:
        self._island, self._lr, self._momentum = island, lr, momentum
        self.outer = outer
        self.position = 0  # of the next sample
        self._update: Update | None = None

    @property
    def parameters(self) -> Tensor:
        return self.outer.parameters

    @property
    def step(self) -> int:
        return self.outer.step

    @property
    def round(self) -> int:
        return self.outer.round

    def start(
        self, fragment: int, pseudo_gradient: Tensor, *, tokens: int, samples: Ranges, step: int, step_ms: int
    ) -> None:
        self.position = samples[-1][1] if samples else self.position
        number = self.outer.round + 1
        self._update = Update(
            number, fragment, step, pseudo_gradient, self._lr, self._momentum, (self._island,), tokens
        )

    def finish(self, fragment: int, should_stop: Callable[[], bool]) -> bool:
        return True

    def poll(self) -> bool:
        return self._update is not None

    def take(self) -> Change:
        assert self._update is not None
        update, self._update = self._update, None
        apply(self.outer, update)
        norm = torch.linalg.vector_norm(update.mean).item()
        return Change(contained=True, adjust=None, told=({
            "round": update.round, "contributors": update.contributors, "tokens": update.tokens,
            "outer_lr": update.lr, "update_norm": norm, "step": update.step,
        },))  # fmt: skip

    def paces(self) -> list[int]:
        return []

    def available(self, used: Ranges) -> Ranges:
        return ((used[-1][1] if used else self.position, FOR_EVER),)

    @property
    def owes(self) -> bool:
        return False

    def exhausted(self) -> bool:
        return False

    def leave(self) -> None:
        pass
