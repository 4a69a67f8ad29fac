"""Who leads. Every island follows the best placed of those that it hears and that hear it, and promises to nobody else.

The first of the roster is not always the one to lead: with a link of its cut, it would forever be taken over, or decide
alone. Two islands are *linked* when each hears the other, which heartbeats tell.
"""

import hashlib

from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.protocol_state import ProtocolState
from diloco.elastic.protocol.record import quorum

STUCK_SILENCES, STUCK_EXCHANGES, STUCK_WRITES = 6, 3, 6  # without a byte that moves, until anybody may lead
SPREAD = 4  # times silence_s: over which islands then begin


class Leading:
    """Judge whom this island follows, and whether it may lead."""

    def __init__(self, own: ProtocolState, liveness: Liveness) -> None:
        self.own, self.liveness = own, liveness
        self._quorum_at: float | None = None  # since when a quorum has been linked; None: it is not

    def look(self, now: float) -> None:
        """Note since when this island, or one that it could follow, has been linked with a quorum, or needs none."""
        own = self.own
        free = not own.needs_quorum or not self.liveness.are_few() or bool(own.state.kept(own.next_amendment))
        if not free and not any(self._is_quorum(self.links(peer, now)) for peer in (own.me, *self.linked(now))):
            self._quorum_at = None
        elif self._quorum_at is None:
            self._quorum_at = now

    def links(self, peer: str, now: float) -> frozenset[str]:
        """Return with whom of the roster an island is linked, itself included, as far as is known here."""
        own = self.own
        if peer != own.me:
            return (own.peers.views[peer].linked | {peer}) & own.state.places.keys()
        return frozenset(one for one in own.state.roster if one == peer or self.is_linked(one, now))

    def is_linked(self, peer: str, now: float) -> bool:
        """Return whether this island and a peer hear each other."""
        return self.liveness.hear_each_other(peer, now)

    def linked(self, now: float) -> list[str]:
        """Return the other members of the roster that are linked and at this island's head, in its order."""
        own, views = self.own, self.own.peers.views
        at_head = (peer for peer in own.state.roster if peer in views and views[peer].head == own.state.head)
        return [peer for peer in at_head if peer != own.me and self.is_linked(peer, now)]

    def coordinator(self, now: float) -> str:
        """Return whom this island follows; empty if nobody may lead.

        That is the coordinator of the attempt under way while the two are linked; else, of those linked, the one that
        is linked with a quorum, with most, and comes first in the roster.
        """
        own = self.own
        if not self.liveness.are_few() or not own.rules.follow_the_linked:
            return self.liveness.coordinator(now)
        if (running := self._running(now)) is not None:
            return running
        places, others = own.state.places, self.linked(now)
        hidden = own.rules.only_durable_is_told and not own.is_stored  # nobody knows that it is at this head
        candidates = others if own.leaving or hidden or own.me not in places else [own.me, *others]
        if not candidates:
            return self._orphan(now)
        links = {peer: self.links(peer, now) for peer in candidates}
        return max(candidates, key=lambda peer: (self._is_quorum(links[peer]), len(links[peer]), -places[peer]))

    def _running(self, now: float) -> str | None:
        """Return the coordinator whose attempt is under way, while it should be followed.

        It is the one that this island has promised to, whether it takes part in the attempt or not.
        """
        current, own = self.own.current, self.own
        if own.term is not None and own.term.begin is not None:
            return own.me
        coordinator = own.promise.coordinator
        if coordinator == own.me or (view := own.peers.views.get(coordinator)) is None:
            return None
        takes_part = current is not None and current.sender == coordinator and current.failed is None and view.leading
        if not takes_part and not (view.running and view.head == own.state.head):
            return None
        linked = self.is_linked(coordinator, now)
        return coordinator if linked and self._is_quorum(self.links(coordinator, now)) else None

    def _is_quorum(self, islands: frozenset[str]) -> bool:
        return not self.own.needs_quorum or quorum(self.own.state.roster, islands)

    def _orphan(self, now: float) -> str:
        """Return the lowest of all known islands if no member of the roster is left, with `merge` only."""
        own = self.own
        if own.needs_quorum or not own.rules.anybody_may_lead:
            return ""
        if any(self.liveness.is_alive(peer, now) for peer in own.state.roster if peer != own.me):
            return ""
        peers = (peer for peer in own.peers.views if own.peers.hears(peer, now))
        return min((own.me, *peers)) if not own.leaving else ""

    def may_promise(self, peer: str, now: float) -> bool:
        """Return whether this island may promise to a peer: it follows it, or no round has come about for long."""
        limited = self.own.rules.follow_the_linked and self.liveness.are_few() and peer != self.own.me
        return not limited or self.coordinator(now) == peer or self.is_stuck(now) or self._is_left_alone(now)

    def may_lead(self, now: float) -> bool:
        """Return whether this island is to lead: it follows itself, as do at least half of those linked."""
        own = self.own
        if self.is_stuck(now):
            spread = hashlib.sha256(f"{own.me}/{own.highest_term}".encode()).digest()[0] / 256
            since = max(self._stuck_at(), own.promised_at + own.answer_s(own.promise.coordinator))
            may = own.me in own.state.places or not own.state.roster or self._orphan(now) == own.me
            return may and now >= since + spread * SPREAD * own.options.silence_s
        if self.coordinator(now) != own.me:
            return False
        if not self.liveness.are_few() or not own.rules.follow_the_linked:
            return True
        if any(self._is_unsure(peer, now) for peer in own.state.roster):
            return False
        others = self.linked(now)
        return 2 * sum(own.peers.views[peer].follows == own.me for peer in others) >= len(others)

    def _is_unsure(self, peer: str, now: float) -> bool:
        """Return whether it will soon be known if a peer is there and hears this island, or not."""
        own = self.own
        if peer not in own.peers.views or not self.liveness.is_alive(peer, now):
            return False
        view = own.peers.views[peer]
        recent = now - view.heard_since <= own.options.silence_s
        moved_lately = now - max(own.commit_at) <= own.options.silence_s
        if moved_lately and view.head == own.state.head and view.linked_at != own.state.head.digest:
            return True  # whom it hears it has said only while this island was elsewhere
        return not view.heard or (recent and not self.is_linked(peer, now))

    def is_stuck(self, now: float) -> bool:
        """Return whether this island has waited so long for a round, without a byte, that anybody may lead."""
        return self.own.rules.follow_the_linked and self.own.ready_at is not None and now > self._stuck_at()

    def _is_left_alone(self, now: float) -> bool:
        """Return whether this island has seen no byte for so long, with nothing to offer, and whom it follows is idle.

        It may need samples, which only a round brings. While its coordinator leads, others may still be training.
        """
        own = self.own
        if own.ready_at is not None or own.term is not None or now <= self._stuck_at():
            return False
        view = own.peers.views.get(self.coordinator(now))
        return view is None or not view.leading

    def was_stuck_since(self, started_at: float, now: float) -> bool:
        """Return whether a term that began at this time has seen no byte for so long."""
        return started_at < self._stuck_at() < now

    def _stuck_at(self) -> float:
        """Return when a wait is too long: by the last byte, what exchanges take, and what a phase has taken here.

        While no quorum was there, nothing could move.
        """
        own = self.own
        ready_at = own.ready_at or 0.0
        phase_s = ready_at - max(own.commit_at)
        quorum_at = own.now if self._quorum_at is None else self._quorum_at
        waiting_since = max(own.moved_at, ready_at + max(0.0, phase_s), quorum_at)
        write_s = max(map(own.write_s, (own.me, *own.state.roster)))
        silences_s = STUCK_SILENCES * own.options.silence_s
        return waiting_since + silences_s + STUCK_EXCHANGES * own.exchange_s + STUCK_WRITES * write_s
