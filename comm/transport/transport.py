"""What every transport offers: streams of frames between peers whose identity is verified.

Blocking and thread-based: one thread may send while another receives, and any thread may close.
A transport brings the pipe of bytes (wire.py); `Stream` is the same for all of them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from diloco.comm.transport.frame import END, LAST_FREE_KIND, Buffer, FrameHeader
from diloco.comm.transport.wire import STALL_S, Carrier, Deadline, Piece, as_bytes, deadline_in, seconds_to
from diloco.errors import FrameError, PeerLost, StreamEnded, TransportTimeout

Place = Callable[[int, bytes, int], memoryview]  # (kind, head, payload length) -> writable view of that length


@dataclass(frozen=True)
class PeerAddress:
    """Where a peer can be reached and how it proves who it is: from its signed record."""

    identity: str
    host: str = ""
    port: int = 0
    certificate_der: bytes = b""
    control: tuple[str, ...] = ()  # multiaddrs, for libp2p; without any it looks the peer up itself


Addresses = Mapping[str, PeerAddress]  # by identity


@dataclass(frozen=True)
class Frame:
    kind: int
    head: bytes
    payload: memoryview


class Stream:
    """Frames in both directions, in order. Whoever is done sending says `end()`; `close()` cuts both directions."""

    def __init__(self, carrier: Carrier, *, stall_s: float = STALL_S) -> None:
        self.carrier = carrier
        self.stall_s = stall_s  # from piece to piece of a frame; within a piece it is the carrier's
        self.peer = carrier.peer
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._ended = False

    @property
    def bytes_sent(self) -> int:
        return self.carrier.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.carrier.bytes_received

    def send(self, kind: int, head: bytes = b"", payload: Buffer = b"", *, timeout_s: float | None = None) -> None:
        """Blocks while the peer or the link is behind. A timeout leaves half a frame, so it closes the stream; only
        TransportTimeout does not: another thread was sending all the time, and nothing of this frame went out."""
        if not 0 <= kind <= LAST_FREE_KIND:
            raise ValueError(f"kind {kind} is not between 0 and {LAST_FREE_KIND}")
        self.send_reserved(kind, head, payload, timeout_s=timeout_s)

    def end(self, *, timeout_s: float | None = None) -> None:
        """The last thing sent: the peer then knows that it has everything."""
        self.send_reserved(END, timeout_s=timeout_s)

    def send_reserved(
        self, kind: int, head: bytes = b"", payload: Buffer = b"", *, timeout_s: float | None = None
    ) -> None:
        """For transports: any kind, their own included."""
        if not 0 <= kind <= END:
            raise ValueError(f"kind {kind} is not between 0 and {END}")
        deadline, piece = deadline_in(timeout_s), Piece(kind, bytes(as_bytes(head)), as_bytes(payload))
        with self._turn(self._sending, deadline):
            try:
                self.carrier.send(piece, deadline)
            except BaseException:  # perhaps after half a frame
                self.close()
                raise

    def receive(self, place: Place | None = None, *, timeout_s: float | None = None) -> Frame:
        """The next frame; `place` says where its payload goes, without it there is a fresh buffer.

        `timeout_s` is for its beginning: on TransportTimeout nothing was consumed. A frame that has begun may take
        longer than that; a peer that stops within it for `stall_s` is PeerLost.
        """
        deadline = deadline_in(timeout_s)
        with self._turn(self._receiving, deadline):
            if self._ended:
                raise StreamEnded(f"{self.peer} has sent everything")
            try:
                frame = _receive_frame(self.carrier, place or _allocate, deadline, self.stall_s)
            except FrameError:
                self.close()
                raise
            self._ended = frame.kind == END
        if self._ended:
            raise StreamEnded(f"{self.peer} has sent everything")
        return frame

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
        self.carrier.close()


class Transport(Protocol):
    identity: str

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream: ...
    def accept(self, channel: str, *, timeout_s: float | None) -> Stream: ...
    def forget(self, channel: str) -> None:
        """Nobody will accept from this channel again: streams that wait there are closed, later ones refused."""

    def close(self) -> None: ...


def _receive_frame(carrier: Carrier, place: Place, deadline: Deadline, stall_s: float) -> Frame:
    target = memoryview(b"")

    def first_place(header: FrameHeader, head: bytes) -> memoryview:
        nonlocal target
        if header.continues:
            raise FrameError("the middle of a frame without its beginning")
        target = _checked_place(place, header.kind, head, header.length + header.rest)
        return target[: header.length]

    first = carrier.receive(first_place, deadline)
    _receive_rest(carrier, first, target, stall_s)
    return Frame(first.kind, first.head, target)


def _receive_rest(carrier: Carrier, first: Piece, target: memoryview, stall_s: float) -> None:
    rest = first.rest

    def next_place(header: FrameHeader, head: bytes) -> memoryview:
        if not header.continues or header.kind != first.kind or header.length + header.rest != rest:
            raise FrameError("a piece that does not continue its frame")
        return target[len(target) - rest :][: header.length]

    while rest:
        try:
            rest = carrier.receive(next_place, deadline_in(stall_s)).rest
        except TransportTimeout:
            carrier.close()
            raise PeerLost(f"{carrier.peer} stalled within a frame") from None


def _checked_place(place: Place, kind: int, head: bytes, length: int) -> memoryview:
    target = as_bytes(place(kind, head, length))
    if len(target) != length:
        raise ValueError(f"place() gave {len(target)} bytes for a payload of {length}")
    return target


def _allocate(kind: int, head: bytes, length: int) -> memoryview:
    return memoryview(bytearray(length))
