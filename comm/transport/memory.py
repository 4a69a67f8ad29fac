"""The transport inside one process, for tests and simulation: bounded pipes, so that senders feel back-pressure."""

import threading
from collections import deque

from diloco.comm.transport.frame import Limits
from diloco.comm.transport.inbox import Inbox
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import Deadline, WireCarrier, deadline_in, seconds_to
from diloco.errors import PeerLost, StreamClosed, TransportError

PIPE_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 256 * 1024


class Pipe:
    """One direction. Bytes written before a break can still be read, as with TCP."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self.broken = False
        self._chunks: deque[memoryview] = deque()
        self._changed = threading.Condition()

    def write(self, data: memoryview, deadline: Deadline) -> None:
        step = min(CHUNK_BYTES, self.capacity)
        for start in range(0, len(data), step):
            self._put(data[start : start + step], deadline)

    def _put(self, chunk: memoryview, deadline: Deadline) -> None:
        with self._changed:
            while not self.broken and self.held + len(chunk) > self.capacity:
                self._wait(deadline)
            if self.broken:
                raise PeerLost("the connection was closed")
            self._chunks.append(memoryview(bytes(chunk)))
            self.held += len(chunk)
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._chunks) or self.broken, seconds_to(deadline))

    def read_into(self, view: memoryview, stall_s: float) -> None:
        while len(view):
            view = view[self._take(view, deadline_in(stall_s)) :]

    def _take(self, view: memoryview, deadline: Deadline) -> int:
        with self._changed:
            while not self._chunks:
                if self.broken:
                    raise PeerLost("the connection was cut before its end mark")
                self._wait(deadline)
            chunk = self._chunks.popleft()
            count = min(len(chunk), len(view))
            view[:count] = chunk[:count]
            if count < len(chunk):
                self._chunks.appendleft(chunk[count:])
            self.held -= count
            self._changed.notify_all()
            return count

    def _wait(self, deadline: Deadline) -> None:
        if not self._changed.wait(seconds_to(deadline)):
            raise PeerLost("stalled within a frame")

    def cut(self) -> None:
        with self._changed:
            self.broken = True
            self._changed.notify_all()


class MemoryWire:
    secure = False

    def __init__(self, peer: str, outgoing: Pipe, incoming: Pipe) -> None:
        self.peer = peer
        self.outgoing = outgoing
        self.incoming = incoming
        self._closed = False

    def write(self, data: memoryview, deadline: Deadline) -> None:
        try:
            self.outgoing.write(data, deadline)
        except PeerLost as lost:
            raise self._named(lost) from None

    def wait(self, deadline: Deadline) -> bool:
        return self.incoming.wait(deadline)

    def read_into(self, view: memoryview, stall_s: float) -> None:
        if self._closed:
            raise self._named(PeerLost())
        try:
            self.incoming.read_into(view, stall_s)
        except PeerLost as lost:
            raise self._named(lost) from None

    def _named(self, lost: PeerLost) -> PeerLost | StreamClosed:
        if self._closed:
            return StreamClosed(f"the stream to {self.peer} was closed here")
        return PeerLost(f"{self.peer}: {lost}")

    def bytes_for(self, length: int) -> int:
        return length

    def close(self) -> None:
        self._closed = True
        self.outgoing.cut()
        self.incoming.cut()


class MemoryNetwork:
    """Everybody who can reach everybody else. `transport(identity)` adds a peer."""

    def __init__(self, *, pipe_bytes: int = PIPE_BYTES, limits: Limits | None = None) -> None:
        self.pipe_bytes = pipe_bytes
        self.limits = limits or Limits()
        self.peers: dict[str, MemoryTransport] = {}

    def transport(self, identity: str) -> "MemoryTransport":
        self.peers[identity] = MemoryTransport(self, identity)
        return self.peers[identity]

    def wires(self, one: str, other: str) -> tuple[MemoryWire, MemoryWire]:
        """Both ends of a new connection: the one that `one` holds, then the one that `other` holds."""
        there, back = Pipe(self.pipe_bytes), Pipe(self.pipe_bytes)
        return MemoryWire(other, there, back), MemoryWire(one, back, there)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, identity: str) -> None:
        self.network = network
        self.identity = identity
        self.inbox = Inbox()

    def address(self) -> PeerAddress:
        return PeerAddress(self.identity)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        other = self.network.peers.get(peer.identity)
        if other is None:
            raise PeerLost(f"{peer.identity} is not there")
        near, far = self.network.wires(self.identity, peer.identity)
        stream = self.inbox.keep(Stream(WireCarrier(near, self.network.limits)))
        try:
            other.inbox.put(channel, Stream(WireCarrier(far, self.network.limits)))
        except TransportError as refused:
            stream.close()
            raise PeerLost(f"{peer.identity}: {refused}") from None
        return stream

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        return self.inbox.take(channel, timeout_s)

    def forget(self, channel: str) -> None:
        self.inbox.forget(channel)

    def close(self) -> None:
        self.network.peers.pop(self.identity, None)
        self.inbox.close()
