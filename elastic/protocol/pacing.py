"""Slow links: an island whose exchange would take far longer than a round takes part in every k-th round only.

All members of an exchange wait for the slowest link. The others' time that goes into such waiting is bounded.
"""

from collections import deque
from collections.abc import Collection
from math import ceil
from statistics import median

from diloco.elastic.protocol.protocol_state import ProtocolState
from diloco.elastic.protocol.record import Offer

EXTRA = 0.1  # of a usual round, at most, is added to rounds on average for one slow island
KNOWN = 3  # exchanges must have been timed


class Pacing:
    """Decide in which rounds islands with slow links take part, by the rates that they have declared."""

    def __init__(self, own: ProtocolState) -> None:
        self.own = own
        self._volumes: deque[float] = deque(maxlen=16)  # seconds of exchanges times the rate of their slowest link
        self._last: dict[str, int] = {}  # the last round that contained each island's work
        self._every: dict[str, int] = {}  # whoever is slow: k

    def committed(self, islands: Collection[str], rates: dict[str, int], exchange_s: float) -> None:
        """Take in that a round with these islands was committed, and how long its exchange took."""
        self._last |= dict.fromkeys(islands, self.own.state.key.round)
        slowest = min((rates.get(island, 0) for island in islands), default=0)
        if slowest > 0 and len(islands) > 1:
            self._volumes.append(exchange_s * slowest)

    def in_turn(self, offers: dict[str, Offer], rates: dict[str, int], usual_s: float | None) -> dict[str, Offer]:
        """Return the offers of those whose turn it is; `usual_s` is the length of a usual round, if it is known."""
        if usual_s is None or len(self._volumes) < KNOWN or not all(rates.get(peer) for peer in offers):
            return offers
        volume, slow = median(self._volumes), self.own.options.slowest
        takes = {peer: volume / rates[peer] for peer in offers}
        rest = max((each for each in takes.values() if each <= slow * usual_s), default=0.0)
        for peer, seconds in takes.items():
            if seconds <= slow * usual_s:
                self._every.pop(peer, None)
                continue
            every = max(2, ceil((seconds - rest) / (EXTRA * usual_s)))
            if peer not in self._every:
                self.own.note(
                    "slow", peer, f"an exchange with it takes about {seconds:.0f} s, and a round {usual_s:.0f} s: it "
                    f"takes part in one of {every} rounds (elastic.slowest)",
                )  # fmt: skip
            self._every[peer] = every
        return {peer: offer for peer, offer in offers.items() if not self.is_out_of_turn(peer)}

    def out_of_turn(self) -> set[str]:
        """Return the slow islands without which this round goes on."""
        return {peer for peer in self._every if self.is_out_of_turn(peer)}

    def is_out_of_turn(self, peer: str) -> bool:
        """Return whether a slow island took part so lately that this round goes on without it."""
        if peer not in self._every or peer not in self._last:
            return False
        return self.own.state.key.round - self._last[peer] < self._every[peer]
