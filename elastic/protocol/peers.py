"""Who is alive, as far as one island can tell. Silence is weak evidence, a closed and refused connection is quick."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diloco.elastic.protocol.record import NO_BALLOT, Ballot, Head

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


@dataclass(frozen=True)
class Word:
    """Of somebody who hears everybody but for some."""

    at: float
    missed: frozenset[int]
    places: dict[str, int]

    def vouches_for(self, peer: str) -> bool:
        return peer in self.places and self.places[peer] not in self.missed


@dataclass
class Peers:
    silence_s: float
    views: dict[str, PeerView] = field(default_factory=dict)
    words: dict[str, Word] = field(default_factory=dict)  # of the front, where that is believed
    expected: dict[str, float] = field(default_factory=dict)  # until when those count as alive who are to come back

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
        self.expected.pop(peer, None)

    def expect(self, peers: Iterable[str], until: float) -> None:
        """All have been stopped, and start again: silence of those who are slower says nothing."""
        self.expected = dict.fromkeys(peers, until)

    def reset(self, now: float) -> None:
        """This island slept: nobody else's silence means anything."""
        for view in self.views.values():
            view.heard_at = max(view.heard_at, now)

    def judge_alone(self, now: float, but: Collection[str]) -> None:
        """Nobody's word counts any more. Those whom it vouched for are given time to speak to this island."""
        words, self.words = self.words, {}
        for peer, view in self.views.items():
            if peer not in but and any(word.vouches_for(peer) for word in words.values()):
                view.heard_at = max(view.heard_at, now)

    def believe(self, teller: str, said: Word) -> None:
        self.words[teller] = said
        if any(said.at - word.at > self.silence_s for word in self.words.values()):
            self.words = {peer: word for peer, word in self.words.items() if said.at - word.at <= self.silence_s}

    def _told(self, peer: str, now: float) -> bool:
        return any(now - word.at <= self.silence_s and word.vouches_for(peer) for word in self.words.values())

    def banned(self, peer: str, now: float) -> bool:
        view = self.views.get(peer)
        return view is not None and now < view.banned_until

    def alive(self, now: float, roster: tuple[str, ...]) -> set[str]:
        """For any thread: all else here is for the one that changes it."""
        return {peer for peer in list(self.views) if self.is_alive(peer, now, roster)}

    def is_alive(self, peer: str, now: float, roster: tuple[str, ...]) -> bool:
        view = self.views.get(peer)
        if view is None or view.closed or now < view.banned_until:
            return False
        silent_s = now - view.heard_at
        if silent_s <= self.silence_s or self._told(peer, now) or now <= self.expected.get(peer, 0.0):
            return True
        return silent_s <= MINORITY_PATIENCE * self.silence_s and self._majority_is_silent(now, roster)

    def heard_lately(self, peer: str, now: float) -> bool:
        return now - self.views[peer].heard_at <= self.silence_s

    def _majority_is_silent(self, now: float, roster: tuple[str, ...]) -> bool:
        """Then perhaps it is this island that is cut off."""
        if any(now - word.at <= self.silence_s and 2 * len(word.missed) < len(roster) for word in self.words.values()):
            return False
        views = [self.views[peer] for peer in roster if peer in self.views]
        silent = sum(not view.closed and now - view.heard_at > self.silence_s for view in views)
        return 2 * silent > len(roster)
