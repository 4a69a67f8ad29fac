"""Items from several peers at once: `Donor` gives what a library holds; `ask`, `describe` and `fetch` take.

A stream carries requests one way and answers the other, in order. The donor speaks first, so that a refusal is not lost
behind a failed write. A request for a chunk names its digest: a donor that has another item of that name says that it
is not here, so whoever sends wrong bytes all the same is broken or lies.
"""

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from diloco.checkpoint.library import DIGEST_BYTES, MAX_NAME_BYTES, MAX_PARCEL_BYTES, Item, Library, Parcel
from diloco.comm import packing
from diloco.comm.packing import Malformed, Reader
from diloco.comm.transport import Frame, PeerAddress, Place, Stream, Transport
from diloco.comm.wire import Deadline, as_bytes, deadline_in, seconds_to
from diloco.errors import (
    DonorBusy,
    FrameError,
    ItemMissing,
    ParcelRefused,
    StreamClosed,
    TransferFailed,
    TransferStopped,
    TransportError,
    TransportTimeout,
    WrongBytes,
)

CHANNEL = "fetch"
DESCRIBE, WHOLE, CHUNK = 1, 2, 3  # requests
READY, BUSY, REFUSED, BYTES, NOT_HERE, TOO_LARGE = 11, 12, 13, 14, 15, 16  # a greeting is one of the first three
MAX_REQUEST_BYTES = 2 + MAX_NAME_BYTES + 4 + DIGEST_BYTES
MAX_WHOLE_BYTES = 16 << 20  # larger items go by chunks
MAX_STREAMS, MAX_STREAMS_OF_ONE = 64, 4
GREETING_S = 1.0  # in the thread that accepts
IDLE_S = 120.0  # a stream on which nothing is asked for, or nobody reads an answer, makes way
SLICE_S = 0.1  # how soon a change that wakes nobody is seen
MAX_WORKERS = 8
MAX_ASKED = 8  # chunks asked for in advance of a donor: a long way must not leave the link empty
MAX_HOLDERS = 2  # donors asked for one chunk at the end: more would share our link for nothing

REFUSALS: dict[int, tuple[type[TransferFailed], str]] = {
    BUSY: (DonorBusy, "serves as many as it can"),
    REFUSED: (TransferFailed, "gives us nothing"),
    NOT_HERE: (ItemMissing, "does not have it"),
    TOO_LARGE: (TransferFailed, "has it, too large for one answer: fetch it by chunks"),
}
T = TypeVar("T")
log = logging.getLogger(__name__)


class Donor:
    """Serves a library on a transport until `close()`; after that the transport has no donor any more.

    `failure` is why nobody is accepted any more, if that is so.
    """

    def __init__(
        self,
        transport: Transport,
        library: Library,
        *,
        may_read: Callable[[str], bool] = lambda peer: True,
        max_streams: int = MAX_STREAMS,
        max_streams_of_one: int = MAX_STREAMS_OF_ONE,
    ) -> None:
        self.failure: BaseException | None = None
        self._transport, self._library, self._may_read = transport, library, may_read
        self._max_streams, self._max_of_one = max_streams, max_streams_of_one
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"donor-{transport.identity}", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._transport.forget(CHANNEL)
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        self._accepting.join()

    def _accept(self) -> None:
        try:
            while not self._closed:
                self._accept_one()
        except StreamClosed:  # the transport is
            pass
        except BaseException as error:
            self.failure = error
            log.exception("%s gives nothing to others any more", self._transport.identity)

    def _accept_one(self) -> None:
        try:
            stream = self._transport.accept(CHANNEL, timeout_s=SLICE_S)
        except TransportTimeout:
            return
        refusal = self._admit(stream)
        try:
            if not refusal:
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()
                return
            stream.send(refusal, timeout_s=GREETING_S)
        except (TransportError, RuntimeError) as error:  # RuntimeError: out of threads, others must get in later
            log.warning("%s cannot serve %s: %s", self._transport.identity, stream.peer, error)
        self._let_go(stream)

    def _admit(self, stream: Stream) -> int:
        """BUSY, REFUSED, or 0 for a stream that is served."""
        if not self._may_read(stream.peer):
            return REFUSED
        with self._lock:
            of_peer = sum(other.peer == stream.peer for other in self._streams)
            if self._closed or len(self._streams) >= self._max_streams or of_peer >= self._max_of_one:
                log.info("%s is too busy for %s", self._transport.identity, stream.peer)
                return BUSY
            self._streams.add(stream)
        return 0

    def _let_go(self, stream: Stream) -> None:
        stream.close()
        with self._lock:
            self._streams.discard(stream)

    def _serve(self, stream: Stream) -> None:
        try:
            stream.send(READY, timeout_s=IDLE_S)
            while self._may_read(stream.peer):
                self._answer(stream, stream.receive(_request_only, timeout_s=IDLE_S))
            stream.send(REFUSED, timeout_s=IDLE_S)
        except (FrameError, Malformed) as bad:
            log.warning("%s asks for what is no request: %s", stream.peer, bad)
        except TransportError as gone:
            log.debug("%s has gone: %s", stream.peer, gone)
        except Exception:  # a thread's outermost frame: the owner's on_missing or may_read, say
            log.exception("%s could not be served", stream.peer)
        finally:
            self._let_go(stream)

    def _answer(self, stream: Stream, request: Frame) -> None:
        reader = Reader(request.head)
        item = self._library.get(reader.text(MAX_NAME_BYTES))
        kind, head, payload = _answer_to(request.kind, reader, item)
        stream.send(kind, head, payload, timeout_s=IDLE_S)


def _answer_to(kind: int, reader: Reader, item: Item | None) -> tuple[int, bytes, bytes | memoryview]:
    number, digest = (reader.integer(4), reader.take(DIGEST_BYTES)) if kind == CHUNK else (0, b"")
    reader.finish()
    if item is None or (kind == CHUNK and (number >= item.count or item.digest(number) != digest)):
        return NOT_HERE, b"", b""
    if kind == DESCRIBE:
        return BYTES, b"", item.description().encode()
    if kind == CHUNK:
        return BYTES, b"", item.chunk(number)
    if item.size > MAX_WHOLE_BYTES:
        return TOO_LARGE, b"", b""
    return BYTES, hashlib.sha256(item.data).digest(), item.data


def _request_only(kind: int, head: bytes, length: int) -> memoryview:
    if kind not in (DESCRIBE, WHOLE, CHUNK) or length or len(head) > MAX_REQUEST_BYTES:
        raise FrameError(f"frame of kind {kind} with {len(head)} and {length} bytes, a request was due")
    return memoryview(bytearray())


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
            _hear(stream, READY, _up_to(0), name)
            stream.send(kind, request)
            return _hear(stream, BYTES, _up_to(limit), name)

    try:
        return _unless_busy(attempt, deadline, threading.Event())
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


def _unless_busy(attempt: Callable[[], T], deadline: Deadline, over: threading.Event) -> T:
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


def _hear(stream: Stream, kind: int, place: Place, name: str) -> Frame:
    """The donor's next frame, if it is of that kind."""
    frame = stream.receive(place)
    if frame.kind == kind:
        return frame
    error, reason = REFUSALS.get(frame.kind, (TransferFailed, f"answers with a frame of kind {frame.kind}"))
    raise error(f"{name!r}: {stream.peer} {reason}", {stream.peer: reason})


def _up_to(limit: int) -> Place:
    def place(kind: int, head: bytes, length: int) -> memoryview:
        if length > (limit if kind == BYTES else 0):
            raise FrameError(f"frame of kind {kind} with {length} bytes, at most {limit} were asked for")
        return memoryview(bytearray(length))

    return place


def _into(room: memoryview) -> Place:
    def place(kind: int, head: bytes, length: int) -> memoryview:
        if length != (len(room) if kind == BYTES else 0):
            raise FrameError(f"frame of kind {kind} with {length} bytes, a chunk of {len(room)} was asked for")
        return room[:length]

    return place


class Board:
    """Which chunks are missing and who has been asked for which. Its user holds a lock."""

    def __init__(self, missing: Iterable[int], workers: int) -> None:
        self._missing = deque(missing)
        self._holders: dict[int, set[str]] = {}  # of the chunks under way, first asked first
        self._workers = workers

    @property
    def done(self) -> bool:
        return not self._missing and not self._holders

    def take(self, donor: str, asked: int) -> int | None:
        """The next chunk to ask a donor for that has been asked for so many; towards the end, one that another is
        slow with, so that none waits for the slowest."""
        if self._missing and asked < max(1, min(MAX_ASKED, len(self._missing) // self._workers)):
            number = self._missing.popleft()
        elif asked or (late := self._late(donor)) is None:
            return None
        else:
            number = late
        self._holders.setdefault(number, set()).add(donor)
        return number

    def _late(self, donor: str) -> int | None:
        free = (n for n, holders in self._holders.items() if donor not in holders and len(holders) < MAX_HOLDERS)
        return next(free, None)

    def deliver(self, number: int) -> bool:
        """Whether it was still wanted."""
        return self._holders.pop(number, None) is not None

    def give_back(self, donor: str) -> None:
        for number, holders in list(self._holders.items()):
            holders.discard(donor)
            if not holders:
                del self._holders[number]
                self._missing.append(number)


@dataclass
class Line:
    """What is under way with one donor."""

    name: str
    address: PeerAddress
    stream: Stream | None = None
    asked: deque[int] = field(default_factory=deque)
    since: float = math.inf  # when the wait for its next answer began

    def close(self) -> None:
        self.since = math.inf
        if self.stream is not None:
            self.stream.close()


class Transfer:
    """One fetch. `run()` blocks; `taken` says how many bytes each donor gave, `failures` who was given up and why."""

    def __init__(
        self,
        parcel: Parcel,
        donors: Mapping[str, PeerAddress],
        transport: Transport,
        out: memoryview,
        *,
        have: set[int] | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self.parcel, self.out = parcel, as_bytes(out)
        if self.out.readonly or len(self.out) != parcel.size:
            raise ValueError(f"{parcel.name!r} needs {parcel.size} bytes to write to, not {len(self.out)}")
        self.have = set() if have is None else have
        self.taken = dict.fromkeys(donors, 0)
        self.failures: dict[str, str] = {}
        self._transport, self._patience_s = transport, patience_s
        self._working = min(MAX_WORKERS, len(donors))
        self._lines = [Line(name, address) for name, address in donors.items()]
        self._spare = deque(self._lines)
        missing = [number for number in range(len(parcel.digests)) if number not in self.have]
        self._board = Board(missing, self._working)
        self.bytes_here = parcel.size - sum(len(self.out[parcel.chunk(number)]) for number in missing)
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._connecting: set[threading.Thread] = set()
        self._error: BaseException | None = None

    def run(self, stop: Callable[[], bool], on_progress: Callable[[int, int], None]) -> None:
        """Both are called in this thread, about ten times a second; while they take their time, no stall is noticed."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._working)]
        try:
            for thread in threads:
                thread.start()
            while self._wait():
                on_progress(self.bytes_here, self.parcel.size)
                if stop():
                    raise TransferStopped(f"{self.parcel.name!r}: stopped with {self.bytes_here} bytes here")
                self._cut_silent_lines()
            on_progress(self.bytes_here, self.parcel.size)
        finally:
            self._finish()
            for thread in threads:
                self._join(thread)

    def _wait(self) -> bool:
        """For a change. False when all is here."""
        with self._changed:
            if self._board.done:
                return False
            if self._error is not None:
                raise self._error
            if not self._working:
                reasons = "; ".join(self.failures.values()) or "nobody to ask"
                raise TransferFailed(f"{self.parcel.name!r} cannot be had: {reasons}", self.failures)
            self._changed.wait(SLICE_S)
        return True

    def _cut_silent_lines(self) -> None:
        now = time.monotonic()
        for line in self._lines:
            if now - line.since > self._patience_s:
                self._give_up(line, f"{line.name} has completed no answer for {self._patience_s} s")
                line.close()

    def _give_up(self, line: Line, reason: str) -> None:
        with self._changed:
            if self._over.is_set() or line.name in self.failures:
                return  # our own doing, or a consequence of the first reason
            self.failures[line.name] = reason
        log.warning("%r is not fetched from %s any more: %s", self.parcel.name, line.name, reason)

    def _finish(self) -> None:
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        for line in self._lines:
            line.close()

    def _join(self, thread: threading.Thread) -> None:
        """One that still connects is left behind: it closes what it gets, and `out` is out of its reach."""
        while thread.is_alive() and thread not in self._connecting:
            thread.join(SLICE_S)

    def _work(self) -> None:
        try:
            while (line := self._next_line()) is not None:
                self._use(line)
        except BaseException as error:  # noqa: BLE001 -- a thread's outermost frame: run() raises it
            self._error = error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _next_line(self) -> Line | None:
        with self._changed:
            return self._spare.popleft() if self._spare and not self._over.is_set() else None

    def _use(self, line: Line) -> None:
        try:
            deadline = deadline_in(self._patience_s)
            self._take_from(line, _unless_busy(lambda: self._connect(line), deadline, self._over))
        except (TransferFailed, TransportError) as error:
            self._give_up(line, str(error))
        finally:
            line.close()
            with self._changed:
                self._board.give_back(line.name)
                self._changed.notify_all()

    def _connect(self, line: Line) -> Stream:
        line.stream = stream = self._open(line.address)
        line.since = time.monotonic()
        if self._over.is_set():
            line.close()
        try:
            _hear(stream, READY, _up_to(0), self.parcel.name)
        except DonorBusy:
            line.close()
            raise
        line.since = math.inf
        return stream

    def _open(self, address: PeerAddress) -> Stream:
        me = threading.current_thread()
        self._connecting.add(me)
        try:
            return self._transport.connect(address, CHANNEL, timeout_s=self._patience_s)
        finally:
            self._connecting.discard(me)

    def _take_from(self, line: Line, stream: Stream) -> None:
        room = memoryview(bytearray(min(self.parcel.chunk_bytes, self.parcel.size)))
        while self._ask_ahead(line, stream):
            number = line.asked[0]
            chunk = room[: len(self.out[self.parcel.chunk(number)])]
            _hear(stream, BYTES, _into(chunk), self.parcel.name)
            if hashlib.sha256(chunk).digest() != self.parcel.digests[number]:
                raise WrongBytes(f"{line.name} sent wrong bytes for chunk {number}")
            self._deliver(line, chunk)

    def _ask_ahead(self, line: Line, stream: Stream) -> bool:
        """Whether there is an answer to wait for."""
        name = packing.text(self.parcel.name, MAX_NAME_BYTES)
        while (number := self._next_chunk(line)) is not None:
            line.asked.append(number)
            line.since = min(line.since, time.monotonic())
            stream.send(CHUNK, name + packing.integer(number, 4) + self.parcel.digests[number])
        return bool(line.asked)

    def _next_chunk(self, line: Line) -> int | None:
        with self._changed:
            while not self._over.is_set():
                number = self._board.take(line.name, len(line.asked))
                if number is not None or line.asked:
                    return number
                self._changed.wait()
        return None

    def _deliver(self, line: Line, chunk: memoryview) -> None:
        """`out` gets checked bytes only, and each chunk once: two donors may have been asked for it."""
        number = line.asked.popleft()
        line.since = time.monotonic() if line.asked else math.inf
        with self._changed:
            if not self._over.is_set() and self._board.deliver(number):
                self.out[self.parcel.chunk(number)] = chunk
                self.have.add(number)
                self.taken[line.name] += len(chunk)
                self.bytes_here += len(chunk)
                self._changed.notify_all()


def fetch(
    parcel: Parcel,
    donors: Mapping[str, PeerAddress],
    transport: Transport,
    out: memoryview,
    *,
    have: set[int] | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] | None = None,
    patience_s: float = 30.0,
) -> dict[str, int]:
    """Fills `out` from all donors at once and says how many bytes each gave. A donor that is lost, refuses, sends wrong
    bytes or completes no chunk for `patience_s` is left out from then on; TransferFailed when none remains. `have` are
    the chunks that are in `out` already, and those that have come: with it, a fetch can be taken up again."""
    transfer = Transfer(parcel, donors, transport, out, have=have, patience_s=patience_s)
    transfer.run(stop, on_progress or (lambda here, size: None))
    return transfer.taken
