"""Gives what a library holds to peers that ask for it: descriptions, small items, chunks of large ones.

A stream carries requests one way and answers the other, in order. The donor speaks first, so that a refusal is not lost
behind a failed write. A request for a chunk names its digest: a donor that has another item of that name answers that
it is not here, so whoever sends wrong bytes all the same is broken or lies.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from diloco import errors
from diloco.checkpoint.log.library import DIGEST_BYTES, MAX_NAME_BYTES, Item, Library
from diloco.comm.peers.packing import Malformed, Reader
from diloco.comm.transport.transport import Frame, Stream, Transport

CHANNEL = "fetch"
DESCRIBE, WHOLE, CHUNK = 1, 2, 3  # requests
READY, BUSY, REFUSED, BYTES, NOT_HERE, TOO_LARGE = 11, 12, 13, 14, 15, 16  # a greeting is one of the first three
REFUSALS: dict[int, tuple[type[errors.TransferFailed], str]] = {
    BUSY: (errors.DonorBusy, "serves as many as it can"),
    REFUSED: (errors.TransferFailed, "gives us nothing"),
    NOT_HERE: (errors.ItemMissing, "does not have it"),
    TOO_LARGE: (errors.TransferFailed, "has it, too large for one answer: fetch it by chunks"),
}
MAX_REQUEST_BYTES = 2 + MAX_NAME_BYTES + 4 + DIGEST_BYTES
MAX_WHOLE_BYTES = 16 << 20  # larger items go by chunks
MAX_STREAMS, MAX_STREAMS_OF_ONE = 64, 4
GREETING_S = 1.0  # in the thread that accepts
IDLE_S = 120.0  # a stream on which nothing is asked for, or nobody reads an answer, makes way
WAIT_FACTOR = 2.0  # in a hurry: so many times what it took to send a chunk
MAX_WAIT_S = 10.0  # a fetcher must not think that its donor is gone
SLICE_S = 0.1  # how soon a change that wakes nobody is seen

log = logging.getLogger(__name__)


class Donor:
    """Serve a library on a transport until `close()`, which leaves the transport without a donor for good.

    While the owner is `in_a_hurry` (a round needs its uplink), each stream sends for a third of the time only. With
    much less, a newcomer would fall behind for ever.
    """

    def __init__(
        self, transport: Transport, library: Library, *, may_read: Callable[[str], bool] = lambda peer: True,
        in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._transport, self._library, self._may_read = transport, library, may_read
        self._in_a_hurry = in_a_hurry
        self._streams: set[Stream] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"donor-{transport.identity}", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Refuse new streams, close those that are open, and wait for the thread that accepts."""
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
        except errors.StreamClosed:  # the transport is
            pass
        except BaseException:
            log.exception("%s gives nothing to others any more", self._transport.identity)

    def _accept_one(self) -> None:
        try:
            stream = self._transport.accept(CHANNEL, timeout_s=SLICE_S)
        except errors.TransportTimeout:
            return
        refusal = self._admit(stream)
        try:
            if not refusal:
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()
                return
            stream.send(refusal, timeout_s=GREETING_S)
        except (errors.TransportError, RuntimeError) as error:  # RuntimeError: out of threads, others must get in later
            log.warning("%s cannot serve %s: %s", self._transport.identity, stream.peer, error)
        self._let_go(stream)

    def _admit(self, stream: Stream) -> int:
        """Return BUSY or REFUSED, or 0 for a stream that is served."""
        if not self._may_read(stream.peer):
            return REFUSED
        with self._lock:
            of_peer = sum(other.peer == stream.peer for other in self._streams)
            if self._closed or len(self._streams) >= MAX_STREAMS or of_peer >= MAX_STREAMS_OF_ONE:
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
        except (errors.FrameError, Malformed) as bad:
            log.warning("%s asks for what is no request: %s", stream.peer, bad)
        except errors.TransportError as gone:
            log.debug("%s has gone: %s", stream.peer, gone)
        except Exception:  # a thread's outermost frame: the owner's on_missing or may_read, say
            log.exception("%s could not be served", stream.peer)
        finally:
            self._let_go(stream)

    def _answer(self, stream: Stream, request: Frame) -> None:
        reader = Reader(request.head)
        item = self._library.get(reader.text(MAX_NAME_BYTES))
        try:
            kind, head, payload = _answer_to(request.kind, reader, item)
        except OSError as error:  # of a file that has it
            log.warning("%s cannot be given what it asks for: %s", stream.peer, error)
            kind, head, payload = NOT_HERE, b"", b""
        started = time.monotonic()
        stream.send(kind, head, payload, timeout_s=IDLE_S)
        if request.kind == CHUNK:
            self._make_way(WAIT_FACTOR * (time.monotonic() - started))

    def _make_way(self, seconds: float) -> None:
        until = time.monotonic() + min(seconds, MAX_WAIT_S)
        while self._in_a_hurry() and not self._closed and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))


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
        raise errors.FrameError(f"frame of kind {kind} with {len(head)} and {length} bytes, a request was due")
    return memoryview(bytearray())
