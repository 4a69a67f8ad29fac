"""Provide virtual time, chance that repeats with its seed, and the interface of what everything takes in a world."""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from diloco.elastic.protocol.messages import Begin, Message
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.peers import Peers

if TYPE_CHECKING:
    from diloco.simulate.virtual.disk import Disk
    from diloco.simulate.virtual.world import Life, World


class Timeline:
    """Run what was scheduled in the order of virtual time, and draw chance by name.

    Each name has a stream of its own, so that taking one fault away leaves everything else as it was. That is how
    disasters are made short. A smooth timeline has no chance at all.
    """

    def __init__(self, seed: int, *, smooth: bool) -> None:
        self.now = 0.0
        self.smooth = smooth
        self.stream = cache(lambda name: random.Random(f"{seed}/{name}"))
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []

    def chance(self, name: str) -> float:
        """Return the next number in [0, 1) of this name's stream; always 0.5 on a smooth timeline."""
        return 0.5 if self.smooth else self.stream(name).random()

    def at(self, time: float, what: Callable[[], object]) -> None:
        """Schedule a call at this time; calls at the same time run in the order in which they were scheduled."""
        heapq.heappush(self._queue, (time, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Schedule a call so many seconds from now."""
        self.at(self.now + seconds, what)

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Schedule like `after`, but with 0 seconds call at once, before anything else happens."""
        if seconds:
            self.after(seconds, what)
        else:
            what()

    def run(self, until: float) -> None:
        """Run everything up to this time, which is then the current one."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, what = pop(queue)
            what()
        self.now = until


class Costs(ABC):
    """Decide how long everything takes in a world, and carry its messages."""

    unreachable_s: float  # until members notice that two of them cannot reach each other
    apply_s = 0.0  # after a round
    exchange_s = 0.0  # about what an all-reduce takes
    slowest_write_s = 0.0  # what the slowest disk may take
    calm = False  # faults are over, and so are slow phases: how long rounds take is known

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.missed: dict[tuple[str, str], float] = {}  # when a sign of life last got lost or came late: from, to

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
        """Return an island's view of the others; None: it keeps its own, and is given the names of all."""
        return None

    def first_tick_s(self, node: Node) -> float:
        """Return the seconds from an island's start to its first tick."""
        return 0.0

    def ticks(self, life: Life) -> bool:
        """Return whether a tick that is due would do anything."""
        return True

    @abstractmethod
    def tick_s(self, node: Node, islands: int) -> float:
        """Return the seconds until a node's next tick, among so many islands."""

    @abstractmethod
    def phase_s(self, name: str) -> float:
        """Return how long an island's next inner steps take."""

    @abstractmethod
    def encode_s(self, name: str) -> float:
        """Return how long an island then takes to encode its contribution."""

    @abstractmethod
    def fetch_s(self) -> float:
        """Return how long it takes to fetch one round's result from another island."""

    @abstractmethod
    def catch_up_s(self, name: str, missed: int) -> float:
        """Return how long an island needs to catch up with so many missed rounds."""

    def given(self, disk: Disk) -> Disk:
        """Return the log that a donor gives to one who asks for it now: by default, what it has in the end."""
        return disk

    def write_s(self, name: str) -> float:
        """Return how long an island's disk takes to write a memory or a record; 0: no time at all."""
        return 0.0

    def snapshot_s(self, name: str) -> float:
        """Return how long it takes to write a state that was taken over."""
        return 0.0

    @abstractmethod
    def closed_s(self, gone: Node, other: Node) -> float | None:
        """Return after how long another island notices that connections closed; None: never."""

    @abstractmethod
    def connect_s(self, begin: Begin) -> float:
        """Return within how many seconds all members of an all-reduce must have joined it."""

    def spread(self, what: str) -> float:
        """Return by what factor the bytes of a member have come sooner or later than usual."""
        return 1.0

    @abstractmethod
    def reduce_s(self, begin: Begin) -> Sequence[float]:
        """Return how long an all-reduce takes each of its members."""

    def made_s(self, begin: Begin) -> float:
        """Return after how long the mean is made, so that a loss concerns the loser's group only; default: never."""
        return inf

    def group(self, begin: Begin, member: str) -> set[str]:
        """Return the members that get the mean by way of this one."""
        return set(begin.members)

    def stall_s(self, begin: Begin, *, silent: bool) -> float:
        """Return after how long others miss a member that is gone; `silent`: its connections do not close."""
        return 0.0

    @abstractmethod
    def failure_s(self, *, first: bool) -> float:
        """Return after how long a member hears of a failed all-reduce; `first`: it has noticed that itself."""
