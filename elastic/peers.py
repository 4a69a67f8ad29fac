"""Who is alive, as far as one island can tell. Silence is weak evidence, a closed and refused connection is quick."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco.elastic.record import NO_BALLOT, Ballot, Head

MINORITY_PATIENCE = 3  # times silence_s, before silence of a majority is believed


@dataclass
class PeerView:
    heard_at: float
    head: Head | None = None
    behind_since: float | None = None  # its head is less than ours
    promise: Ballot = NO_BALLOT
    leading: bool = False
    incarnation: int = -1
    state_digest: str = ""
    closed: bool = False  # its connection broke and it is not to be reached
    left: bool = False  # it said goodbye, or was said to be lost
    banned_until: float = 0.0
    fetch_at: float = 0.0  # its state could not be fetched: not before then again
    fetches_failed: int = 0  # since one succeeded
    misfits: int = 0  # messages that belong to other rounds or ballots, since `misfits_since`
    misfits_since: float = 0.0


@dataclass
class Peers:
    silence_s: float
    views: dict[str, PeerView] = field(default_factory=dict)

    def know(self, peers: Iterable[str], now: float) -> None:
        for peer in sorted(peers):
            self.view(peer, now)

    def view(self, peer: str, now: float) -> PeerView:
        view = self.views.get(peer)
        if view is None:
            view = self.views[peer] = PeerView(now)
        return view

    def hear(self, peer: str, now: float) -> None:
        view = self.view(peer, now)
        view.heard_at, view.closed, view.left = now, False, False

    def reset(self, now: float) -> None:
        """This island slept: nobody else's silence means anything."""
        for view in self.views.values():
            view.heard_at = max(view.heard_at, now)

    def banned(self, peer: str, now: float) -> bool:
        return peer in self.views and now < self.views[peer].banned_until

    def alive(self, now: float, roster: tuple[str, ...]) -> set[str]:
        """For any thread: all else here is for the one that changes it."""
        return {peer for peer in list(self.views) if self.is_alive(peer, now, roster)}

    def is_alive(self, peer: str, now: float, roster: tuple[str, ...]) -> bool:
        view = self.views.get(peer)
        if view is None or view.closed or now < view.banned_until:
            return False
        silent_s = now - view.heard_at
        if silent_s <= self.silence_s:
            return True
        return silent_s <= MINORITY_PATIENCE * self.silence_s and self._majority_is_silent(now, roster)

    def heard_lately(self, peer: str, now: float) -> bool:
        return now - self.views[peer].heard_at <= self.silence_s

    def _majority_is_silent(self, now: float, roster: tuple[str, ...]) -> bool:
        """Then perhaps it is this island that is cut off."""
        views = [self.views[peer] for peer in roster if peer in self.views]
        silent = sum(not view.closed and now - view.heard_at > self.silence_s for view in views)
        return 2 * silent > len(roster)
