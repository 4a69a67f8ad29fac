"""How long an island's disk takes. Others are told of it, and are as patient as that."""

from collections import deque
from dataclasses import dataclass, field

RECENT = 8  # writes


@dataclass
class Writes:
    """Measure writes from when they are asked for until they are durable. They end in the order of asking."""

    _asked: deque[float] = field(default_factory=deque)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def ask(self, now: float) -> None:
        """Note that something is to be written."""
        self._asked.append(now)

    def end(self, now: float) -> None:
        """Note that the oldest write is durable."""
        self._recent.append(now - self._asked.popleft())

    def slowest_s(self, now: float) -> float:
        """Return what the slowest of the last writes has taken, or the oldest under way takes already."""
        under_way = now - self._asked[0] if self._asked else 0.0
        return max((under_way, *self._recent))
