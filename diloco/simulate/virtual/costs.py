"""Virtual time, chance that is the same whenever the same seed is run, and what everything takes in a world."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

from diloco.elastic.protocol.messages import Begin, Message
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.peers import Peers

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import Life, World


class Timeline:
    """Chance is drawn by name, from a stream for each: taking one fault away leaves everything else as it was. That is
    how disasters are made short. A smooth timeline knows no chance at all."""

    def __init__(self, seed: int, *, smooth: bool) -> None:
        self.now = 0.0
        self.smooth = smooth
        self.stream = cache(lambda name: random.Random(f"{seed}/{name}"))
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []

    def chance(self, name: str) -> float:
        """In [0, 1)."""
        return 0.5 if self.smooth else self.stream(name).random()

    def at(self, time: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.at(self.now + seconds, what)

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """As `after`, but what takes no time is done before anything else happens."""
        if seconds:
            self.after(seconds, what)
        else:
            what()

    def run(self, until: float) -> None:
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, what = pop(queue)
            what()
        self.now = until


class Costs(ABC):
    connect_s: float  # within which all members of an all-reduce must have joined it
    unreachable_s: float  # until members notice that two of them cannot reach each other
    apply_s = 0.0  # after a round
    calm = False  # faults are over, and so are slow phases: how long rounds take is known

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    @abstractmethod
    def send(self, world: World, sender: str, to: str, message: Message) -> None:
        """Carry a message, and hand it to the world when it arrives."""

    def flush(self, world: World, sender: str) -> None:
        """Send what was held back: all effects of an input are carried out."""
        return

    def clock(self, name: str) -> float:
        """Return the time by an island's own clock."""
        return self.timeline.now

    def peers(self, name: str, now: float) -> Peers | None:
        """Return an island's view of the others; None: of its own, and it is told who there is."""
        return None

    def first_tick_s(self, node: Node) -> float:
        return 0.0

    def ticks(self, life: Life) -> bool:
        """Return whether a tick that is due would do anything."""
        return True

    @abstractmethod
    def tick_s(self, node: Node, islands: int) -> float: ...

    @abstractmethod
    def phase_s(self, name: str) -> float:
        """Return how long an island's next inner steps take."""

    @abstractmethod
    def encode_s(self, name: str) -> float:
        """Return how long its contribution takes it, after that."""

    @abstractmethod
    def fetch_s(self) -> float: ...

    @abstractmethod
    def catch_up_s(self, missed: int) -> float: ...

    @abstractmethod
    def closed_s(self, gone: Node, other: Node) -> float | None:
        """Return when another island notices that connections closed; None: never."""

    @abstractmethod
    def reduce_s(self, begin: Begin) -> Sequence[float]:
        """Return how long an all-reduce takes each of its members."""

    def stall_s(self, begin: Begin, *, silent: bool) -> float:
        """Return when others miss a member that is gone."""
        return 0.0

    @abstractmethod
    def failure_s(self, *, first: bool) -> float:
        """Return when a member hears that an all-reduce has failed; `first`: it has noticed that itself."""
