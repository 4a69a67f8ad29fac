"""What every transport offers: streams of frames between peers whose identity is verified.

Blocking and thread-based: one thread may send while another receives, and any thread may close.
A transport brings the pipe of bytes (wire.py); `Stream` is the same for all of them, and so is the `Inbox` in which
streams that others opened wait to be accepted.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from diloco.comm.transport.frame import END, HELLO, LAST_FREE_KIND, Buffer, FrameHeader, pack_header
from diloco.comm.transport.wire import STALL_S, Carrier, Deadline, Piece, as_bytes, deadline_in, seconds_to
from diloco.errors import FrameError, PeerLost, PeerRefused, StreamClosed, StreamEnded, TransportTimeout

MAX_WAITING = 1024  # streams opened by peers that nobody has accepted yet
MAX_WAITING_OF_ONE = 64
MAX_CHANNEL_BYTES = 256
MAX_REASON_BYTES = 256

BufferFor = Callable[[int, bytes, int], memoryview]  # (kind, head, payload length) -> writable view of that length


@dataclass(frozen=True)
class PeerAddress:
    """Describe where a peer can be reached and how it proves who it is, from its signed record."""

    identity: str
    host: str = ""
    port: int = 0
    certificate_der: bytes = b""
    control: tuple[str, ...] = ()  # multiaddrs, for libp2p; without any it looks the peer up itself
    relay: str = ""  # the member through which it is reached, if nobody can dial it


Addresses = Mapping[str, PeerAddress]  # by identity


@dataclass(frozen=True)
class Frame:
    """Hold a frame that has arrived: its kind, a small head and the payload."""

    kind: int
    head: bytes
    payload: memoryview


class Stream:
    """Exchange frames with a peer in both directions, in order.

    A side that is done sending calls `end()`; `close()` cuts both directions.
    """

    stall_s = STALL_S  # from piece to piece of a frame; within a piece it is the carrier's

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.peer = carrier.peer
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._ended = False
        self.arrived = 0  # payload bytes of the last frame, or of the one that is on its way

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that went out so far, with all headers, as far as the wire can see."""
        return self.carrier.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Return a count that grows with every byte that comes in, also of a frame that is under way."""
        return self.carrier.bytes_received

    def send(self, kind: int, head: bytes = b"", payload: Buffer = b"", *, timeout_s: float | None = None) -> None:
        """Send a frame, and block while the peer or the link is behind.

        A timeout leaves half a frame, so it closes the stream; only TransportTimeout does not: another thread was
        sending all the time, and nothing of this frame went out.
        """
        if not 0 <= kind <= LAST_FREE_KIND:
            raise ValueError(f"kind {kind} is not between 0 and {LAST_FREE_KIND}")
        self.send_reserved(kind, head, payload, timeout_s=timeout_s)

    def end(self, *, timeout_s: float | None = None) -> None:
        """Send the end mark, the last thing sent: the peer then knows that it has everything."""
        self.send_reserved(END, timeout_s=timeout_s)

    def send_reserved(
        self, kind: int, head: bytes = b"", payload: Buffer = b"", *, timeout_s: float | None = None
    ) -> None:
        """Send a frame of any kind, those of the transports included. Only transports call this."""
        if not 0 <= kind <= END:
            raise ValueError(f"kind {kind} is not between 0 and {END}")
        deadline, piece = deadline_in(timeout_s), Piece(kind, bytes(as_bytes(head)), as_bytes(payload))
        with self._turn(self._sending, deadline):
            try:
                self.carrier.send(piece, deadline)
            except BaseException:  # perhaps after half a frame
                self.close()
                raise

    def receive(self, place: BufferFor | None = None, *, timeout_s: float | None = None) -> Frame:
        """Return the next frame; `place` says where its payload goes, without it there is a fresh buffer.

        `timeout_s` is for its beginning: on TransportTimeout nothing was consumed. A frame that has begun may take
        longer than that; a peer that stops within it for `stall_s` is PeerLost. After the end mark it raises
        StreamEnded.
        """
        deadline = deadline_in(timeout_s)
        with self._turn(self._receiving, deadline):
            self.arrived = 0
            if self._ended:
                raise StreamEnded(f"{self.peer} has sent everything")
            try:
                frame = self._receive_frame(place or _allocate, deadline)
            except FrameError:
                self.close()
                raise
            self._ended = frame.kind == END
        if self._ended:
            raise StreamEnded(f"{self.peer} has sent everything")
        return frame

    def _receive_frame(self, place: BufferFor, deadline: Deadline) -> Frame:
        target = memoryview(b"")

        def first_place(header: FrameHeader, head: bytes) -> memoryview:
            nonlocal target
            if header.continues:
                raise FrameError("the middle of a frame without its beginning")
            target = _checked_place(place, header.kind, head, header.length + header.rest)
            return target[: header.length]

        first = self.carrier.receive(first_place, deadline)
        self.arrived = len(target) - first.rest
        self._receive_rest(first, target)
        return Frame(first.kind, first.head, target)

    def _receive_rest(self, first: Piece, target: memoryview) -> None:
        rest = first.rest

        def next_place(header: FrameHeader, head: bytes) -> memoryview:
            if not header.continues or header.kind != first.kind or header.length + header.rest != rest:
                raise FrameError("a piece that does not continue its frame")
            return target[len(target) - rest :][: header.length]

        while rest:
            try:
                rest = self.carrier.receive(next_place, deadline_in(self.stall_s)).rest
            except TransportTimeout:
                self.carrier.close()
                raise PeerLost(f"{self.peer} stalled within a frame") from None
            self.arrived = len(target) - rest

    @contextmanager
    def _turn(self, lock: threading.Lock, deadline: Deadline) -> Iterator[None]:
        left = seconds_to(deadline)
        if not lock.acquire(timeout=-1 if left is None else left):
            raise TransportTimeout(f"{self.peer}: another thread uses the stream; nothing was sent or consumed")
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        """Cut both directions, at any time and from any thread."""
        self.carrier.close()


class Inbox:
    """Hold the streams that others opened, by channel, until they are accepted. Bounded: a peer cannot pile them up.

    Several transports of one peer may share an inbox: whoever accepts need not know which way a stream came. It also
    knows every stream of its transport, so that closing the transport closes them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Stream]] = {}
        self._open: WeakSet[Stream] = WeakSet()
        self._forgotten: deque[str] = deque(maxlen=MAX_WAITING)
        self._closed = False
        self.may_open: Callable[[str, str], bool] = lambda peer, channel: True

    def put(self, channel: str, stream: Stream) -> None:
        """Add a stream to those that wait on its channel; raise PeerRefused if the channel is forgotten.

        The same for one that its peer may not open, as `may_open` says.

        If too many wait, the oldest of one peer is closed.
        """
        if not self.may_open(stream.peer, channel):
            raise PeerRefused(f"{stream.peer} may not open {channel!r}")
        with self._changed:
            if channel in self._forgotten:
                raise PeerRefused(f"nobody listens to {channel!r} any more")
            oldest = self._make_room(stream.peer)
            self.keep(stream)
            self._waiting.setdefault(channel, deque()).append(stream)
            self._changed.notify_all()
        if oldest is not None:
            oldest.close()

    def forget(self, channel: str) -> None:
        """Close the streams that wait on this channel and refuse later ones: it is never accepted from again."""
        with self._changed:
            self._forgotten.append(channel)
            waiting = self._waiting.pop(channel, ())
        for stream in waiting:
            stream.close()

    def _make_room(self, peer: str) -> Stream | None:
        """Remove and return the stream that has to go before this peer's next one is added, if any.

        A peer's oldest stream goes when it has too many: what was not accepted for so long never will be. When all
        together have too many, it is the turn of the peer that has most: a few strangers keep no member out.
        """
        waiting = [(channel, stream) for channel, queue in self._waiting.items() for stream in queue]
        counts = Counter(stream.peer for _, stream in waiting)
        if counts[peer] < MAX_WAITING_OF_ONE and len(waiting) < MAX_WAITING:
            return None
        crowd = peer if counts[peer] >= MAX_WAITING_OF_ONE else max(counts, key=lambda name: counts[name])
        channel, oldest = next((channel, stream) for channel, stream in waiting if stream.peer == crowd)
        self._remove(channel, oldest)
        return oldest

    def _remove(self, channel: str, stream: Stream) -> None:
        self._waiting[channel].remove(stream)
        if not self._waiting[channel]:
            del self._waiting[channel]

    def keep(self, stream: Stream) -> Stream:
        """Register a stream to be closed with the transport.

        If that is closed already, the stream is closed at once and StreamClosed raised.
        """
        with self._changed:
            if self._closed:
                stream.close()
                raise StreamClosed("the transport is closed")
            self._open.add(stream)
        return stream

    def drop(self, peer: str) -> None:
        """Close every stream from or to a peer, accepted or not."""
        with self._changed:
            streams = [stream for stream in self._open if stream.peer == peer]
        for stream in streams:
            stream.close()

    def peers(self) -> set[str]:
        """Return with whom there are streams, accepted or not."""
        with self._changed:
            return {stream.peer for stream in self._open}

    def take(self, channel: str, timeout_s: float | None) -> Stream:
        """Wait for a stream on this channel and remove it.

        Raises TransportTimeout after `timeout_s`; None waits for ever.
        """
        deadline = deadline_in(timeout_s)
        with self._changed:
            while not self._waiting.get(channel):
                if self._closed:
                    raise StreamClosed("the transport is closed")
                if not self._changed.wait(seconds_to(deadline)):
                    raise TransportTimeout(f"nobody opened {channel!r} within {timeout_s} s")
            stream = self._waiting[channel][0]
            self._remove(channel, stream)
            return stream

    def close(self) -> None:
        """Close every stream of the transport, accepted or not, and wake all who wait for one."""
        with self._changed:
            self._closed = True
            streams = list(self._open)
            self._waiting.clear()
            self._changed.notify_all()
        for stream in streams:
            stream.close()


class Transport(Protocol):
    """Open streams to other peers and accept theirs, sorted by the name of a channel."""

    identity: str

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a stream to this peer on a channel, within `timeout_s`."""

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        """Wait for a stream that a peer opens on this channel.

        Raises TransportTimeout after `timeout_s`; None waits for ever.
        """

    def forget(self, channel: str) -> None:
        """Close streams that wait on this channel and refuse later ones: it is never accepted from again."""

    def close(self) -> None:
        """Close every stream, and wake all threads that wait for one."""


class Accepting:
    """Provide the accepting half of a transport, which most have in common."""

    def __init__(self, identity: str, inbox: Inbox | None = None) -> None:
        self.identity = identity
        self.inbox = inbox or Inbox()

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        return self.inbox.take(channel, timeout_s)

    def forget(self, channel: str) -> None:
        self.inbox.forget(channel)

    def close(self) -> None:
        self.inbox.close()


def open_channel(stream: Stream, channel: str, timeout_s: float) -> Stream:
    """Ask for a channel as the connecting side.

    It hears first and speaks then: a refusal must not be lost behind a failed write.
    """
    try:
        greeting = stream.receive(_no_payload, timeout_s=timeout_s)
        if greeting.kind != HELLO:
            raise FrameError(f"{stream.peer} did not greet")
        if greeting.head:
            raise PeerRefused(f"{stream.peer} refused the stream: {greeting.head[:MAX_REASON_BYTES]!r}")
        stream.send_reserved(HELLO, channel.encode(), timeout_s=timeout_s)
    except BaseException:
        stream.close()
        raise
    return stream


def refusal(reason: str) -> bytes:
    """Return what the accepting side sends in place of a greeting, where the wire itself does not refuse strangers."""
    head = reason.encode()
    return pack_header(HELLO, head, b"") + head


@contextmanager
def closed_after(stream: Stream, seconds: float) -> Iterator[None]:
    """Close a stream that is still used after so many seconds: who sends byte by byte keeps nobody for longer."""
    timer = threading.Timer(seconds, stream.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_channel(stream: Stream, timeout_s: float) -> str:
    """Greet as the accepting side, once it knows who the other is, and return the channel that the other names."""
    with closed_after(stream, 2 * timeout_s):
        stream.send_reserved(HELLO, timeout_s=timeout_s)
        return hear_channel(stream, timeout_s)


def hear_channel(stream: Stream, timeout_s: float | None) -> str:
    """Return the channel that the peer names; raise FrameError if it sends anything else."""
    hello = stream.receive(_no_payload, timeout_s=timeout_s)
    if hello.kind != HELLO or len(hello.head) > MAX_CHANNEL_BYTES:
        raise FrameError(f"{stream.peer} did not start with the name of a channel")
    try:
        return hello.head.decode()
    except UnicodeDecodeError:
        raise FrameError(f"{stream.peer} named a channel that is not text") from None


def _no_payload(kind: int, head: bytes, length: int) -> memoryview:
    if length:
        raise FrameError("an opening carries no payload")
    return memoryview(bytearray())


def _checked_place(place: BufferFor, kind: int, head: bytes, length: int) -> memoryview:
    target = as_bytes(place(kind, head, length))
    if len(target) != length:
        raise ValueError(f"place() gave {len(target)} bytes for a payload of {length}")
    return target


def _allocate(kind: int, head: bytes, length: int) -> memoryview:
    return memoryview(bytearray(length))
