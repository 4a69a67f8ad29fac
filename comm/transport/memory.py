"""The transport inside one process, for an island alone, tests and simulation: bounded pipes, for back-pressure."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco.comm.transport.transport import Accepting, PeerAddress, Stream
from diloco.comm.transport.wire import Deadline, WireCarrier, deadline_in, seconds_to
from diloco.errors import PeerLost, StreamClosed, TransportError

PIPE_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 256 * 1024


class Pipe:
    """Carry bytes in one direction. Bytes written before a break can still be read, as with TCP."""

    def __init__(self) -> None:
        self.held = 0
        self.broken = False
        self._chunks: deque[memoryview] = deque()
        self._changed = threading.Condition()

    def put(self, chunk: memoryview, deadline: Deadline) -> None:
        """Write a chunk, once the pipe holds no more than 4 MiB with it.

        Raises PeerLost if the pipe broke or the deadline came first.
        """
        with self._changed:
            self._wait_until(lambda: self.broken or self.held + len(chunk) <= PIPE_BYTES, deadline)
            if self.broken:
                raise PeerLost("the connection was closed")
            self._chunks.append(memoryview(bytes(chunk)))
            self.held += len(chunk)
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> bool:
        """Wait for bytes or a break; return False when the deadline came first."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._chunks) or self.broken, seconds_to(deadline))

    def take(self, view: memoryview, deadline: Deadline) -> int:
        """Fill the view from the next chunk, as far as that goes, and return the number of bytes."""
        with self._changed:
            self._wait_until(lambda: bool(self._chunks) or self.broken, deadline)
            if not self._chunks:
                raise PeerLost("the connection was cut before its end mark")
            chunk = self._chunks.popleft()
            count = min(len(chunk), len(view))
            view[:count] = chunk[:count]
            if count < len(chunk):
                self._chunks.appendleft(chunk[count:])
            self.held -= count
            self._changed.notify_all()
            return count

    def _wait_until(self, true: Callable[[], bool], deadline: Deadline) -> None:
        if not self._changed.wait_for(true, seconds_to(deadline)):
            raise PeerLost("stalled within a frame")

    def cut(self) -> None:
        """Break the pipe and wake those who wait at either end."""
        with self._changed:
            self.broken = True
            self._changed.notify_all()


class MemoryWire:
    """Carry bytes between two peers of one process, through a pipe each way."""

    secure = False

    def __init__(self, peer: str, outgoing: Pipe, incoming: Pipe) -> None:
        self.peer = peer
        self.outgoing = outgoing
        self.incoming = incoming
        self.bytes_read = 0
        self._closed = False

    def write(self, data: memoryview, deadline: Deadline) -> None:
        with self._naming():
            for start in range(0, len(data), CHUNK_BYTES):
                self.outgoing.put(data[start : start + CHUNK_BYTES], deadline)

    def wait(self, deadline: Deadline) -> bool:
        return self.incoming.wait(deadline)

    def read_into(self, view: memoryview, stall_s: float) -> None:
        with self._naming():
            if self._closed:
                raise PeerLost
            while len(view):
                count = self.incoming.take(view, deadline_in(stall_s))
                self.bytes_read += count
                view = view[count:]

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as lost:
            if self._closed:
                raise StreamClosed(f"the stream to {self.peer} was closed here") from None
            raise PeerLost(f"{self.peer}: {lost}") from None

    def bytes_for(self, length: int) -> int:
        return length

    def close(self) -> None:
        self._closed = True
        self.outgoing.cut()
        self.incoming.cut()


class MemoryNetwork:
    """Connect all peers that are in it with each other. `transport(identity)` adds a peer."""

    def __init__(self) -> None:
        self.peers: dict[str, MemoryTransport] = {}

    def transport(self, identity: str) -> "MemoryTransport":
        """Add a peer and return its transport; it replaces an earlier one of this identity."""
        self.peers[identity] = MemoryTransport(self, identity)
        return self.peers[identity]


def connected(one: str, other: str) -> tuple[MemoryWire, MemoryWire]:
    """Return both ends of a new connection: the one that `one` holds, then the one that `other` holds."""
    there, back = Pipe(), Pipe()
    return MemoryWire(other, there, back), MemoryWire(one, back, there)


class MemoryTransport(Accepting):
    """Open and accept streams within one process, among the peers of one MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, identity: str) -> None:
        super().__init__(identity)
        self.network = network

    def address(self) -> PeerAddress:
        """Return the identity alone: within a process, nothing else is needed."""
        return PeerAddress(self.identity)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a stream to this peer at once, without any handshake; raise PeerLost if it is not in the network."""
        other = self.network.peers.get(peer.identity)
        if other is None:
            raise PeerLost(f"{peer.identity} is not there")
        near, far = connected(self.identity, peer.identity)
        stream = self.inbox.keep(Stream(WireCarrier(near)))
        try:
            other.inbox.put(channel, Stream(WireCarrier(far)))
        except TransportError as refused:
            stream.close()
            raise PeerLost(f"{peer.identity}: {refused}") from None
        return stream

    def close(self) -> None:
        """Leave the network, and close all streams."""
        self.network.peers.pop(self.identity, None)
        super().close()
