"""Connections that outlive their streams: a handshake, and a TCP window wide open, serve many rounds.

For streams that go one way: the connecting side sends and ends, the accepting side only receives. When that has read
the end mark it says so, and the next stream to that peer begins on the same connection. Until then, and when a stream
is closed before its end, the next one gets a connection of its own: whoever never reads a stream holds no other up.
"""

import logging
import threading
from collections.abc import Callable

from diloco.comm.frame import END, HELLO
from diloco.comm.inbox import Inbox, hear_channel
from diloco.comm.transport import PeerAddress, Stream, Transport
from diloco.comm.wire import Deadline, Piece, PlacePiece
from diloco.errors import StreamClosed, TransportError

CHANNEL = "pool"
ANSWER_S = 10.0
log = logging.getLogger(__name__)


class Lease:
    """A carrier for one stream. With its end mark the connection goes back; before that, close() closes it."""

    def __init__(self, connection: Stream, on_end: Callable[[Stream], None] = lambda connection: None) -> None:
        self.connection = connection
        self.carrier = connection.carrier
        self.peer = connection.peer
        self.over = threading.Event()
        self.ended = False  # rather than cut
        self._sent, self._received = self.carrier.bytes_sent, self.carrier.bytes_received
        self._totals: tuple[int, int] | None = None
        self._on_end = on_end

    @property
    def bytes_sent(self) -> int:
        return self._totals[0] if self._totals else self.carrier.bytes_sent - self._sent

    @property
    def bytes_received(self) -> int:
        return self._totals[1] if self._totals else self.carrier.bytes_received - self._received

    def bytes_for(self, piece: Piece) -> int:
        return self.carrier.bytes_for(piece)

    def send(self, piece: Piece, deadline: Deadline) -> None:
        self._check()
        self.carrier.send(piece, deadline)
        if piece.kind == END:
            self._end()
            self._on_end(self.connection)

    def receive(self, place: PlacePiece, deadline: Deadline) -> Piece:
        self._check()
        piece = self.carrier.receive(place, deadline)
        if piece.kind == END:
            self._end()
        return piece

    def _check(self) -> None:
        if self.over.is_set():
            raise StreamClosed(f"the stream to {self.peer} has ended")

    def _end(self) -> None:
        self.ended = True
        self._finish()

    def _finish(self) -> None:
        self._totals = self.bytes_sent, self.bytes_received
        self.over.set()

    def close(self) -> None:
        if not self.over.is_set():
            self.carrier.close()
            self._finish()


class PooledTransport:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.identity = transport.identity
        self.inbox = Inbox()
        self._idle: dict[str, Stream] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept_connections, name=f"pool-{self.identity}", daemon=True).start()

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        idle = self._take_idle(peer.identity)
        if idle is not None:
            try:
                return self._begin(idle, channel, timeout_s)
            except TransportError as gone:
                log.debug("%s: an idle connection is gone (%s), opening another", self.identity, gone)
        return self._begin(self.transport.connect(peer, CHANNEL, timeout_s=timeout_s), channel, timeout_s)

    def _begin(self, connection: Stream, channel: str, timeout_s: float) -> Stream:
        stream = self.inbox.keep(Stream(Lease(connection, self._give_back)))
        stream.send_reserved(HELLO, channel.encode(), timeout_s=timeout_s)
        return stream

    def _take_idle(self, identity: str) -> Stream | None:
        with self._lock:
            connection = self._idle.pop(identity, None)
        if connection is None or _was_read_to_its_end(connection):
            return connection
        connection.close()  # what was sent on it can still be read
        return None

    def _give_back(self, connection: Stream) -> None:
        with self._lock:
            surplus = self._idle.pop(connection.peer, None)
            self._idle[connection.peer] = connection
        if surplus is not None:
            surplus.close()

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        return self.inbox.take(channel, timeout_s)

    def _accept_connections(self) -> None:
        while True:
            try:
                connection = self.transport.accept(CHANNEL, timeout_s=None)
            except StreamClosed:  # the transport is
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Stream) -> None:
        """One stream after the other, until one is cut or the peer hangs up."""
        try:
            while True:
                channel = hear_channel(connection, timeout_s=None)
                lease = Lease(connection)
                self.inbox.put(channel, Stream(lease))
                lease.over.wait()
                if not lease.ended:
                    return
                connection.send_reserved(HELLO, timeout_s=ANSWER_S)
        except TransportError as gone:
            log.debug("%s: connection of %s is over: %s", self.identity, connection.peer, gone)
            connection.close()

    def forget(self, channel: str) -> None:
        self.inbox.forget(channel)

    def close(self) -> None:
        self.inbox.close()
        self.transport.close()


def _was_read_to_its_end(connection: Stream) -> bool:
    """Its peer sends one thing only: that it has read the last stream's end."""
    try:
        return connection.receive(timeout_s=0).kind == HELLO
    except TransportError:  # nothing yet, or the connection is gone
        return False
