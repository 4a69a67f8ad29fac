"""Virtual time, and chance that is the same whenever the same seed is run."""

import heapq
import random
from collections.abc import Callable
from functools import cache
from itertools import count


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
