"""Whom an island waits for where a quorum decides and too few are there: said once a minute, with the way out."""

from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.protocol_state import ProtocolState
from diloco.elastic.protocol.record import quorum

SILENCES = 3  # times silence_s without a quorum, before anything is said
SAY_EVERY_S = 60.0


class Waiting:
    """Report whom this island waits for, while those whom it hears are no quorum of the roster."""

    def __init__(self, own: ProtocolState, liveness: Liveness) -> None:
        self.own, self.liveness = own, liveness
        self._look_at = 0.0
        self._since: float | None = None
        self._said_at: float | None = None

    def tick(self, now: float) -> None:
        """Look who is there, now and then, and say who is missing if that has lasted.

        Of many, those who hear everybody do that.
        """
        if now < self._look_at or not self.liveness.broadcasts:
            return
        own, roster = self.own, self.own.state.roster
        self._look_at = now + own.options.heartbeat_s
        present = [peer for peer in roster if peer == own.me or own.peers.hears(peer, now)]
        if not own.needs_quorum or own.me not in roster or quorum(roster, present):
            self._since = self._said_at = None
            return
        if self._since is None:
            self._since = now
        if now - self._since < SILENCES * own.options.silence_s:
            return
        if self._said_at is None or now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            missing = ", ".join(peer for peer in roster if peer not in present)
            own.note(
                "waiting", own.me,
                f"for {missing}: {len(present)} of {len(roster)} members are here, that is no quorum, and nothing is "
                f"committed; the owner can continue without them: `diloco force-roster RUN --keep {','.join(present)}`",
            )  # fmt: skip
