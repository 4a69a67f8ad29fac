"""Whether others can dial this island, and through whom it is reached where they cannot."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from diloco.comm.transport.relay import Relay
from diloco.comm.transport.transport import PeerAddress

LOOK_S = 1.0
ASK_UP_TO, ASK_AGAIN_S = 3, 300.0  # members, whether they can dial this island; and again after so long
TRY_S, IN_VAIN = 60.0, 2  # between tries of this island's relay, and how many of them in a row make it look for another

log = logging.getLogger(__name__)


class Reachability:
    """Keep an island reachable: ask others whether they can dial it; if some cannot, be reached through one of them.

    A relay may hold the connection and pass nothing on. So the island dials itself through it now and then.
    """

    def __init__(
        self, relay: Relay, addresses: Callable[[], Mapping[str, PeerAddress]], name_of: Callable[[str], str],
        changed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._relay, self._addresses, self._name_of, self._changed = relay, addresses, name_of, changed
        self._try_at, self._in_vain = 0.0, 0

    def watch(self, stop: threading.Event) -> None:
        """Look after it until `stop` is set: what a thread of its own does."""
        wait_s = 0.0
        while not stop.wait(wait_s):
            try:
                wait_s = self.look(time.monotonic())
            except Exception:  # a thread's outermost frame: without it, nobody would find this island again
                log.exception("finding out who can dial this island failed")
                wait_s = ASK_AGAIN_S

    def look(self, now: float) -> float:
        """Look once, and return in how many seconds to look again."""
        addresses = self._addresses()
        public = {peer: address for peer, address in addresses.items() if not address.relay}
        if (relay := addresses.get(self._relay.relay)) is not None:
            self._try(relay, public, now)
            return LOOK_S
        answers = [self._relay.can_be_dialled(public[peer]) for peer in sorted(public, key=hash)[:ASK_UP_TO]]
        if False not in answers:
            return ASK_AGAIN_S if True in answers else LOOK_S
        if through := self._be_served(public, now):
            self._changed(f"others cannot dial this island: it is reached through {self._name_of(through)}")
        else:
            self._changed(
                "others cannot dial this island: forward its ports (--port), or ask a member that can be dialled to "
                "relay (--relay)"
            )
        return LOOK_S

    def _try(self, relay: PeerAddress, public: Mapping[str, PeerAddress], now: float) -> None:
        if now < self._try_at:
            return
        self._try_at = now + TRY_S
        self._in_vain = 0 if self._relay.passes_on(relay) else self._in_vain + 1
        if self._in_vain < IN_VAIN:
            return
        others = {peer: address for peer, address in public.items() if peer != relay.identity}
        if through := self._be_served(others, now):
            name = self._name_of(relay.identity)
            self._changed(f"{name} passes nothing on: this island is reached through {self._name_of(through)}")

    def _be_served(self, public: Mapping[str, PeerAddress], now: float) -> str:
        """Return who relays from now on; "" where nobody else does."""
        self._try_at, self._in_vain = now + TRY_S, 0
        return next((peer for peer, address in public.items() if self._relay.be_served_by(address)), "")
