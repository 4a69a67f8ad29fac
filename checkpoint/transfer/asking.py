"""One answer from one donor: a small item, or the description of a large one."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from diloco.checkpoint.log.library import MAX_NAME_BYTES, MAX_PARCEL_BYTES, Parcel
from diloco.checkpoint.transfer.donor import (
    BUSY,
    BYTES,
    CHANNEL,
    DESCRIBE,
    NOT_HERE,
    READY,
    REFUSED,
    SLICE_S,
    TOO_LARGE,
    WHOLE,
)
from diloco.comm.peers import packing
from diloco.comm.transport.transport import Frame, PeerAddress, Place, Stream, Transport
from diloco.comm.transport.wire import Deadline, deadline_in, seconds_to
from diloco.errors import (
    DonorBusy,
    FrameError,
    ItemMissing,
    ParcelRefused,
    TransferFailed,
    TransportError,
    WrongBytes,
)

REFUSALS: dict[int, tuple[type[TransferFailed], str]] = {
    BUSY: (DonorBusy, "serves as many as it can"),
    REFUSED: (TransferFailed, "gives us nothing"),
    NOT_HERE: (ItemMissing, "does not have it"),
    TOO_LARGE: (TransferFailed, "has it, too large for one answer: fetch it by chunks"),
}
T = TypeVar("T")


def ask(transport: Transport, address: PeerAddress, name: str, *, limit: int, timeout_s: float) -> bytes:
    """One small item (16 MiB at most) from one peer, all of it within the time; else TransferFailed."""
    frame = _one_answer(transport, address, WHOLE, name, limit, timeout_s)
    if hashlib.sha256(frame.payload).digest() != frame.head:
        raise WrongBytes(f"{name!r}: what {address.identity} sent is not what its digest says")
    return bytes(frame.payload)


def describe(transport: Transport, address: PeerAddress, name: str, timeout_s: float) -> Parcel:
    """What one peer says of its item. Whoever makes room for it first compares the size with what it expects."""
    frame = _one_answer(transport, address, DESCRIBE, name, MAX_PARCEL_BYTES, timeout_s)
    try:
        parcel = Parcel.decode(frame.payload)
    except ParcelRefused as bad:
        raise ParcelRefused(f"{name!r} of {address.identity}: {bad}") from None
    if parcel.name != name:
        raise ParcelRefused(f"{name!r} of {address.identity}: it describes {parcel.name!r}")
    return parcel


def _one_answer(
    transport: Transport, address: PeerAddress, kind: int, name: str, limit: int, timeout_s: float
) -> Frame:
    deadline, request = deadline_in(timeout_s), packing.text(name, MAX_NAME_BYTES)

    def attempt() -> Frame:
        stream = transport.connect(address, CHANNEL, timeout_s=seconds_to(deadline) or 0.0)
        with _closed_at(deadline, stream):
            hear(stream, READY, up_to(0), name)
            stream.send(kind, request)
            return hear(stream, BYTES, up_to(limit), name)

    try:
        return unless_busy(attempt, deadline, threading.Event())
    except TransportError as error:
        reason = str(error) if seconds_to(deadline) else f"not all of it came within {timeout_s} s"
        raise TransferFailed(f"{name!r} of {address.identity}: {reason}", {address.identity: reason}) from None


@contextmanager
def _closed_at(deadline: Deadline, stream: Stream) -> Iterator[None]:
    """However slowly a peer sends: closing the stream is what ends a frame that has begun."""
    timer = threading.Timer(seconds_to(deadline) or 0.0, stream.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        stream.close()


def unless_busy(attempt: Callable[[], T], deadline: Deadline, over: threading.Event) -> T:
    """Again and again until the deadline, as long as the donor is busy; and then that is the reason."""
    busy: DonorBusy | None = None
    while True:
        try:
            return attempt()
        except DonorBusy as error:
            busy = error
        except TransportError:
            if busy is None or seconds_to(deadline):
                raise
        if not seconds_to(deadline) or over.wait(SLICE_S):
            raise busy


def hear(stream: Stream, kind: int, place: Place, name: str) -> Frame:
    """The donor's next frame, if it is of that kind."""
    frame = stream.receive(place)
    if frame.kind == kind:
        return frame
    error, reason = REFUSALS.get(frame.kind, (TransferFailed, f"answers with a frame of kind {frame.kind}"))
    raise error(f"{name!r}: {stream.peer} {reason}", {stream.peer: reason})


def up_to(limit: int) -> Place:
    def place(kind: int, head: bytes, length: int) -> memoryview:
        if length > (limit if kind == BYTES else 0):
            raise FrameError(f"frame of kind {kind} with {length} bytes, at most {limit} were asked for")
        return memoryview(bytearray(length))

    return place
