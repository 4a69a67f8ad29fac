"""Going back: a latch makes records void that this island has, and perhaps nobody else has what was before them.

Of three islands that were cut apart, the one that has signed the latch may be gone for good. The others go back to the
last record of their own logs that is in the history, and decide what follows it together.
"""

from collections.abc import Callable
from itertools import takewhile

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.protocol_state import KEPT_VOWS, ProtocolState
from diloco.elastic.protocol.state import RunState


class Undoing:
    """Undo the records of this island that a latch makes void."""

    def __init__(self, own: ProtocolState, move: Callable[[RunState, float], None]) -> None:
        self.own, self._move = own, move

    def start_if_void(self) -> None:
        """Ask for the last state that is in a history, if this island has records after it."""
        own = self.own
        if own.latch is None or own.is_latched or own.going_back or not own.rules.void_records_are_undone:
            return
        target = own.last_valid
        if target is not None and target != own.out_of_reach and self._knows_its_vow(target):
            own.going_back = target
            own.effects.append(msg.GoBack(target))

    def _knows_its_vow(self, digest: str) -> bool:
        """Return whether this island knows what it has promised and holds for what follows a record.

        Of very many vows some were dropped: there it cannot vote again, and waits.
        """
        vows = self.own.vows
        return len(vows) < KEPT_VOWS or any(head.digest == digest for head in vows)

    def is_wanted(self, digest: str) -> bool:
        """Return whether this island still has to go back to this record: it may have moved meanwhile."""
        return not self.own.is_latched and digest == self.own.going_back == self.own.last_valid

    def went_back(self, state: RunState, now: float) -> None:
        """Move to the last state that is in a history. What this island has trained since is owed again."""
        own, digest = self.own, state.head.digest
        if self.is_wanted(digest):
            number, before = state.head.round, own.lineage
            own.note("went back", own.me, f"to round {number}: what came after it had no quorum, and comes late")
            self._move(state, now)
            own.lineage = dict(takewhile(lambda each: each[0] != digest, before.items())) | {digest: True}
        own.going_back = ""

    def cannot_go_back(self, digest: str) -> None:
        """Take in that this island's disk does not reach back to a record: it waits for one that has it."""
        own = self.own
        own.out_of_reach, own.going_back = digest, ""
        own.note("waiting", own.me, "its last rounds had no quorum, and its log does not reach back to one that had")
