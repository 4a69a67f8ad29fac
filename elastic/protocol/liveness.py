"""Signs of life: to whom an island sends heartbeats, and which peers it thinks alive.

A few islands all send heartbeats to each other. Among many that would be n² messages every time. There, the first of
the roster (the *front*; its first leads) hear everybody, speak to everybody and report whom they miss. The rest speak
to the front only and accept its reports about the others. Whoever belongs to the front, leads, or has lost the front
*broadcasts*: it speaks to all and accepts no reports, so that nobody is waited for whom only others can reach.
"""

from dataclasses import replace
from itertools import islice

from diloco.elastic.protocol.messages import Heartbeat
from diloco.elastic.protocol.peers import LivenessReport
from diloco.elastic.protocol.protocol_state import ProtocolState

FRONT = 4
FRESH_HEARTBEATS = 2  # whoever was not heard for so many is reported as missed


class Liveness:
    """Send this island's heartbeats, and judge which peers are alive and who should lead."""

    def __init__(self, own: ProtocolState, now: float) -> None:
        self.own = own
        self.broadcasts = True
        self._beat_at = now
        self._news = 0, ""  # when it last looked: how many are heard, and whom it follows

    def alive(self, now: float) -> set[str]:
        """Return the peers thought alive, judged by silence, closed connections and reports of the front."""
        return self.own.peers.alive(now, self.own.state.roster) - self.own.state.evicted

    def is_alive(self, peer: str, now: float) -> bool:
        """Return whether one peer is thought alive, by the rules of `Peers.is_alive`."""
        return peer not in self.own.state.evicted and self.own.peers.is_alive(peer, now, self.own.state.roster)

    def are_few(self) -> bool:
        """Return whether all islands exchange heartbeats: at most `flat_up_to` are known, this one included."""
        return len(self.own.peers.views) < self.own.options.flat_up_to

    def voters(self) -> int:
        """Return of how many islands a majority is needed: the roster, or the front where only that is heard."""
        return len(self.own.state.roster) if self.broadcasts else FRONT

    def coordinator(self, now: float) -> str:
        """Return the first of the roster that is not suspected; empty if nobody may lead.

        Where no member of the roster is left, it is the lowest of all known islands, with `partition: merge` only.
        """
        for peer in self.own.state.roster:
            if self._could_lead(peer, now):
                return peer
        orphaned = self.own.options.partition == "merge" and self.own.rules.anybody_may_lead
        others = (self.own.me, *self.own.peers.views) if orphaned else ()
        return min((peer for peer in others if self._could_lead(peer, now)), default="")

    def _could_lead(self, peer: str, now: float) -> bool:
        """Return whether a peer is alive and has not been behind for long.

        One that is behind cannot lead the round that follows our head.
        """
        if peer == self.own.me:
            return not self.own.leaving
        if not self.is_alive(peer, now):
            return False
        since = self.own.peers.views[peer].behind_since
        return since is None or now - since <= 2 * self.own.options.heartbeat_s

    def tick(self, now: float) -> None:
        """Send a heartbeat if `heartbeat_s` seconds have passed since the last one, or if there is news.

        News are a peer that was not heard before, and another island to follow.
        """
        heard = sum(self.own.peers.hears(peer, now) for peer in self.own.state.roster) if self.are_few() else 0
        news, self._news = (heard, self.own.follows) != self._news, (heard, self.own.follows)
        if now >= self._beat_at or news:
            self._beat_at = now + self.own.options.heartbeat_s
            self.beat(now)

    def beat(self, now: float) -> None:
        """Send a heartbeat now, after deciding anew whether it goes to all islands or to the front only."""
        roster = self.own.state.roster
        front = list(islice((peer for peer in roster if peer == self.own.me or self.is_alive(peer, now)), FRONT))
        before, self.broadcasts = self.broadcasts, self._must_broadcast(front, now)
        if self.broadcasts and not before:
            self.own.peers.judge_alone(now, but=front)  # whom it should have heard before
        behind_s = max(0.0, self.own.caught_up_at - now) if self.own.catching_up else 0.0
        heard = self._heard(now) if self.are_few() else ()
        roster = self.own.state.roster
        linked = tuple(place for place in heard if self.hear_each_other(roster[place], now))
        beat = self.own.heartbeat(heard if self.are_few() else None, linked, behind_s)
        self.own.moved = False
        if self.broadcasts:
            self.own.send_all(beat if self.are_few() else replace(beat, missed=self._missed(now)))
        else:
            # also to who seems lost, for it may hear, and to whoever has just begun to broadcast
            for peer in dict.fromkeys((*front, *roster[:FRONT], *self.own.peers.reports)):
                self.own.send(peer, beat)

    def _must_broadcast(self, front: list[str], now: float) -> bool:
        """Return whether to send heartbeats to all islands, rather than to the front only.

        That is so among few, in the front, for a coordinator, and where the front is no help: it is not heard, or
        nothing can be fetched from it.
        """
        if self.are_few() or self.own.me in front or self.own.term is not None:
            return True
        views = [self.own.peers.views[peer] for peer in front]
        heard = any(now - view.heard_at <= self.own.options.silence_s for view in views)
        return not heard or any(view.fetches_failed for view in views)

    def hear_each_other(self, peer: str, now: float) -> bool:
        """Return whether this island and a peer hear each other. Nobody tells whether it hears a newcomer."""
        own = self.own
        if not own.peers.hears(peer, now):
            return False
        return own.me in own.peers.views[peer].hears or own.me not in own.state.places

    def _heard(self, now: float) -> tuple[int, ...]:
        """Return the places in the roster of the members that are heard here."""
        peers, places = self.own.peers, self.own.state.places
        return tuple(place for peer, place in places.items() if peers.hears(peer, now))

    def _missed(self, now: float) -> tuple[int, ...]:
        """Return the places in the roster of members that were not heard within the last two heartbeats."""
        state, views = self.own.state, self.own.peers.views
        since = now - FRESH_HEARTBEATS * self.own.options.heartbeat_s
        heard = {peer for peer in state.roster if peer in views and views[peer].heard_at >= since} | {self.own.me}
        return tuple(place for peer, place in state.places.items() if peer not in heard)

    def hear(self, sender: str, beat: Heartbeat, now: float) -> None:
        """Accept the report of a peer that broadcasts, and answer one that is behind: nobody else would.

        An island that broadcasts itself does neither.
        """
        if self.broadcasts:
            return
        if beat.head < self.own.state.head:
            self.own.send(sender, self.own.heartbeat())
        elif beat.missed is not None and beat.head == self.own.state.head:
            report = LivenessReport(now, frozenset(beat.missed), self.own.state.places)
            self.own.peers.accept_report(sender, report)
