"""Any transport behind a link of given rate, delay and jitter. It needs no root.

The sender cuts frames into pieces, lets each pass its uplink and stamps it with the time it left. The receiver
keeps a piece invisible until stamp + delay, then lets it pass its downlink. Where there is a delay, a thread per stream
takes pieces in meanwhile, so that it costs no throughput; a mere cap on a rate costs neither thread nor copy. Stamps
are CLOCK_MONOTONIC, which all processes of one machine share: delays are for experiments on one machine. Rate limits
need no common clock (no stamp counts as later than a sender may run ahead, one of the far past is replaced by the time
of arrival), and the other side need not be shaped.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from weakref import WeakSet

from diloco.comm.transport.frame import FrameHeader
from diloco.comm.transport.link import Link, Path, PathPace, Paths
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.comm.transport.wire import Carrier, Deadline, Piece, PlacePiece, deadline_in, seconds_to
from diloco.errors import FrameError, PeerLost, StreamClosed, TransportError, TransportTimeout

NO_SLEEP_S = 0.0003  # shorter sleeps end late anyway; the stamps keep the exact time
# A sender may run this far ahead of its uplink, and a receiver may take in this early what belongs to a frame whose
# end is still to come: one sleep for several pieces.
AHEAD_S = 0.004
SPARE_BUFFERS = 32
MIN_SPARE_BYTES = 64 * 1024  # smaller buffers are cheap to make, and a peer could have us hold many
MIN_WINDOW_BYTES = 4 * 1024 * 1024
MAX_WINDOW_BYTES = 256 * 1024 * 1024
TRUSTED_STAMP_S = 5.0  # older stamps come from another machine's clock


@dataclass
class Arrival:
    """Hold a piece that was taken in and is invisible until its time; times are of time.monotonic()."""

    at: float
    header: FrameHeader
    piece: Piece
    size: int
    visible_at: float | None = None


def cut_piece(piece: Piece, size: int) -> Iterator[Piece]:
    """Yield the piece in parts of up to `size` payload bytes; the first one has the head."""
    total = len(piece.payload)
    if total <= size:
        yield piece
        return
    for start in range(0, total, size):
        part = piece.payload[start : start + size]
        rest = piece.rest + total - start - len(part)
        yield replace(piece, head=b"" if start else piece.head, payload=part, rest=rest, continues=start > 0)


def window_bytes(link: Link, path: Path) -> int:
    """Return how much can be on its way: a receiver that takes in less would turn delay into lost throughput."""
    rate = min(link.down.bytes_per_s, 1.25e9)
    worst_s = path.delay_s + path.jitter_s + (path.stall_s if path.loss else 0.0)
    return int(min(MAX_WINDOW_BYTES, max(MIN_WINDOW_BYTES, 2 * rate * worst_s)))


def sent_at(piece: Piece, now: float) -> float:
    """Return when the piece was sent, by its stamp, but never later than our own senders stamp.

    A piece with a later stamp would make all streams on the downlink wait. A stamp older than 5 s is of another
    machine's clock and counts as now.
    """
    stamp = piece.stamp_ns / 1e9
    return min(stamp, now + AHEAD_S) if now - stamp < TRUSTED_STAMP_S else now


class ShapedCarrier:
    """Carry the pieces of one stream as its link and its path would."""

    def __init__(self, inner: Carrier, link: Link, path: Path, random: Random, *, by_stamp: bool = True) -> None:
        self.inner = inner
        self._by_stamp = by_stamp
        self.peer, self.bytes_for = inner.peer, inner.bytes_for
        self.link = link
        self.path = path
        self._random = random
        self._pace = PathPace(link.up)
        self._window = window_bytes(link, path)
        self._changed = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._spare: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)
        self._held = 0
        self._last_at = 0.0
        self._end: TransportError | None = None  # why nothing more will arrive
        self._cut = ""
        self._closed = threading.Event()
        if path.takes_time:
            threading.Thread(target=self._take_in, name=f"link-{self.peer}", daemon=True).start()

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that the carrier below has sent, with a header for each piece."""
        return self.inner.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Return the bytes that the carrier below has received, though they may not have passed the downlink."""
        return self.inner.bytes_received

    def send(self, piece: Piece, deadline: Deadline) -> None:
        """Send the piece in parts; each waits for the uplink and is stamped with the time it left."""
        for part in cut_piece(piece, self.link.piece_bytes):
            finish = self._pass_uplink(self.bytes_for(part), deadline)
            try:
                self.inner.send(replace(part, stamp_ns=int(finish * 1e9)), deadline)
            except TransportError as error:
                raise self._reason(error) from None

    def _pass_uplink(self, size: int, deadline: Deadline) -> float:
        started = time.monotonic()
        finish = self._pace.reserve(size, started)
        if not self._sleep_until(finish, deadline, AHEAD_S):
            raise PeerLost(f"{self.peer}: the uplink did not get a frame out in time")
        self._pace.passed(finish, time.monotonic(), slept=finish - started > AHEAD_S)
        return finish

    def receive(self, place: PlacePiece, deadline: Deadline) -> Piece:
        """Return the next piece, once it has come over the path and through the downlink."""
        if self.path.takes_time:
            return self._receive_delayed(place, deadline)
        return self._receive_at_once(place, deadline)

    def _receive_at_once(self, place: PlacePiece, deadline: Deadline) -> Piece:
        try:
            piece = self.inner.receive(place, deadline)
        except TransportError as error:
            raise self._reason(error) from None
        visible_at = self.link.down.reserve_arriving(self.bytes_for(piece), sent_at(piece, time.monotonic()))
        self._sleep_until(visible_at, None, AHEAD_S if piece.rest else NO_SLEEP_S)
        return piece

    def _receive_delayed(self, place: PlacePiece, deadline: Deadline) -> Piece:
        arrival = self._wait_visible(deadline)
        payload = arrival.piece.payload
        try:
            target = place(arrival.header, arrival.piece.head)
        except FrameError as bad:
            self.close()
            raise FrameError(f"{self.peer}: {bad}") from None
        target[:] = payload
        with self._changed:
            self._arrivals.popleft()
            self._held -= arrival.size
            if len(payload) >= MIN_SPARE_BYTES:
                assert isinstance(payload.obj, bytearray)  # from _make_room
                self._spare.append(payload.obj)
            self._changed.notify_all()
        return replace(arrival.piece, payload=target)

    def _wait_visible(self, deadline: Deadline) -> Arrival:
        with self._changed:
            there = self._changed.wait_for(lambda: self._arrivals or self._end, seconds_to(deadline))
            if self._closed.is_set() or (there and not self._arrivals):
                raise self._reason(self._end)
            if not there:
                raise TransportTimeout(f"{self.peer}: nothing arrived in time")
            arrival = self._arrivals[0]
        early_s = AHEAD_S if arrival.header.rest else NO_SLEEP_S
        if arrival.visible_at is None and self._sleep_until(arrival.at, deadline, early_s):
            # only now: pieces of nearer peers that arrive earlier use the downlink first
            arrival.visible_at = self.link.down.reserve_arriving(arrival.size, arrival.at)
        if arrival.visible_at is None or not self._sleep_until(arrival.visible_at, deadline, early_s):
            raise TransportTimeout(f"{self.peer}: nothing arrived in time")
        return arrival

    def _sleep_until(self, moment: float, deadline: Deadline, early_s: float) -> bool:
        """Sleep until this moment, but not if it is no more than `early_s` away.

        Returns False when the deadline comes first.
        """
        late = deadline is not None and deadline < moment
        pause = (deadline if late and deadline is not None else moment) - time.monotonic()
        if pause > early_s:
            self._closed.wait(pause)
        if self._closed.is_set():
            raise self._reason(None)
        return not late

    def _take_in(self) -> None:
        try:
            while True:
                self._take_piece()
        except TransportError as end:
            with self._changed:
                self._end = end
                self._changed.notify_all()

    def _take_piece(self) -> None:
        headers: list[FrameHeader] = []

        def place(header: FrameHeader, head: bytes) -> memoryview:
            headers.append(header)
            return self._make_room(header.length)

        piece = self.inner.receive(place, None)
        size = self.bytes_for(piece)
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._window or self._closed.is_set())
            now = time.monotonic()
            sent = sent_at(piece, now) if self._by_stamp else now
            self._last_at = max(self._last_at, self.path.arrival(sent, self._random))
            self._arrivals.append(Arrival(self._last_at, headers[0], piece, size))
            self._held += size
            self._changed.notify_all()

    def _make_room(self, length: int) -> memoryview:
        if self._spare and MIN_SPARE_BYTES <= length <= len(self._spare[-1]) <= 2 * length:
            return memoryview(self._spare.pop())[:length]
        return memoryview(bytearray(length))

    def _reason(self, error: TransportError | None) -> TransportError:
        if self._cut:
            return PeerLost(f"{self.peer}: {self._cut}")
        if error is None or self._closed.is_set():
            return StreamClosed(f"the stream to {self.peer} was closed here")
        return error

    def lose(self, reason: str) -> None:
        """Break the stream: from now on its users here get PeerLost with this reason."""
        self._cut = reason
        self.close()

    def close(self) -> None:
        self._closed.set()
        self.inner.close()
        with self._changed:
            self._changed.notify_all()


class ShapedTransport:
    """Open and accept the streams of another transport through a link and the paths to its peers."""

    def __init__(self, transport: Transport, link: Link, paths: Paths | None = None, *, by_stamp: bool = True) -> None:
        """Shape all streams of this transport.

        Without `by_stamp` delays count from the arrival: the kernel holds the rates, and has taken its time.
        """
        self.transport = transport
        self._by_stamp = by_stamp
        self.identity = transport.identity
        self.link = link
        self.paths = paths or Paths()
        self._carriers: WeakSet[ShapedCarrier] = WeakSet()
        self._opened = 0
        self._lock = threading.Lock()
        self.paths.watch(self._on_cut)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a stream to this peer through the link; raise PeerLost while the path is cut."""
        if self.paths.is_cut(self.identity, peer.identity):
            raise PeerLost(f"{peer.identity}: the link is cut")
        return self._shape(self.transport.connect(peer, channel, timeout_s=timeout_s))

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        """Wait for a stream on this channel; those of peers that are cut off are closed."""
        deadline = deadline_in(timeout_s)
        while True:
            stream = self.transport.accept(channel, timeout_s=seconds_to(deadline))
            if not self.paths.is_cut(self.identity, stream.peer):
                return self._shape(stream)
            stream.close()

    def _shape(self, stream: Stream) -> Stream:
        with self._lock:
            self._opened += 1
            random = Random(f"{self.paths.seed} {self.identity} {stream.peer} {self._opened}")
            path = self.paths.between(self.identity, stream.peer)
            carrier = ShapedCarrier(stream.carrier, self.link, path, random, by_stamp=self._by_stamp)
            self._carriers.add(carrier)
        if self.paths.is_cut(self.identity, stream.peer):  # while it was being opened
            carrier.lose("the link is cut")
        return Stream(carrier)

    def _on_cut(self, pair: frozenset[str]) -> None:
        with self._lock:
            carriers = [carrier for carrier in self._carriers if {self.identity, carrier.peer} == pair]
        for carrier in carriers:
            carrier.lose("the link is cut")

    def forget(self, channel: str) -> None:
        self.transport.forget(channel)

    def close(self) -> None:
        self.paths.unwatch(self._on_cut)
        with self._lock:
            carriers = list(self._carriers)
        for carrier in carriers:
            carrier.close()
        self.transport.close()
