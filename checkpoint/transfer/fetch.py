"""Fetches from donors: one answer of one of them (a small item, the description of a large one), or a large item from
several at once, of which faster ones give more, and one that vanishes costs the chunks in flight."""

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

from diloco import errors
from diloco.checkpoint.log.library import MAX_MANIFEST_BYTES, MAX_NAME_BYTES, ItemManifest
from diloco.checkpoint.log.room import Room
from diloco.checkpoint.transfer.donor import BYTES, CHANNEL, CHUNK, DESCRIBE, READY, REFUSALS, SLICE_S, WHOLE
from diloco.comm.peers import packing
from diloco.comm.transport.transport import BufferFor, Frame, PeerAddress, Stream, Transport, closed_after
from diloco.comm.transport.wire import Deadline, deadline_in, seconds_to

MAX_WORKERS = 8
MAX_ASKED = 8  # chunks asked for in advance of a donor: a long way must not leave the link empty
MAX_HOLDERS = 2  # donors asked for one chunk at the end: more would share our link for nothing
MIN_BYTES = 1 << 14  # of a chunk, while a donor's patience lasts: on a slow link a whole one may take minutes

log = logging.getLogger(__name__)
T = TypeVar("T")


def request(transport: Transport, address: PeerAddress, name: str, *, limit: int, timeout_s: float) -> bytes:
    """Fetch a small item (16 MiB at most) from one peer; raise TransferFailed unless all comes within the time."""
    frame = _one_answer(transport, address, WHOLE, name, limit, timeout_s)
    if hashlib.sha256(frame.payload).digest() != frame.head:
        raise errors.WrongBytes(f"{name!r}: what {address.identity} sent is not what its digest says")
    return bytes(frame.payload)


def describe(transport: Transport, address: PeerAddress, name: str, timeout_s: float) -> ItemManifest:
    """Ask one peer for its item's manifest. Compare the size with what you expect before you allocate room."""
    frame = _one_answer(transport, address, DESCRIBE, name, MAX_MANIFEST_BYTES, timeout_s)
    try:
        manifest = ItemManifest.decode(frame.payload)
    except errors.ManifestRefused as bad:
        raise errors.ManifestRefused(f"{name!r} of {address.identity}: {bad}") from None
    if manifest.name != name:
        raise errors.ManifestRefused(f"{name!r} of {address.identity}: it describes {manifest.name!r}")
    return manifest


def _one_answer(
    transport: Transport, address: PeerAddress, kind: int, name: str, limit: int, timeout_s: float
) -> Frame:
    deadline, request = deadline_in(timeout_s), packing.text(name, MAX_NAME_BYTES)

    def attempt() -> Frame:
        stream = transport.connect(address, CHANNEL, timeout_s=seconds_to(deadline) or 0.0)
        with closing(stream), closed_after(stream, seconds_to(deadline) or 0.0):
            hear(stream, READY, up_to(0), name)
            stream.send(kind, request)
            return hear(stream, BYTES, up_to(limit), name)

    try:
        return unless_busy(attempt, deadline, threading.Event())
    except errors.TransportError as error:
        reason = str(error) if seconds_to(deadline) else f"not all of it came within {timeout_s} s"
        raise errors.TransferFailed(f"{name!r} of {address.identity}: {reason}", {address.identity: reason}) from None


def unless_busy(attempt: Callable[[], T], deadline: Deadline, over: threading.Event) -> T:
    """Repeat an attempt while the donor is busy, until the deadline or until `over` is set; then raise DonorBusy."""
    busy: errors.DonorBusy | None = None
    while True:
        try:
            return attempt()
        except errors.DonorBusy as error:
            busy = error
        except errors.TransportError:
            if busy is None or seconds_to(deadline):
                raise
        if not seconds_to(deadline) or over.wait(SLICE_S):
            raise busy


def hear(stream: Stream, kind: int, place: BufferFor, name: str) -> Frame:
    """Receive the donor's next frame; raise the refusal that it stands for if it is of another kind."""
    frame = stream.receive(place)
    if frame.kind == kind:
        return frame
    error, reason = REFUSALS.get(frame.kind, (errors.TransferFailed, f"answers with a frame of kind {frame.kind}"))
    raise error(f"{name!r}: {stream.peer} {reason}", {stream.peer: reason})


def up_to(limit: int) -> BufferFor:
    """Return a function that allocates a buffer for an answer, and raises FrameError above `limit` bytes."""

    def place(kind: int, head: bytes, length: int) -> memoryview:
        if length > (limit if kind == BYTES else 0):
            raise errors.FrameError(f"frame of kind {kind} with {length} bytes, at most {limit} were asked for")
        return memoryview(bytearray(length))

    return place


class ChunkBoard:
    """Track which chunks are missing and who has been asked for which. Its user holds a lock."""

    def __init__(self, missing: Iterable[int], workers: int) -> None:
        self._missing = deque(missing)
        self._holders: dict[int, set[str]] = {}  # of the chunks under way, first asked first
        self._workers = workers

    @property
    def done(self) -> bool:
        """Tell whether every chunk has been delivered."""
        return not self._missing and not self._holders

    def take(self, donor: str, asked: int) -> int | None:
        """Return the next chunk to request from a donor that owes `asked` chunks already, or None; towards the end it
        is one that another donor is slow with, so that none waits for the slowest."""
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
        """Mark a chunk as delivered, and tell whether it was still wanted."""
        return self._holders.pop(number, None) is not None

    def give_back(self, donor: str) -> None:
        """Count the chunks that a donor still owes as missing again, unless another was asked for them, too."""
        for number, holders in list(self._holders.items()):
            holders.discard(donor)
            if not holders:
                del self._holders[number]
                self._missing.append(number)


@dataclass
class DonorLine:
    """Hold what is under way with one donor."""

    name: str
    address: PeerAddress
    stream: Stream | None = None
    asked: deque[int] = field(default_factory=deque)
    since: float = math.inf  # when the wait for its next answer began
    moved: tuple[float, int] = (0.0, 0)  # when enough bytes had come since the last time, and how many by then

    def close(self) -> None:
        self.since = math.inf
        if self.stream is not None:
            self.stream.close()


class Transfer:
    """Fill `out` from several donors at once.

    A donor that is lost, refuses or sends wrong bytes is left out from then on, and so is one that for `patience_s`
    seconds neither completes a chunk nor sends 16 KiB of one. `have` holds the chunks that are in `out` already, and
    those that have come: with it, a transfer can be resumed. `taken` says how many bytes each donor gave, `failures`
    which were given up and why.
    """

    def __init__(
        self, manifest: ItemManifest, donors: Mapping[str, PeerAddress], transport: Transport, out: Room,
        have: set[int] | None = None, *, patience_s: float = 30.0,
    ) -> None:  # fmt: skip
        self.manifest, self.out, self.have = manifest, out, set() if have is None else have
        if len(self.out) != manifest.size:
            raise ValueError(f"{manifest.name!r} needs {manifest.size} bytes to write to, not {len(self.out)}")
        self.taken = dict.fromkeys(donors, 0)
        self.failures: dict[str, str] = {}
        self._transport, self._patience_s = transport, patience_s
        self._working = min(MAX_WORKERS, len(donors))
        self._lines = [DonorLine(name, address) for name, address in donors.items()]
        self._spare = deque(self._lines)
        missing = [number for number in range(len(manifest.digests)) if number not in self.have]
        self._board = ChunkBoard(missing, self._working)
        self.bytes_here = manifest.size - sum(map(self._size, missing))
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._connecting: set[threading.Thread] = set()
        self._error: BaseException | None = None

    def run(self, on_progress: Callable[[int, int], None] = lambda here, size: None) -> None:
        """Fetch until all is here; raise TransferFailed when no donor remains. `on_progress` gets the bytes that are
        here and their total, on this thread, about ten times a second; while it takes its time, no stall is noticed."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._working)]
        try:
            for thread in threads:
                thread.start()
            while self._wait():
                on_progress(self.bytes_here, self.manifest.size)
                self._cut_silent_lines()
            on_progress(self.bytes_here, self.manifest.size)
        finally:
            with self._changed:
                self._over.set()
                self._changed.notify_all()
            for line in self._lines:
                line.close()
            for thread in threads:  # one that still connects is left: it closes what it gets, and cannot reach `out`
                while thread.is_alive() and thread not in self._connecting:
                    thread.join(SLICE_S)

    def _size(self, number: int) -> int:
        part = self.manifest.chunk(number)
        return part.stop - part.start

    def _wait(self) -> bool:
        """Wait for a change; return False when all is here."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._board.done:
                return False
            if not self._working:
                reasons = "; ".join(self.failures.values()) or "nobody to ask"
                raise errors.TransferFailed(f"{self.manifest.name!r} cannot be had: {reasons}", self.failures)
            self._changed.wait(SLICE_S)
        return True

    def _cut_silent_lines(self) -> None:
        now = time.monotonic()
        for line in self._lines:
            come = line.stream.bytes_received if line.stream is not None else 0
            if come - line.moved[1] >= MIN_BYTES:
                line.moved = now, come
            if now - max(line.since, line.moved[0]) > self._patience_s:
                self._give_up(line, f"{line.name} has sent next to nothing for {self._patience_s} s")
                line.close()

    def _give_up(self, line: DonorLine, reason: str) -> None:
        with self._changed:
            if self._over.is_set() or line.name in self.failures:
                return  # our own doing, or a consequence of the first reason
            self.failures[line.name] = reason
        log.warning("%r is not fetched from %s any more: %s", self.manifest.name, line.name, reason)

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

    def _next_line(self) -> DonorLine | None:
        with self._changed:
            return self._spare.popleft() if self._spare and not self._over.is_set() else None

    def _use(self, line: DonorLine) -> None:
        try:
            deadline = deadline_in(self._patience_s)
            self._take_from(line, unless_busy(lambda: self._connect(line), deadline, self._over))
        except (errors.TransferFailed, errors.TransportError) as error:
            self._give_up(line, str(error))
        finally:
            line.close()
            with self._changed:
                self._board.give_back(line.name)
                self._changed.notify_all()

    def _connect(self, line: DonorLine) -> Stream:
        line.stream = stream = self._open(line.address)
        line.since = time.monotonic()
        if self._over.is_set():
            line.close()
        try:
            hear(stream, READY, up_to(0), self.manifest.name)
        except errors.DonorBusy:
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

    def _take_from(self, line: DonorLine, stream: Stream) -> None:
        room = memoryview(bytearray(min(self.manifest.chunk_bytes, self.manifest.size)))
        while self._ask_ahead(line, stream):
            number = line.asked[0]
            chunk = room[: self._size(number)]
            hear(stream, BYTES, _into(chunk), self.manifest.name)
            if hashlib.sha256(chunk).digest() != self.manifest.digests[number]:
                raise errors.WrongBytes(f"{line.name} sent wrong bytes for chunk {number}")
            self._deliver(line, chunk)

    def _ask_ahead(self, line: DonorLine, stream: Stream) -> bool:
        """Request more chunks, and tell whether there is an answer to wait for."""
        name = packing.text(self.manifest.name, MAX_NAME_BYTES)
        while (number := self._next_chunk(line)) is not None:
            line.asked.append(number)
            line.since = min(line.since, time.monotonic())
            stream.send(CHUNK, name + packing.integer(number, 4) + self.manifest.digests[number])
        return bool(line.asked)

    def _next_chunk(self, line: DonorLine) -> int | None:
        with self._changed:
            while not self._over.is_set():
                number = self._board.take(line.name, len(line.asked))
                if number is not None or line.asked:
                    return number
                self._changed.wait()
        return None

    def _deliver(self, line: DonorLine, chunk: memoryview) -> None:
        """Copy a checked chunk into `out`, each only once: two donors may have been asked for it."""
        number = line.asked.popleft()
        line.since = time.monotonic() if line.asked else math.inf
        with self._changed:
            if not self._over.is_set() and self._board.deliver(number):
                self.out[self.manifest.chunk(number)] = chunk
                self.have.add(number)
                self.taken[line.name] += len(chunk)
                self.bytes_here += len(chunk)
                self._changed.notify_all()


def _into(room: memoryview) -> BufferFor:
    def place(kind: int, head: bytes, length: int) -> memoryview:
        if length != (len(room) if kind == BYTES else 0):
            raise errors.FrameError(f"frame of kind {kind} with {length} bytes, a chunk of {len(room)} was asked for")
        return room[:length]

    return place
