"""Streams that others opened, sorted by channel until somebody accepts them. Bounded: a peer cannot pile them up."""

import threading
from collections import deque
from weakref import WeakSet

from diloco.comm.frame import HELLO
from diloco.comm.transport import Stream
from diloco.comm.wire import deadline_in, seconds_to
from diloco.errors import FrameError, PeerRefused, StreamClosed, TransportTimeout

MAX_WAITING = 1024  # streams opened by peers that nobody has accepted yet
MAX_CHANNEL_BYTES = 256


class Inbox:
    """Also knows every stream of its transport, so that closing the transport closes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Stream]] = {}
        self._open: WeakSet[Stream] = WeakSet()
        self._closed = False

    def put(self, channel: str, stream: Stream) -> None:
        with self._changed:
            if sum(map(len, self._waiting.values())) >= MAX_WAITING:
                raise PeerRefused(f"{MAX_WAITING} streams wait to be accepted, no more are taken")
            self.keep(stream)
            self._waiting.setdefault(channel, deque()).append(stream)
            self._changed.notify_all()

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
            queue = self._waiting[channel]
            stream = queue.popleft()
            if not queue:
                del self._waiting[channel]
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
        if stream.receive(_no_payload, timeout_s=timeout_s).kind != HELLO:
            raise FrameError(f"{stream.peer} did not greet")
        stream.send_reserved(HELLO, channel.encode(), timeout_s=timeout_s)
    except BaseException:
        stream.close()
        raise
    return stream


def read_channel(stream: Stream, timeout_s: float) -> str:
    """The accepting side, once it knows who the other is."""
    stream.send_reserved(HELLO, timeout_s=timeout_s)
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
