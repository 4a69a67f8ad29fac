"""An island that has no peers: its contribution is the mean, and every round is its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.config.schema import Config
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.ranges import Ranges, normal
from diloco.elastic.protocol.record import Head
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.session import Taken, at_once
from diloco.elastic.runtime.work import Trained
from diloco.train.outer import apply, outer_settings, outer_vectors, preview
from diloco.train.schedule import schedule_of

FOR_EVER = 1 << 62  # samples


@dataclass(frozen=True)
class Launched:
    fragment: int
    progress: Tensor
    done: Trained


class Alone:
    """What `Together` is for islands with peers (see together.py). A launched round is over when it is taken."""

    amendments: tuple[Amendment, ...] = ()  # its settings are changed by whoever resumes it

    def __init__(self, config: Config, parameters: Tensor, fragments: Fragments) -> None:
        self._config, self._schedule = config, schedule_of(config.sync, config.inner)
        self.fragments = fragments
        self.vectors = outer_vectors(config.outer, parameters)
        self.base = parameters.clone()  # as last taken, fragment by fragment
        self.updates = self.step = 0
        self.position = 0  # of the next sample
        self.launched: list[Launched] = []
        self._told: list[dict[str, Any]] = []

    @property
    def parameters(self) -> Tensor:
        return self.vectors["parameters"]

    @property
    def round(self) -> int:
        return self.updates

    def start(
        self, fragment: int, progress: Tensor, done: Trained, *, step_ms: int = 0, ready: Callable[[], None] = at_once
    ) -> None:
        ready()
        self.position = done.samples[-1][1] if done.samples else self.position
        self.launched.append(Launched(fragment, progress, done))

    def finish(self, fragment: int, should_stop: Callable[[], bool], since: Head | None) -> bool | None:
        return True

    def poll(self) -> bool:
        return False

    def look(self) -> None:
        pass

    def moved(self) -> list[int]:
        return []

    def take(self, fragment: int) -> Taken:
        """Rounds are serial: those that were launched before are over before."""
        while any(launched.fragment == fragment for launched in self.launched):
            self._commit(self.launched.pop(0))
        self.fragments.copy(self.vectors, "parameters", self.base, fragment)
        return Taken(self.step)

    def _commit(self, launched: Launched) -> None:
        settings = outer_settings(self._config, 1, self.updates // len(self.fragments) + 1)
        apply(self.vectors, self.fragments, launched.fragment, launched.progress, settings)
        self.updates, self.step = self.updates + 1, self._schedule.next(self.step, launched.done.steps)
        self._told.append({
            "round": self.round, "contributors": (self._config.run,), "tokens": launched.done.tokens,
            "outer_lr": settings.lr, "update_norm": torch.linalg.vector_norm(launched.progress).item(),
            "step": self.step,
        })  # fmt: skip

    def preview(self, fragment: int, progress: Tensor) -> Tensor:
        """Where the fragment will be when this progress is in it."""
        settings = outer_settings(self._config, 1, self.updates // len(self.fragments) + 1)
        return preview(self.vectors, self.fragments, fragment, progress, settings)

    def stories(self) -> list[dict[str, Any]]:
        """Of the rounds that are over since the last time, for people."""
        told, self._told = self._told, []
        return told

    def outer(self) -> dict[str, Tensor]:
        return self.vectors

    def launched_vectors(self) -> dict[str, Tensor]:
        return {f"launched.{number}": launched.progress for number, launched in enumerate(self.launched)}

    def launched_facts(self) -> list[Any]:
        return [[launched.fragment, *launched.done] for launched in self.launched]

    def restore(self, vectors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """What a save holds."""
        vectors = {name: vector.to(self.base.device) for name, vector in vectors.items()}
        for name, vector in self.vectors.items():
            vector.copy_(vectors[name])
        self.base.copy_(self.parameters)
        self.updates, self.step, self.position = facts["round"], facts["outer_step"], facts["position"]
        self.launched = [
            Launched(fragment, vectors[f"launched.{number}"], Trained(tokens, normal(map(tuple, samples)), steps))
            for number, (fragment, tokens, samples, steps) in enumerate(facts["launched"])
        ]

    def paces(self) -> list[int]:
        return []

    def ask(self, samples: int) -> None:
        """They are all its own."""

    def available(self, used: Ranges) -> Ranges:
        return ((used[-1][1] if used else self.position, FOR_EVER),)

    def owes(self, fragment: int) -> bool:
        return False

    def exhausted(self) -> bool:
        return False

    def leave(self) -> None:
        pass
