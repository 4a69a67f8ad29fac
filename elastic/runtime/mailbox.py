"""Control messages between islands: one stream to each peer for sending, one from each for receiving.

Transports let streams of admitted peers in only. When a stream breaks, its peer is probed at once: one
that refuses connections is gone, one that merely does not answer may be stopped or slow. A refusal by a peer that this
process has never been connected to says nothing: its address may be of long ago. Lost peers are dialled for ever.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

from diloco.comm.peers.redial import MOST_S, pause_s
from diloco.comm.transport.frame import END
from diloco.comm.transport.transport import Addresses, PeerAddress, Stream, Transport
from diloco.elastic.protocol.messages import Effect, Message
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.wire import decode_message, encode_message
from diloco.errors import FrameError, MessageRefused, PeerRefused, StreamClosed, TransportError, TransportTimeout

CHANNEL = "control"
MESSAGE = 2
PROBE = b""  # instead of a message: its own stream to us broke, is it still there?
MAX_MESSAGE_BYTES = 4 << 20
MAX_WAITING = 1000  # messages to one peer
MAX_STREAMS_OF_ONE = 8  # from one peer: it needs one, and another to look whether we live
CONNECT_S = 3.0
QUICK_S = 1.0  # a connection that fails sooner was refused; later, nobody answered
RETRY_S = 0.25
STALE_S = 5.0  # at least: nothing came from a peer for so long, and its stream may be dead without a sign

log = logging.getLogger(__name__)


Input = Callable[[float], list[Effect]]  # of a node, lacking only the time


@dataclass(frozen=True)
class Network:
    """Hold the transports of an island; they admit the run's peers and nobody else.

    `bulk` reuses connections, for all-reduces; `plain` is for everything that goes both ways.
    """

    plain: Transport
    bulk: Transport


class Mailbox:
    """Send messages to peers, and post the messages of admitted peers to the node."""

    def __init__(self, network: Network, node: Node, post: Callable[[Input], None]) -> None:
        """Begin to accept streams; `post` is called on the mailbox's threads."""
        self.network, self.node, self.post = network, node, post
        self._lines: dict[str, PeerLine] = {}
        self._came: dict[str, int] = {}  # bytes, by peer
        self._incoming: dict[str, list[Stream]] = {}  # of each peer, oldest first
        self._lock = threading.Lock()
        self._closed = False
        self._last: tuple[Message | None, bytes] = None, b""
        self._sent_before = 0  # on lines that were closed
        self.met: set[str] = set()  # peers to or from which a stream was open in the life of this process
        self.heard_at: dict[str, float] = {}  # when a message of a peer came last
        threading.Thread(target=self._accept, name="mailbox", daemon=True).start()

    def know(self, addresses: Addresses) -> None:
        """Open a line to each peer that is new, and give known ones their present address."""
        for peer, address in addresses.items():
            with self._lock:
                line = self._lines.get(peer)
                if line is None and not self._closed:
                    line = self._lines[peer] = PeerLine(self, address)
            if line is not None:
                line.move_to(address)

    def keep_only(self, peers: Container[str]) -> None:
        """Close the lines to all others: who may not speak to this island any more is not dialled either."""
        with self._lock:
            others = [peer for peer in self._lines if peer not in peers]
            lines = [self._lines.pop(peer) for peer in others]
            self._sent_before += sum(line.bytes_sent for line in lines)
        for line in lines:
            line.close()

    def send(self, peer: str, message: Message) -> None:
        """Queue a message to a peer. It is dropped if the peer's address is not known."""
        if (line := self._lines.get(peer)) is not None:
            line.put(self._encoded(message))

    def _encoded(self, message: Message) -> bytes:
        """Encode a message once for all its receivers: a *begin* of many islands is large."""
        said, raw = self._last
        if said is not message:
            raw = encode_message(message)
            self._last = message, raw
        return raw

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of control messages sent to all peers so far."""
        return self._sent_before + sum(line.bytes_sent for line in list(self._lines.values()))

    def flush(self, timeout_s: float) -> None:
        """Wait until everything that is queued has been sent, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(not line.idle for line in list(self._lines.values())):
            time.sleep(0.01)

    def close(self) -> None:
        """Stop accepting streams, and close all lines without sending what is still queued."""
        with self._lock:
            self._closed = True
            lines = list(self._lines.values())
        self.network.plain.forget(CHANNEL)
        for line in lines:
            line.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self.network.plain.accept(CHANNEL, timeout_s=0.2)
            except TransportTimeout:
                continue
            except StreamClosed:
                return
            self._hang_up_surplus(stream)
            try:
                threading.Thread(target=self._listen, args=(stream,), daemon=True).start()
            except RuntimeError as error:  # out of threads: others must still get in later
                log.warning("%s cannot listen to %s: %s", self.node.me, stream.peer, error)
                stream.close()

    def _hang_up_surplus(self, stream: Stream) -> None:
        """Count a stream that a peer has opened; if it has too many, end the oldest: each has a thread."""
        with self._lock:
            theirs = self._incoming.setdefault(stream.peer, [])
            theirs.append(stream)
            surplus = theirs.pop(0) if len(theirs) > MAX_STREAMS_OF_ONE else None
        if surplus is not None:
            surplus.close()

    def _hear(self, peer: str) -> None:
        """Note that a message of a peer came: if its line waits to dial again, it need not wait longer."""
        self.met.add(peer)
        self.heard_at[peer] = time.monotonic()
        if (line := self._lines.get(peer)) is not None:
            line.wake()

    @property
    def silence_s(self) -> float:
        """Return after how long a silent peer is suspected, as the run's settings say now."""
        return self.node.own.options.silence_s

    @property
    def bytes_received(self) -> int:
        """Return the bytes of messages that have come from others so far."""
        return sum(list(self._came.values()))

    def _listen(self, stream: Stream) -> None:
        heard = False
        try:
            while True:
                frame = stream.receive(_message)
                heard = True  # who hangs up before that was only looking whether we live
                self._hear(stream.peer)
                with self._lock:  # a peer may have two streams for a while
                    self._came[stream.peer] = self._came.get(stream.peer, 0) + len(frame.payload)
                if self.node.peers.banned(stream.peer, time.monotonic()):
                    continue  # its bytes are not even unpacked
                self.post(partial(self.node.receive, stream.peer, decode_message(bytes(frame.payload))))
        except (FrameError, MessageRefused) as bad:
            self.post(partial(self.node.ban, stream.peer, f"sent garbage: {bad}"))
        except TransportError as lost:
            log.debug("%s: stream of %s is over: %s", self.node.me, stream.peer, lost)
            if heard and not self._closed and (line := self._lines.get(stream.peer)) is not None:
                line.put(PROBE)
        finally:
            stream.close()
            with self._lock, suppress(ValueError):  # it had to make way
                self._incoming[stream.peer].remove(stream)


class PeerLine:
    """Send messages to one peer, in order, on a thread of its own that connects again when a stream breaks."""

    def __init__(self, mailbox: Mailbox, address: PeerAddress) -> None:
        self.mailbox, self.address = mailbox, address
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._stream: Stream | None = None
        self._opened_at = 0.0
        self._failures = 0  # to connect, in a row
        self._awake = threading.Event()  # there is a reason to dial at once
        self._random = Random()
        self._sent_before = 0  # by streams that broke
        self._closed = False
        self._busy = False
        threading.Thread(target=self._run, name=f"line-{address.identity[-6:]}", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued or being sent."""
        return self._queue.empty() and not self._busy

    def put(self, raw: bytes) -> None:
        """Queue an encoded message; an empty one only probes the peer. It is dropped if 1000 are waiting."""
        try:
            self._queue.put_nowait(raw)
        except queue.Full:  # nobody reads: what it missed is sent again, or no longer matters
            log.debug("%s does not keep up", self.address.identity)

    def move_to(self, address: PeerAddress) -> None:
        """Use this address from now on, at once if it is another one."""
        if address != self.address:
            self.address = address
            self.wake()

    def wake(self) -> None:
        """Dial again without waiting longer, if the peer was lost."""
        if self._failures:
            self._awake.set()

    def close(self) -> None:
        """End the thread and the stream, and drop the messages that are still queued."""
        self._closed = True
        self._awake.set()
        if self._stream is not None:
            self._stream.close()
        self._drain()
        self._queue.put(None)

    def _run(self) -> None:
        while (raw := self._queue.get()) is not None and not self._closed:
            self._busy = True
            try:
                if raw:
                    self._hang_up_if_stale()
                    self._stream = self._stream or self._connect()
                    self._stream.send(MESSAGE, b"", raw, timeout_s=CONNECT_S)
                else:
                    self._connect().close()  # a stream that is fine stays: hanging up would make the other side probe
            except TransportError as error:
                log.debug("to %s: %s", self.address.identity, error)
                self._hang_up()
            self._busy = False
        self._hang_up()

    def _hang_up_if_stale(self) -> None:
        """Hang up if nothing has come from the peer for long.

        TCP waits up to two minutes before it sends again what was lost: a cut that has healed would last that longer.
        """
        last_sign = max(self._opened_at, self.mailbox.heard_at.get(self.address.identity, 0.0))
        if time.monotonic() - last_sign > max(STALE_S, 2 * self.mailbox.silence_s):
            self._hang_up()

    def _connect(self) -> Stream:
        started, address = time.monotonic(), self.address
        try:
            stream = self.mailbox.network.plain.connect(address, CHANNEL, timeout_s=CONNECT_S)
        except TransportError as error:
            refused_us = isinstance(error, PeerRefused)  # it lives, and does not know us yet
            quick = time.monotonic() - started < QUICK_S
            if quick and not refused_us and not self._closed and address.identity in self.mailbox.met:
                self.mailbox.post(partial(self.mailbox.node.closed, address.identity))
            self._wait_to_dial_again()
            raise
        self.mailbox.met.add(address.identity)
        self._failures, self._opened_at = 0, time.monotonic()
        return stream

    def _wait_to_dial_again(self) -> None:
        """Wait after a failure, up to `silence_s` or until the peer is heard, and drop what is queued meanwhile."""
        self._failures += 1
        most_s = min(MOST_S, max(1.0, self.mailbox.silence_s))
        self._awake.wait(pause_s(self._failures, self._random, first_s=RETRY_S, most_s=most_s))
        self._awake.clear()
        self._drain()

    def _drain(self) -> None:
        """Drop what is queued for a peer that cannot be reached: it is out of date when the peer is back."""
        while True:
            try:
                if self._queue.get_nowait() is None:
                    self._queue.put_nowait(None)
                    return
            except queue.Empty:
                return

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent to this peer so far, those of streams that broke included."""
        stream = self._stream
        return self._sent_before + (stream.bytes_sent if stream is not None else 0)

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._sent_before += self._stream.bytes_sent
            self._stream.close()
            self._stream = None


def _message(kind: int, head: bytes, length: int) -> memoryview:
    if kind not in (MESSAGE, END) or length > MAX_MESSAGE_BYTES:
        raise FrameError(f"a frame of kind {kind} with {length} bytes")
    return memoryview(bytearray(length))
