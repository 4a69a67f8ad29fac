"""Which peers are alive, as far as one island can tell. Silence is weak evidence, a refused connection a quick sign."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diloco.elastic.protocol.record import NO_BALLOT, Ballot, Head

MINORITY_PATIENCE = 3  # times silence_s, before silence of a majority is believed


@dataclass
class PeerView:
    """Hold what this island knows of one peer, from its messages and from what has failed with it."""

    heard_at: float
    heard: bool = False  # in this life of ours, rather than only known of
    heard_since: float = 0.0  # without a silence
    head: Head | None = None
    behind_since: float | None = None  # its head is less than ours
    caught_up_in_s: float = 0.0  # the last time that it was
    promise: Ballot = NO_BALLOT
    leading: bool = False
    running: bool = False
    incarnation: int = -1
    sequence: int = -1  # of its last heartbeat
    hears: frozenset[str] = frozenset()
    linked: frozenset[str] = frozenset()
    linked_at: str = ""  # the head that both were at when it last said so
    follows: str = ""
    behind_s: float = 0.0  # until it will have caught up, as it said
    write_s: float = 0.0  # what its disk takes, as it said
    in_vain: bool = False  # it was waited for, and gave no answer: what it says of its disk is not believed
    rank: int = 0  # of its chain
    said_goodbye: bool = False
    state_digest: str = ""
    closed: bool = False  # its connection broke and it is not to be reached
    left: bool = False  # it said goodbye, or was said to be lost
    banned_until: float = 0.0
    fetch_at: float = 0.0  # its state could not be fetched: not before then again
    fetches_failed: int = 0  # since one succeeded
    misfits: int = 0  # messages that belong to other rounds or ballots, since `misfits_since`
    misfits_since: float = 0.0


@dataclass(frozen=True)
class LivenessReport:
    """Hold what a peer that hears everybody reports: when, and which places of the roster it misses."""

    at: float
    missed: frozenset[int]
    places: dict[str, int]

    def hears(self, peer: str) -> bool:
        """Return whether the reporter hears a peer; False for one that is not in the roster."""
        return peer in self.places and self.places[peer] not in self.missed


@dataclass
class Peers:
    """Judge which peers are alive, by silence, closed connections and the reports of others."""

    silence_s: float
    views: dict[str, PeerView] = field(default_factory=dict)
    reports: dict[str, LivenessReport] = field(default_factory=dict)  # of the front, where they are accepted

    def know(self, peers: Iterable[str], now: float) -> None:
        """Add peers that are not known yet, as if they had been heard just now."""
        for peer in sorted(peers):
            self.view(peer, now)

    def view(self, peer: str, now: float) -> PeerView:
        """Return what is known of a peer; a new one counts as heard just now."""
        return self.views.setdefault(peer, PeerView(now))

    def hear(self, peer: str, now: float) -> None:
        """Note a sign of life of a peer: it is neither closed nor gone any more."""
        view = self.view(peer, now)
        if not self.hears(peer, now):
            view.heard_since = now
        view.heard_at, view.heard, view.closed, view.left, view.said_goodbye = now, True, False, False, False

    def reset(self, now: float) -> None:
        """Forget everybody's silence: this island slept, and could hear nobody."""
        for view in self.views.values():
            view.heard_at = max(view.heard_at, now)

    def judge_alone(self, now: float, but: Collection[str]) -> None:
        """Drop all reports, because this island now hears everybody itself.

        Peers that the reports called alive, other than those in `but`, are given time to speak to this island.
        """
        reports, self.reports = self.reports, {}
        for peer, view in self.views.items():
            if peer not in but and any(report.hears(peer) for report in reports.values()):
                view.heard_at = max(view.heard_at, now)

    def accept_report(self, sender: str, said: LivenessReport) -> None:
        """Store a peer's report, and drop reports that are more than `silence_s` older than it."""
        self.reports[sender] = said
        if any(said.at - report.at > self.silence_s for report in self.reports.values()):
            self.reports = {peer: one for peer, one in self.reports.items() if said.at - one.at <= self.silence_s}

    def banned(self, peer: str, now: float) -> bool:
        """Return whether a peer is excluded at this time, so that its messages are ignored. Any thread may ask."""
        view = self.views.get(peer)
        return view is not None and now < view.banned_until

    def alive(self, now: float, roster: tuple[str, ...]) -> set[str]:
        """Return who is thought alive. Any thread may call it; all else here is for the thread that changes it."""
        return {peer for peer in list(self.views) if self.is_alive(peer, now, roster)}

    def is_alive(self, peer: str, now: float, roster: tuple[str, ...]) -> bool:
        """Return whether a peer is thought alive: it is neither closed nor banned, and not silent for too long.

        A peer outside the roster of which only the directory knows is not.

        Silence does not count against a peer that a fresh report has heard. It takes three times as long while most of
        the roster is silent.
        """
        view = self.views.get(peer)
        if view is None or view.closed or now < view.banned_until or not (view.heard or peer in roster):
            return False
        silent_s = now - view.heard_at
        if silent_s <= self.silence_s:
            return True
        if any(now - one.at <= self.silence_s and one.hears(peer) for one in self.reports.values()):
            return True
        return silent_s <= MINORITY_PATIENCE * self.silence_s and self._majority_is_silent(now, roster)

    def heard_lately(self, peer: str, now: float) -> bool:
        """Return whether this island itself has heard a peer within `silence_s`; reports do not count."""
        return now - self.views[peer].heard_at <= self.silence_s

    def hears(self, peer: str, now: float) -> bool:
        """Return whether a peer's own messages come in here: it is neither closed, banned nor silent."""
        view = self.views.get(peer)
        if view is None or not view.heard or view.closed or now < view.banned_until:
            return False
        return now - view.heard_at <= self.silence_s

    def _majority_is_silent(self, now: float, roster: tuple[str, ...]) -> bool:
        """Return whether more than half of the roster is silent: then perhaps this island is cut off.

        A fresh report that misses less than half says otherwise.
        """
        fresh = (report for report in self.reports.values() if now - report.at <= self.silence_s)
        if any(2 * len(report.missed) < len(roster) for report in fresh):
            return False
        views = [self.views[peer] for peer in roster if peer in self.views]
        silent = sum(not view.closed and now - view.heard_at > self.silence_s for view in views)
        return 2 * silent > len(roster)
