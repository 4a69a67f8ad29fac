"""Streams that others opened, sorted by channel until somebody accepts them. Bounded: a peer cannot pile them up.

Several transports of one peer may share an inbox: whoever accepts need not know which way a stream came.
"""

import threading
from collections import Counter, deque
from weakref import WeakSet

from diloco.comm.transport.frame import HELLO, pack_header
from diloco.comm.transport.transport import Stream
from diloco.comm.transport.wire import deadline_in, seconds_to
from diloco.errors import FrameError, PeerRefused, StreamClosed, TransportTimeout

MAX_WAITING = 1024  # streams opened by peers that nobody has accepted yet
MAX_WAITING_OF_ONE = 64
MAX_CHANNEL_BYTES = 256
MAX_REASON_BYTES = 256


class Inbox:
    """Also knows every stream of its transport, so that closing the transport closes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Stream]] = {}
        self._open: WeakSet[Stream] = WeakSet()
        self._forgotten: deque[str] = deque(maxlen=MAX_WAITING)
        self._closed = False

    def put(self, channel: str, stream: Stream) -> None:
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
        """Nobody will accept from it again: close what waits there, and what still comes."""
        with self._changed:
            self._forgotten.append(channel)
            waiting = self._waiting.pop(channel, ())
        for stream in waiting:
            stream.close()

    def _make_room(self, peer: str) -> Stream | None:
        """A peer's oldest stream goes when it has too many: what nobody took for so long, nobody will. When all
        together have, it is the turn of whoever has most: a few strangers keep no member out."""
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
        with self._changed:
            if self._closed:
                stream.close()
                raise StreamClosed("the transport is closed")
            self._open.add(stream)
        return stream

    def take(self, channel: str, timeout_s: float | None) -> Stream:
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
        with self._changed:
            self._closed = True
            streams = list(self._open)
            self._waiting.clear()
            self._changed.notify_all()
        for stream in streams:
            stream.close()


def open_channel(stream: Stream, channel: str, timeout_s: float) -> Stream:
    """The connecting side. It hears first and speaks then: a refusal must not be lost behind a failed write."""
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
    """What the accepting side says instead of a plain greeting, where the wire itself does not refuse strangers."""
    head = reason.encode()
    return pack_header(HELLO, head, b"") + head


def read_channel(stream: Stream, timeout_s: float) -> str:
    """The accepting side, once it knows who the other is."""
    stream.send_reserved(HELLO, timeout_s=timeout_s)
    return hear_channel(stream, timeout_s)


def hear_channel(stream: Stream, timeout_s: float | None) -> str:
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
