"""Nobody starves: now and then a round waits for islands that are nearly there.

Where catching up takes about as long as a round, a newcomer, or one that comes back, would always be one round late.
Several that are late have begun to catch up at the same commit: waiting for all of them takes little longer. Fragments
are counted apart: an island whose samples are all behind one of them has nothing for rounds of the others.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

from diloco.elastic.protocol.protocol_state import ProtocolState

EVERY = 8  # rounds between two that wait for the same island
LONGEST_INTERVAL = 256  # at most, for one that was waited for in vain
BEHIND = 2  # rounds, at most
SHARE = 0.1  # of the time, at most, is spent so
KNOWN = 3  # rounds must have been timed

Turn = tuple[str, int]  # an island in rounds of a fragment


@dataclass
class Hold:
    """Hold back one round for some islands, until a time; a record that only gives them samples does not end it."""

    peers: tuple[str, ...]
    until: float
    updates: int  # that there were when it began
    fragment: int
    since: float | None = None  # None: nobody is missing now


@dataclass
class Holding:
    """Decide for which islands this coordinator holds a round back, and for how long."""

    own: ProtocolState
    _hold: Hold | None = None
    _intervals: dict[Turn, int] = field(default_factory=dict)  # rounds to let pass for one that was waited for in vain
    _failures: dict[Turn, int] = field(default_factory=dict)
    _not_before: dict[Turn, int] = field(default_factory=dict)
    _came: dict[str, int] = field(default_factory=dict)  # updates there were when one was first near, and at the head
    _spent_s: float = 0.0
    _began: float | None = None
    _lengths: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _last: float | None = None

    def committed(self, contributors: Collection[str], now: float) -> None:
        """Take in that a round with contributions was committed."""
        self._end(contributors, now)
        if self._last is not None:
            self._lengths.append(now - self._last)
        self._began = now if self._began is None else self._began
        self._last = now

    @property
    def usual_s(self) -> float | None:
        """Return how long a usual round takes; None if that is not known yet."""
        return median(self._lengths) if len(self._lengths) >= KNOWN else None

    def holds(self, ready: Collection[str], now: float) -> bool:
        """Return whether to wait with a round that could begin now."""
        if not self.own.rules.nobody_starves or len(self._lengths) < KNOWN:
            return False
        for peer in self._came.keys() & set(ready):
            del self._came[peer]
        if self._hold is not None and self._hold.updates != self.own.state.updates:  # another has led that round
            self._end(self.own.last_contributors, now)
        if self._hold is None:
            self._hold = self._choose(ready, now)
        if (hold := self._hold) is None:
            return False
        missing = [peer for peer in hold.peers if peer not in ready and self.own.peers.hears(peer, now)]
        if missing and now < hold.until:
            hold.since = now if hold.since is None else hold.since
            return True
        self._pause(hold, now)
        if missing:
            self._end(ready, now)
        return False

    def _pause(self, hold: Hold, now: float) -> None:
        """Count the time for which a round was held back; after `until`, other things were waited for."""
        if hold.since is not None:
            self._spent_s += max(0.0, min(now, hold.until) - hold.since)
            hold.since = None

    def _end(self, there: Collection[str], now: float) -> None:
        """End the hold, if there is one; these islands are there, or have contributed."""
        if (hold := self._hold) is not None:
            self._hold = None
            self._pause(hold, now)
            for peer in hold.peers:
                self._waited_for((peer, hold.fragment), there=peer in there)

    def _waited_for(self, turn: Turn, *, there: bool) -> None:
        """Take in that a round has waited for an island, which is there now, or not: then it has to wait longer."""
        failures = self._failures[turn] = 0 if there else self._failures.get(turn, 0) + 1
        if failures and failures % 2 == 0:
            self._intervals[turn] = min(LONGEST_INTERVAL, 2 * self._intervals.get(turn, EVERY))
        if there:
            self._intervals.pop(turn, None)
        # the first time it may have been late by little: it is given one more chance
        rounds = 1 if failures == 1 else self._intervals.get(turn, EVERY)
        self._not_before[turn] = self.own.state.head.round + rounds

    def _choose(self, ready: Collection[str], now: float) -> Hold | None:
        usual, number, due = median(self._lengths), self.own.state.head.round, self.own.due
        budget_s = SHARE * (now - (self._began or now)) - self._spent_s
        if budget_s < 0:
            return None
        near = [peer for peer in sorted(self.own.peers.views) if peer not in ready and self._is_near(peer, usual, now)]
        late = [peer for peer in near if self._may_be_late(peer, usual)]
        allowed = tuple(peer for peer in late if number >= self._not_before.get((peer, due), 0))
        if not allowed:
            return None
        wanted_s = max(usual, self.own.options.silence_s) + 2 * max(map(self.own.write_s, allowed))
        return Hold(allowed, now + min(wanted_s, max(usual, budget_s)), self.own.state.updates, due)

    def _may_be_late(self, peer: str, usual: float) -> bool:
        """Return whether an island may well miss a round that does not wait for it: one has passed it over, or will.

        One that has just come may be in time for the next, unless it needs most of a round to fetch what it misses.
        """
        view, state = self.own.peers.views[peer], self.own.state
        assert view.head is not None  # it is near
        if view.head.round < state.head.round or view.caught_up_in_s > usual / 2:
            return True
        return state.updates > self._came.setdefault(peer, state.updates)

    def _is_near(self, peer: str, usual: float, now: float) -> bool:
        """Return whether an island that takes no part in this round could soon: it says how far it is."""
        view, own = self.own.peers.views[peer], self.own
        if not own.peers.hears(peer, now) or view.head is None:
            return False
        if peer in own.last_contributors or peer in own.state.witnesses:
            return False
        behind = own.state.head.round - view.head.round
        # rounds of which it has not said, or not written, that it has them
        unsaid = int(max(own.options.heartbeat_s, 2 * own.write_s(peer)) / usual) if usual else 0
        return 0 <= behind <= BEHIND + unsaid and view.behind_s <= max(usual, own.options.silence_s)
