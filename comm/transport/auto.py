"""Direct where possible, through a relay or libp2p where not: chosen peer by peer, and remembered for a while.

Only a peer that cannot be reached is tried the other way. A refusal is an answer, whichever way it came.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.relay import Relay
from diloco.comm.transport.transport import Accepting, PeerAddress, Stream
from diloco.comm.transport.wire import deadline_in, seconds_to
from diloco.errors import PeerLost, TransportTimeout

FIRST_SHARE = 0.4  # of the time given, for the way that is tried first
MAX_DIRECT_S = 5.0  # a direct connection takes three round trips: what takes longer is a black hole
RETRY_DIRECT_S = 300.0

log = logging.getLogger(__name__)

Way = DirectTransport | Libp2pTransport | Relay


@dataclass(frozen=True)
class Route:
    """Record how a peer was reached, and since when."""

    peer: PeerAddress
    way: Way
    since: float


class AutoTransport(Accepting):
    """Connect directly where possible, and through libp2p where not.

    Both transports share one inbox. What they hold besides is theirs; closing this closes both.
    """

    def __init__(
        self, direct: DirectTransport, libp2p: Libp2pTransport, relay: Relay | None = None, *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        assert direct.inbox is libp2p.inbox and direct.identity == libp2p.identity
        super().__init__(direct.identity, direct.inbox)
        self.direct, self.libp2p, self.relay = direct, libp2p, relay
        self._clock = clock
        self._choices: dict[str, Route] = {}
        self._lock = threading.Lock()

    def address(self, host: str) -> PeerAddress:
        """Return what this peer publishes; `host` is how others see this machine."""
        return replace(self.direct.address(host), control=self.libp2p.address().control)

    def allow(self, peers: Iterable[PeerAddress]) -> None:
        """Let exactly these peers connect from now on.

        Those without host and certificate can do so through libp2p only.
        """
        peers = list(peers)
        self.direct.allow([peer for peer in peers if _has_direct(peer)])
        if self.relay is not None:
            self.relay.know({peer.identity: peer for peer in peers})
        self.libp2p.allow(peers)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a stream directly or through libp2p: the second way only if the peer cannot be reached on the first.

        A refusal is raised at once.
        """
        *others, last = self._ways(peer)
        deadline = deadline_in(timeout_s)
        reasons = []
        for way in others:
            first_s = FIRST_SHARE * timeout_s
            try:
                return self._connect(way, peer, channel, min(first_s, MAX_DIRECT_S) if way is self.direct else first_s)
            except (PeerLost, TransportTimeout) as error:
                reasons.append(str(error))
        try:
            return self._connect(last, peer, channel, seconds_to(deadline) or 0.0)
        except PeerLost as error:
            raise PeerLost("; ".join([str(error), *reasons])) from None

    def _ways(self, peer: PeerAddress) -> list[Way]:
        if not _has_direct(peer):
            return [self.libp2p]
        other: Way = self.relay if peer.relay and self.relay is not None else self.libp2p
        choice = self._choices.get(peer.identity)
        if choice and choice.peer == peer and choice.way is other and not self._stale(choice):
            return [other, self.direct]  # either may break later: there is always a second way
        return [self.direct, other]

    def _stale(self, choice: Route) -> bool:
        return self._clock() - choice.since >= RETRY_DIRECT_S

    def _connect(self, way: Way, peer: PeerAddress, channel: str, timeout_s: float) -> Stream:
        """Open a stream on this way and remember the choice.

        Its time is that of its first success: direct is tried again even where libp2p is in use.
        """
        stream = way.connect(peer, channel, timeout_s=timeout_s)
        with self._lock:
            known = self._choices.get(peer.identity)
            if not (known and known.way is way and known.peer == peer) or self._stale(known):
                self._choices[peer.identity] = Route(peer, way, self._clock())
        if not known or known.way is not way:
            how = "directly" if way is self.direct else "through libp2p" if way is self.libp2p else "through a relay"
            log.info("%s reaches %s %s", self.identity, peer.identity, how)
        return stream

    def close(self) -> None:
        """Close all of the transports, and with them all their streams."""
        if self.relay is not None:
            self.relay.close()
        self.direct.close()
        self.libp2p.close()


def _has_direct(peer: PeerAddress) -> bool:
    return bool(peer.host and peer.certificate_der)
