"""Whom an island lets in: into the directory, and to its streams.

An admission is good for ever (`admission.py`); whether its invite was revoked, used up or has expired changes. An
invite for n islands has n places for those who are no members yet; one that goes without becoming one leaves its place
after a minute.
"""

import logging
import time
from collections.abc import Callable

from diloco.comm.peers.admission import Admission, Right, check_admission
from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.peers.record import PeerRecord
from diloco.elastic.protocol.state import RunState

PLACE_S = 60.0  # for which one that is no member keeps its place after it was let in last
TAKEN_OUT = "the run's owner has taken it out"  # islands of one version say so to each other
MAX_REFUSED = 1000  # of whom it is remembered
MEMBERS = (Right.CONTRIBUTE, Right.WITNESS)

log = logging.getLogger(__name__)


class Gate:
    """Say who may come in, by what is committed and by who came before."""

    def __init__(self, state: Callable[[], RunState | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._let_in: dict[str, tuple[bytes, float]] = {}  # by this process: by which invite, and when last
        self._refused: dict[str, str] = {}  # and why: told once

    def objection(self, peer: str, admission: Admission) -> str:
        """Return why a peer is kept out, though its admission is good; "" if it is let in.

        A ticket has to be valid when an island joins, not whenever a connection breaks: runs outlast tickets.
        """
        state, invite = self._state(), admission.invite
        if state is not None:
            if peer in state.evicted:
                return TAKEN_OUT
            if peer in state.invites:
                return ""
            if invite.key.hex() in state.revoked:
                return "its ticket was revoked"
            witness = invite.right == Right.WITNESS
            if invite.right in MEMBERS and (reason := state.objection(peer, admission.pack().hex(), witness=witness)):
                return reason
        if peer not in self._let_in and RUN_CLOCK.now() >= invite.expires_at:
            return "its ticket has expired"
        if invite.right not in MEMBERS:  # whoever only looks takes nobody's place
            return ""
        if peer not in self._let_in and self._taken(invite.key, state) >= invite.islands:
            return "the places of its ticket are taken by others that came within the last minute"
        self._let_in[peer] = invite.key, self._clock()
        return ""

    def _taken(self, invite: bytes, state: RunState | None) -> int:
        """Count the places of an invite that islands have which are no members yet; old ones are forgotten."""
        known, now = state.invites if state is not None else {}, self._clock()
        gone = [peer for peer, (_, at) in list(self._let_in.items()) if now - at > PLACE_S]
        for peer in gone:
            self._let_in.pop(peer, None)
        return sum(by == invite and peer not in known for peer, (by, _) in list(self._let_in.items()))

    def may_speak(self, peer: str, record: PeerRecord) -> bool:
        """Return whether a peer may open streams: it is let in now, and not only to look."""
        admission = check_admission(record.admission, record.run_id, record.public_key)
        if not (reason := self.objection(peer, admission)):
            self._refused.pop(peer, None)
            return admission.invite.right in MEMBERS
        self._let_in.pop(peer, None)
        if self._refused.get(peer) != reason:
            self._refused[peer] = reason
            if len(self._refused) > MAX_REFUSED:  # a ticket can make any number of keys
                del self._refused[next(iter(self._refused))]
            log.warning("%s is kept out: %s", record.name, reason)
        return False

    def may_watch(self, peer: str, record: PeerRecord) -> bool:
        """Return whether a peer may ask for this island's status, and for nothing else."""
        admission = check_admission(record.admission, record.run_id, record.public_key)
        return admission.invite.right == Right.WATCH and not self.objection(peer, admission)

    def knows(self, peer: str) -> bool:
        """Tell whether a peer was ever a member: it may connect when its record has long expired."""
        state = self._state()
        return state is not None and peer in state.invites

    def is_revoked(self, admission: Admission) -> bool:
        """Return whether the owner has revoked the invite behind an admission."""
        state = self._state()
        return state is not None and admission.invite.key.hex() in state.revoked

    @property
    def kept_out(self) -> set[str]:
        """Return whose streams are to be closed."""
        state = self._state()
        return {*self._refused, *(state.evicted if state is not None else ())}
