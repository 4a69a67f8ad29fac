"""Figures that a dashboard works out of what it sees: how much islands have trained, and what passes their links."""

import time
from collections import deque

from diloco.checkpoint.log.history import RoundHeader
from diloco.report.shape import Row
from diloco.report.status import RunStatus

OVER_S = 3.0  # rates are means over so many seconds
EVERY_S = 1.9  # from one sample to the next


class TrainingShares:
    """Sum up how long islands have trained within their time in the run: as their contributions say it or, of islands
    on this machine, by what they did not wait."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._from: dict[str, float] = {}
        self._to: dict[str, float] = {}

    def take(self, header: RoundHeader) -> None:
        """Add a round."""
        end = header.time_ms / 1000
        begin = end - (header.collect_ms + header.exchange_ms) / 1000
        for part in header.contributions:
            if end:
                self._from.setdefault(part.island, begin)
                self._to[part.island] = end
            if part.step_ms:
                self._seconds[part.island] = self._seconds.get(part.island, 0.0) + part.steps * part.step_ms / 1000

    def take_wait(self, peer: str, begin: float, end: float) -> None:
        """Add a wait of an island, if it was in a round by then: what comes before is its start."""
        if begin >= self._from.get(peer, end):
            self._waited[peer] = self._waited.get(peer, 0.0) + end - begin

    def share(self, peer: str) -> float | None:
        """Return the share of its time that an island has trained, from 0 to 1; None: not known."""
        there = self._to.get(peer, 0.0) - self._from.get(peer, 0.0)
        if there <= 0 or (peer not in self._seconds and peer not in self._waited):
            return None
        trained = self._seconds[peer] if peer in self._seconds else there - self._waited[peer]
        return min(1.0, max(0.0, trained / there))


class Flow:
    """Measure what all islands together send and receive, from the counters that each of them tells."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, tuple[int, int]]]] = deque()

    def sample(self, status: RunStatus | None) -> list[Row]:
        """Return the rates of the last seconds as a row; none if nothing is known yet."""
        if status is None:
            return []
        counters = {
            each.island: (each.bytes_sent, each.bytes_received or 0)
            for each in status.islands
            if each.bytes_sent is not None
        }
        now = time.time()
        if self._seen and now - self._seen[-1][0] < EVERY_S:
            return []
        self._seen.append((now, counters))
        while len(self._seen) > 2 and now - self._seen[1][0] >= OVER_S:
            self._seen.popleft()
        then, before = self._seen[0]
        if now - then < OVER_S / 2:
            return []
        passed = [
            (sent - before[peer][0], received - before[peer][1]) for peer, (sent, received) in counters.items()
            if peer in before and sent >= before[peer][0] and received >= before[peer][1]  # else it has started anew
        ]  # fmt: skip
        up, down = (sum(each[way] for each in passed) / (now - then) for way in (0, 1))
        return [[round(now, 1), round(up), round(down)]]
