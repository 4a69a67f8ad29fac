"""Below streams: a `Wire` is an ordered pipe of bytes to one peer; a `Carrier` moves single pieces of frames.

A new kind of connection needs a `Wire` only. Whatever shapes traffic is a carrier around another (see shaped.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from diloco.comm.transport import frame
from diloco.errors import FrameError, PeerLost, StreamClosed, TransportError, TransportTimeout

STALL_S = 30.0  # a frame that has begun and makes no progress for so long: its sender is lost
JOIN_BYTES = 16 * 1024  # a header goes out with the payload's beginning: that copy costs less than a TLS record more

PlacePiece = Callable[[frame.FrameHeader, bytes], memoryview]  # (header, head) -> writable view for the piece's payload
Deadline = float | None  # a value of time.monotonic()


@dataclass(frozen=True)
class Piece:
    """Hold one piece of a frame; the fields are those of its header."""

    kind: int
    head: bytes
    payload: memoryview
    rest: int = 0
    continues: bool = False
    stamp_ns: int = 0


class Wire(Protocol):
    """Carry bytes to and from one peer, in order. Breaks are PeerLost; after this side's close(), StreamClosed."""

    peer: str
    secure: bool  # bytes are authenticated already: no checksum needed
    bytes_read: int  # so far, also of a frame that is under way

    def write(self, data: memoryview, deadline: Deadline) -> None:
        """Write all of the data; raise PeerLost when the deadline comes first. Half of it may have left by then."""

    def wait(self, deadline: Deadline) -> bool:
        """Wait until a byte (or the news of a break) has arrived; return False when the deadline came first."""

    def read_into(self, view: memoryview, stall_s: float) -> None:
        """Fill the view, however long that takes; raise PeerLost when no byte comes for `stall_s`."""

    def bytes_for(self, length: int) -> int:
        """Return what a write of so many bytes costs on the network, as far as this layer can see."""

    def close(self) -> None: ...


class Carrier(Protocol):
    """Move single pieces of frames to and from one peer."""

    peer: str

    @property
    def bytes_sent(self) -> int:
        """Return what all pieces so far have cost on the network, as `bytes_for` says."""

    @property
    def bytes_received(self) -> int:
        """Return the bytes that have come from the network so far, also those of a piece that is under way."""

    def send(self, piece: Piece, deadline: Deadline) -> None:
        """Send one piece before the deadline. A failure may leave half of it on the wire."""

    def receive(self, place: PlacePiece, deadline: Deadline) -> Piece:
        """Return the next piece. The deadline is for its beginning only: on TransportTimeout nothing was consumed."""

    def bytes_for(self, piece: Piece) -> int:
        """Return what the piece costs on the network, with its header."""

    def close(self) -> None: ...


class WireCarrier:
    """Move pieces over a wire. A piece that has begun may take its time, but not stop for `stall_s`."""

    stall_s = STALL_S

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.peer = wire.peer
        self.bytes_sent = 0
        self._failure: TransportError | None = None  # why we closed the wire ourselves, for the other direction

    @property
    def bytes_received(self) -> int:
        """Return what has been read from the wire so far."""
        return self.wire.bytes_read

    def send(self, piece: Piece, deadline: Deadline) -> None:
        flags = (frame.CONTINUES if piece.continues else 0) | (frame.SECURED if self.wire.secure else 0)
        header = frame.pack_header(
            piece.kind, piece.head, piece.payload, rest=piece.rest, flags=flags, stamp_ns=piece.stamp_ns
        )
        joined = _joined_bytes(piece)
        try:
            self.wire.write(memoryview(b"".join((header, piece.head, piece.payload[:joined]))), deadline)
            if joined < len(piece.payload):
                self.wire.write(piece.payload[joined:], deadline)
        except StreamClosed as closed:
            raise self._failure or closed from None
        self.bytes_sent += self.bytes_for(piece)

    def receive(self, place: PlacePiece, deadline: Deadline) -> Piece:
        """Return the next piece; a failure within it closes the wire, for what follows could not be understood."""
        if not self.wire.wait(deadline):
            raise TransportTimeout(f"{self.peer}: nothing arrived in time")
        try:
            return self._receive(place)
        except FrameError as bad:
            self._failure = FrameError(f"{self.peer}: {bad}")
            self.close()
            raise self._failure from None
        except BaseException as error:  # in the middle of a piece: what follows could not be told apart
            self._failure = error if isinstance(error, PeerLost) else None
            self.close()
            raise

    def _receive(self, place: PlacePiece) -> Piece:
        raw = bytearray(frame.HEADER_BYTES)
        self.wire.read_into(memoryview(raw), self.stall_s)
        header = frame.parse_header(raw)
        head = bytearray(header.head_length)
        self.wire.read_into(memoryview(head), self.stall_s)
        payload = place(header, bytes(head))
        self.wire.read_into(payload, self.stall_s)
        frame.check_piece(header, raw, head, payload, secured=self.wire.secure)
        return Piece(header.kind, bytes(head), payload, header.rest, header.continues, header.stamp_ns)

    def bytes_for(self, piece: Piece) -> int:
        """Return what the piece costs in the one or two writes that it takes."""
        joined = _joined_bytes(piece)
        first = self.wire.bytes_for(frame.HEADER_BYTES + len(piece.head) + joined)
        apart = len(piece.payload) - joined
        return first + (self.wire.bytes_for(apart) if apart else 0)

    def close(self) -> None:
        self.wire.close()


def _joined_bytes(piece: Piece) -> int:
    """Return how much of the payload is written together with the header."""
    return min(len(piece.payload), max(0, JOIN_BYTES - frame.HEADER_BYTES - len(piece.head)))


def as_bytes(data: frame.Buffer) -> memoryview:
    """View a buffer as plain bytes, without a copy; raise TypeError for one that does not lie in one stretch."""
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(bytearray())  # cast() refuses empty views
    plain = view.format == "B" and view.ndim == 1 and view.c_contiguous
    return view if plain else view.cast("B")  # TypeError for what does not lie in one stretch


def deadline_in(timeout_s: float | None) -> Deadline:
    """Return the value that time.monotonic() has `timeout_s` from now; None, for no deadline, stays None."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def seconds_to(deadline: Deadline) -> float | None:
    """Return the time left, never less than 0; None where there is no deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
