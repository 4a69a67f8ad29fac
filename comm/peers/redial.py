"""When to try a peer again that cannot be reached: soon, then less often, but for ever."""

from collections.abc import Iterable
from random import Random

FIRST_S, MOST_S = 1.0, 15.0


def pause_s(failures: int, random: Random, *, first_s: float = FIRST_S, most_s: float = MOST_S) -> float:
    """Return how long to wait after so many failures in a row.

    It doubles up to a limit. Up to a third is taken off by chance: islands that lost each other do not dial in step.
    """
    return min(most_s, first_s * 2.0 ** min(failures - 1, 30)) * random.uniform(0.67, 1.0)


class Redial:
    """Choose which of the lost peers to dial now. Times are those of one monotonic clock."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()
        self._tries: dict[str, int] = {}
        self._next_at: dict[str, float] = {}

    def due(self, lost: Iterable[str], now: float) -> list[str]:
        """Return those of the lost peers whose turn it is. All others count as found, and begin anew when lost."""
        lost = set(lost)
        for found in self._tries.keys() - lost:
            del self._tries[found], self._next_at[found]
        return sorted(peer for peer in lost if now >= self._next_at.get(peer, now))

    def tried(self, peers: Iterable[str], now: float) -> None:
        """Note that these were tried: each gets its next turn later."""
        for peer in peers:
            self._tries[peer] = self._tries.get(peer, 0) + 1
            self._next_at[peer] = now + pause_s(self._tries[peer], self._random)
