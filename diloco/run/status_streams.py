"""Ask peers for their status, and answer those who ask, on streams of their own (`CHANNEL`).

A stream stays open from one question to the next: to open one costs an island that trains far more than an answer.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.errors import FrameError, StreamClosed, TransportError, TransportTimeout
from diloco.report.status import RunStatus, decode_status, redated

CHANNEL = "status"
ASK, ANSWER = 1, 2
AGE = struct.Struct("<d")  # the head of an answer: how many seconds old it is. Clocks of machines may differ
MAX_AGE_S = 3600.0
ASK_TIMEOUT_S, AT_ONCE = 2.0, 8
MAX_STREAMS, IDLE_S, WAIT_S = 64, 15.0, 2.0
MAX_STATUS_BYTES = 4 << 20

log = logging.getLogger(__name__)


class StatusServer:
    """Answer peers that ask for this island's status, members and watchers alike."""

    def __init__(self, transport: Transport, status: Callable[[], tuple[bytes, float]]) -> None:
        """Begin to answer; `status` returns what to say, and how many seconds old that is."""
        self._transport, self._status = transport, status
        self._open: set[Stream] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed = True
        self._transport.forget(CHANNEL)
        self._thread.join(WAIT_S)
        for stream in list(self._open):
            stream.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self._transport.accept(CHANNEL, timeout_s=0.5)
            except TransportTimeout:
                continue
            except StreamClosed:
                return
            if len(self._open) >= MAX_STREAMS:
                stream.close()
                continue
            self._open.add(stream)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        try:
            while not self._closed:
                stream.receive(_no_payload, timeout_s=IDLE_S)
                said, age_s = self._status()
                stream.send(ANSWER, AGE.pack(age_s), said, timeout_s=ASK_TIMEOUT_S)
        except (TransportError, FrameError) as over:
            log.debug("%s does not ask any more: %s", stream.peer, over)
        finally:
            stream.close()
            self._open.discard(stream)


class StatusAsker:
    """Ask peers again and again what they say of themselves and of the run."""

    def __init__(self, transport: Transport, given_up: Callable[[], bool] = lambda: False) -> None:
        """`given_up`: nobody waits for the answers any more; who was not asked yet is not asked then."""
        self._transport, self._given_up = transport, given_up
        self._streams: dict[str, Stream] = {}

    def ask(self, addresses: Mapping[str, PeerAddress]) -> list[RunStatus]:
        """Return what these peers say; those who do not answer in time, or with nonsense, are left out."""
        for peer in self._streams.keys() - {address.identity for address in addresses.values()}:
            self._streams.pop(peer).close()
        with ThreadPoolExecutor(AT_ONCE, "ask") as pool:  # no threads for one alone
            ask = map if len(addresses) == 1 else pool.map
            return [said for said in ask(self._ask_one, addresses.values()) if said is not None]

    def close(self) -> None:
        """Close all streams; the next question opens new ones."""
        for peer in list(self._streams):
            self._streams.pop(peer).close()

    def _ask_one(self, address: PeerAddress) -> RunStatus | None:
        if self._given_up():
            return None
        try:
            if (stream := self._streams.pop(address.identity, None)) is not None:
                try:
                    return self._ask_on(stream, address)
                except TransportTimeout:
                    raise
                except TransportError:  # it was closed since the last question: by its end, or because it was idle
                    pass
            return self._ask_on(self._transport.connect(address, CHANNEL, timeout_s=ASK_TIMEOUT_S), address)
        except (TransportError, FrameError) as error:
            log.info("%s does not say its status: %s", address.identity, error)
            return None

    def _ask_on(self, stream: Stream, address: PeerAddress) -> RunStatus | None:
        try:
            stream.send(ASK, timeout_s=ASK_TIMEOUT_S)
            answer = stream.receive(_status_only, timeout_s=ASK_TIMEOUT_S)
        except BaseException:
            stream.close()
            raise
        status, received = decode_status(bytes(answer.payload)), time.time()
        if status is None or status.me != address.identity:
            stream.close()
            return None
        self._streams[address.identity] = stream
        return redated(status, received - min(max(0.0, *AGE.unpack(answer.head)), MAX_AGE_S))


def _no_payload(kind: int, head: bytes, length: int) -> memoryview:
    if kind != ASK or length or head:
        raise FrameError(f"a frame of kind {kind} with {length} bytes, a question was due")
    return memoryview(bytearray())


def _status_only(kind: int, head: bytes, length: int) -> memoryview:
    if kind != ANSWER or len(head) != AGE.size or length > MAX_STATUS_BYTES:
        raise FrameError(f"a frame of kind {kind} with {length} bytes, a status was due")
    return memoryview(bytearray(length))
