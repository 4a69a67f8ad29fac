"""Connections that outlive their streams: a handshake, and a TCP window wide open, serve many rounds.

For streams that go one way: the connecting side sends and ends, the accepting side only receives. When that has read
the end mark it says so, and the next stream to that peer begins on the same connection. Until then, and when a stream
is closed before its end, the next one gets a connection of its own: a stream that is never read holds no other up.
Connections are renewed now and then, so that a better way to a peer is found, and a peer can open a few only.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from diloco.comm.transport.frame import END, HELLO
from diloco.comm.transport.transport import Accepting, PeerAddress, Stream, Transport, hear_channel
from diloco.comm.transport.wire import Deadline, Piece, PlacePiece
from diloco.errors import StreamClosed, TransportError

CHANNEL = "pool"
ANSWER_S = 10.0
MAX_AGE_S = 300.0
MAX_OF_ONE = 4  # connections that a peer may have open to us
log = logging.getLogger(__name__)


class Lease:
    """Carry one stream over a pooled connection.

    With its end mark the connection goes back; before that, close() closes it.
    """

    def __init__(self, connection: Stream, on_end: Callable[[], None] = lambda: None) -> None:
        self.carrier = connection.carrier
        self.peer, self.bytes_for = connection.peer, connection.carrier.bytes_for
        self.over = threading.Event()
        self.ended = False  # rather than cut
        self._sent_before = self.carrier.bytes_sent
        self._total: int | None = None
        self._on_end = on_end
        self._lock = threading.Lock()  # end or cut: whoever comes first decides

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of this stream alone, not of others on the same connection."""
        return self.carrier.bytes_sent - self._sent_before if self._total is None else self._total

    @property
    def bytes_received(self) -> int:
        """Return the bytes that have come over the connection so far, for streams before this one, too."""
        return self.carrier.bytes_received

    def send(self, piece: Piece, deadline: Deadline) -> None:
        """Send a piece; with the end mark, give the connection back."""
        self._check()
        self.carrier.send(piece, deadline)
        if piece.kind == END and self._finish(ended=True):
            self._on_end()

    def receive(self, place: PlacePiece, deadline: Deadline) -> Piece:
        """Return the next piece; with the end mark, the stream is over and the connection is not."""
        self._check()
        piece = self.carrier.receive(place, deadline)
        if piece.kind == END:
            self._finish(ended=True)
        return piece

    def _check(self) -> None:
        if self.over.is_set():
            raise StreamClosed(f"the stream to {self.peer} has ended")

    def _finish(self, *, ended: bool) -> bool:
        """Mark the stream as over, and return whether it was this call that did it.

        After an end, the connection may carry another stream already.
        """
        with self._lock:
            if self.over.is_set():
                return False
            self._total = self.bytes_sent
            self.ended = ended
            self.over.set()
            return True

    def close(self) -> None:
        """Close the connection, unless the stream is over: then it is no longer this stream's."""
        if self._finish(ended=False):
            self.carrier.close()


@dataclass(frozen=True)
class Opened:
    """Describe a connection that this side opened, and when."""

    peer: PeerAddress
    connection: Stream
    at: float


class Accepted:
    """Hold the connections that others opened, each with the stream on it, if any; longest in that state first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[Stream, Lease | None] = {}

    def add(self, connection: Stream) -> None:
        """Add a connection without a stream; if its peer has four already, close one of them."""
        with self._lock:
            surplus = self._surplus(connection.peer)
            self._leases[connection] = None
        if surplus is not None:
            log.warning("%s has more than %d connections: one is closed", connection.peer, MAX_OF_ONE)
            surplus.close()

    def _surplus(self, peer: str) -> Stream | Lease | None:
        """Remove and return an idle connection if the peer has too many.

        If none is idle, the oldest stream goes: perhaps it will never be read.
        """
        of_peer = [connection for connection in self._leases if connection.peer == peer]
        if len(of_peer) < MAX_OF_ONE:
            return None
        chosen = next((connection for connection in of_peer if self._leases[connection] is None), of_peer[0])
        return self._leases.pop(chosen) or chosen

    def mark(self, connection: Stream, lease: Lease | None) -> None:
        """Note the stream that a connection carries, None if it is idle.

        Raises StreamClosed if the connection had to make way.
        """
        with self._lock:
            if connection not in self._leases:
                raise StreamClosed(f"the connection of {connection.peer} made way for another")
            del self._leases[connection]  # and to the end of the order
            self._leases[connection] = lease

    def remove(self, connection: Stream) -> None:
        """Forget a connection that is over, if it is still known."""
        with self._lock:
            self._leases.pop(connection, None)


class PooledTransport(Accepting):
    """Open and accept streams over connections of another transport, and use these again for later streams."""

    def __init__(self, transport: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(transport.identity)
        self.transport = transport
        self._clock = clock
        self._idle: dict[str, Opened] = {}
        self._lock = threading.Lock()
        self._accepted = Accepted()
        threading.Thread(target=self._accept_connections, name=f"pool-{self.identity}", daemon=True).start()

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Begin a stream on an idle connection to this peer, if its last stream was read to its end.

        Otherwise a new one is opened.
        """
        self._drop_old()
        idle = self._take_idle(peer)
        if idle is not None:
            try:
                return self._begin(idle, channel, timeout_s)
            except TransportError as gone:
                log.debug("%s: an idle connection is gone (%s), opening another", self.identity, gone)
        connection = self.transport.connect(peer, CHANNEL, timeout_s=timeout_s)
        return self._begin(Opened(peer, connection, self._clock()), channel, timeout_s)

    def _begin(self, opened: Opened, channel: str, timeout_s: float) -> Stream:
        stream = self.inbox.keep(Stream(Lease(opened.connection, partial(self._give_back, opened))))
        stream.send_reserved(HELLO, channel.encode(), timeout_s=timeout_s)
        return stream

    def _drop_old(self) -> None:
        now = self._clock()
        with self._lock:
            old = [idle for idle in self._idle.values() if now - idle.at > MAX_AGE_S]
            for idle in old:
                del self._idle[idle.peer.identity]
        for idle in old:
            idle.connection.close()  # what was sent on it can still be read

    def _take_idle(self, peer: PeerAddress) -> Opened | None:
        with self._lock:
            idle = self._idle.pop(peer.identity, None)
        if idle is None or (idle.peer == peer and _was_read_to_its_end(idle.connection)):
            return idle
        idle.connection.close()  # what was sent on it can still be read
        return None

    def _give_back(self, opened: Opened) -> None:
        with self._lock:
            surplus = self._idle.pop(opened.peer.identity, None)
            self._idle[opened.peer.identity] = opened
        if surplus is not None:
            surplus.connection.close()

    def _accept_connections(self) -> None:
        while True:
            try:
                connection = self.transport.accept(CHANNEL, timeout_s=None)
            except StreamClosed:  # the transport is
                return
            self._accepted.add(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # out of threads: others must still get in later
                log.warning("%s: a connection of %s was not taken: %s", self.identity, connection.peer, error)
                self._accepted.remove(connection)
                connection.close()

    def _serve(self, connection: Stream) -> None:
        """Take one stream after the other from a connection, until one is cut or the peer hangs up."""
        try:
            while True:
                channel, lease = hear_channel(connection, timeout_s=None), Lease(connection)
                self._accepted.mark(connection, lease)
                self.inbox.put(channel, Stream(lease))
                lease.over.wait()
                if not lease.ended:
                    return
                self._accepted.mark(connection, None)
                connection.send_reserved(HELLO, timeout_s=ANSWER_S)
        except TransportError as gone:
            log.debug("%s: connection of %s is over: %s", self.identity, connection.peer, gone)
            connection.close()
        finally:
            self._accepted.remove(connection)

    def close(self) -> None:
        """Close all streams and the transport below."""
        super().close()
        self.transport.close()


def _was_read_to_its_end(connection: Stream) -> bool:
    """Tell whether the peer has said that it has read the last stream's end: it sends nothing else."""
    try:
        return connection.receive(timeout_s=0).kind == HELLO
    except TransportError:  # nothing yet, or the connection is gone
        return False
