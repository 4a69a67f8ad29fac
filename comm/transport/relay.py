"""Streams through another member, for islands that nobody can dial: behind a home router, say, or a cluster's firewall.

Such an island keeps a connection open to a member that can be dialled, its relay. Whoever wants to reach it asks the
relay, which tells it so; it opens a second connection to the relay, and the relay passes bytes from one side to the
other. Inside that tunnel the two ends speak TLS with each other's pinned certificates, as on any direct connection: a
relay sees ciphertext only, and what it changes breaks the stream. It serves members only, so many, and at a rate that
its owner may limit.
"""

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.frame import END
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import Deadline, deadline_in, seconds_to
from diloco.errors import FrameError, PeerLost, TransportError, TransportTimeout

CHANNEL = "relay"
SERVE, OPEN, BACK, DIAL, YES, NO, CALL, BYTES, BEAT, FILL = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
ASK_S = 10.0
TRY_S = 30.0  # to dial oneself through a relay that is busy
DIAL_S = 3.0  # to find out whether a member can be dialled
BEAT_S, SILENT_S = 5.0, 20.0  # on a connection that waits for calls
TOKEN_BYTES = 16
CHUNK_BYTES = 256 * 1024
MAX_SERVED = 32  # islands that one member relays for
MAX_TUNNELS, MAX_TUNNELS_OF_ONE = 128, 32
MEASURED_CHUNKS = 8  # of 256 KiB, by which a member measures its way to another
MAX_ASKING, MAX_ASKING_OF_ONE = 64, 4  # streams that have not said yet what they want, or are being answered
MAX_COMING_BACK = 8  # tunnels that a relay asks for at the same time
IDLE_S = 600.0  # of a tunnel: longer than most rounds

log = logging.getLogger(__name__)


class Bucket:
    """Let bytes pass at no more than a rate, whoever they are from."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, time.monotonic(), threading.Lock()
        self.sleep = time.sleep

    def pass_through(self, count: int) -> None:
        """Wait until so many more bytes may pass."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._bytes_per_s
            wait_s = self._free_at - now
        self.sleep(wait_s)


@dataclass
class Traffic:
    """Count what a relay has passed on for one island."""

    bytes: int = 0
    since: float = field(default_factory=time.monotonic)


class Relay:
    """Serve islands that cannot be dialled, and be such an island: one for each `DirectTransport`."""

    def __init__(
        self, direct: DirectTransport, *, serves: bool = True, bytes_per_s: float | None = None,
        say: Callable[[str, str], None] = lambda peer, text: None,
    ) -> None:  # fmt: skip
        self._direct, self._serves, self._bucket, self._say = direct, serves, Bucket(bytes_per_s), say
        self._addresses: Mapping[str, PeerAddress] = {}
        self._lock = threading.Lock()
        self._served: dict[str, Stream] = {}
        self._calls: dict[bytes, tuple[str, Call]] = {}  # by token: whom, and who waits for it
        self._tunnels: Counter[str] = Counter()
        self.traffic: dict[str, Traffic] = {}
        self._asking: Counter[str] = Counter()
        self._coming_back = threading.BoundedSemaphore(MAX_COMING_BACK)
        self._own: Stream | None = None  # to this island's relay
        self._closed = False
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def know(self, addresses: Mapping[str, PeerAddress]) -> None:
        """Take in where the others are: relays are reached there, and asked members dialled."""
        self._addresses = dict(addresses)

    # an island that cannot be dialled

    def can_be_dialled(self, by: PeerAddress) -> bool | None:
        """Ask a member whether it can open a connection to this island; None if it does not say."""
        try:
            stream = self._ask(by, DIAL, b"", ASK_S)
        except TransportError:
            return None
        try:
            return stream.receive(_small, timeout_s=ASK_S).kind == YES
        except TransportError:
            return None
        finally:
            stream.close()

    def bytes_per_s_from(self, member: PeerAddress) -> float:
        """Measure how fast a member's bytes arrive here, with 2 MiB of them."""
        with closing(self._ask(member, FILL, b"", ASK_S)) as stream:
            stream.receive(_chunk, timeout_s=ASK_S)
            started, count = time.monotonic(), 0
            for _ in range(MEASURED_CHUNKS - 1):
                count += len(stream.receive(_chunk, timeout_s=ASK_S).payload)
            return count / max(1e-9, time.monotonic() - started)

    def be_served_by(self, relay: PeerAddress) -> bool:
        """Be reached through this member from now on; return whether it agrees."""
        try:
            stream = self._ask(relay, SERVE, b"", ASK_S)
            if stream.receive(_small, timeout_s=ASK_S).kind != YES:
                stream.close()
                return False
        except TransportError as error:
            log.info("%s does not relay: %s", relay.identity, error)
            return False
        with self._lock:
            before, self._own = self._own, stream
        if before is not None:
            before.close()
        threading.Thread(target=self._heed_calls, args=(relay, stream), name="relayed", daemon=True).start()
        return True

    def passes_on(self, relay: PeerAddress) -> bool:
        """Dial this island itself through its relay; return whether bytes came through, which its own key proves."""
        own = replace(self._direct.address(""), relay=relay.identity)
        try:
            deadline = deadline_in(TRY_S)
            self._direct.shake_hands_over(self._tunnel_to(own, deadline), own, deadline)
        except TransportError as error:
            log.info("%s passes nothing on: %s", relay.identity, error)
            return False
        return True

    @property
    def relay(self) -> str:
        """Return through whom this island is reached; "" where nobody relays for it."""
        own = self._own
        return own.peer if own is not None else ""

    def _heed_calls(self, relay: PeerAddress, stream: Stream) -> None:
        threading.Thread(target=self._beat, args=(stream,), daemon=True).start()
        try:
            while True:
                frame = stream.receive(_small, timeout_s=SILENT_S)
                if frame.kind == CALL and self._coming_back.acquire(blocking=False):
                    threading.Thread(target=self._come_back, args=(relay, frame.head), daemon=True).start()
        except TransportError as lost:
            log.info("%s relays no more: %s", relay.identity, lost)
        finally:
            stream.close()
            with self._lock:
                self._own = None if self._own is stream else self._own

    def _come_back(self, relay: PeerAddress, token: bytes) -> None:
        """Open the tunnel that somebody has asked for, and take its far end for a connection that came in."""
        try:
            stream = self._ask(relay, BACK, token, ASK_S)
        except TransportError as error:
            log.info("no tunnel through %s: %s", relay.identity, error)
            return
        finally:
            self._coming_back.release()
        self._direct.take_in(_end_of_tunnel(stream), relay.identity)

    def _beat(self, stream: Stream) -> None:
        with suppress(TransportError):
            while not self._closed:
                stream.send(BEAT, timeout_s=ASK_S)
                time.sleep(BEAT_S)

    # whoever wants to reach one

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a stream to an island through its relay, within `timeout_s` altogether."""
        deadline = deadline_in(timeout_s)
        return self._direct.connect_over(self._tunnel_to(peer, deadline), peer, channel, deadline)

    def _tunnel_to(self, peer: PeerAddress, deadline: Deadline) -> socket.socket:
        relay, left_s = self._addresses.get(peer.relay), seconds_to(deadline) or 0.0
        if peer.relay == self._direct.identity:
            tunnel = self._call(peer.identity, left_s)
        elif relay is None:
            raise PeerLost(f"{peer.identity}: its relay {peer.relay} is not there")
        else:
            tunnel = self._ask(relay, OPEN, peer.identity.encode(), left_s)
            try:
                answer = tunnel.receive(_small, timeout_s=seconds_to(deadline))
            except TransportTimeout:
                tunnel.close()
                raise
            if answer.kind != YES:
                tunnel.close()
                raise PeerLost(f"{peer.identity}: {peer.relay} relays nothing to it ({answer.head[:100]!r})")
        return _end_of_tunnel(tunnel)

    def _ask(self, relay: PeerAddress, what: int, head: bytes, timeout_s: float) -> Stream:
        stream = self._direct.connect(relay, CHANNEL, timeout_s=timeout_s)
        stream.send(what, head, timeout_s=timeout_s)
        return stream

    # a relay

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self._direct.accept(CHANNEL, timeout_s=1.0)
            except TransportTimeout:
                continue
            except TransportError:
                return
            with self._lock:
                crowded = self._asking.total() >= MAX_ASKING or self._asking[stream.peer] >= MAX_ASKING_OF_ONE
                self._asking[stream.peer] += not crowded
            if crowded:
                stream.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(stream,), daemon=True).start()
            except RuntimeError as error:  # out of threads: others must still get in later
                log.warning("%s cannot relay for %s: %s", self._direct.identity, stream.peer, error)
                self._asked(stream)
                stream.close()

    def _asked(self, stream: Stream) -> None:
        """Count a question as answered, or as one that has bounds of its own from here on."""
        with self._lock:
            self._asking[stream.peer] -= 1

    def _answer(self, stream: Stream) -> None:
        asks = True
        try:
            asked = stream.receive(_small, timeout_s=ASK_S)
            if asked.kind not in (DIAL, FILL):
                asks = False
                self._asked(stream)
            answers = {
                DIAL: self._tell_whether_dialled, FILL: self._fill, SERVE: self._serve, OPEN: self._open,
                BACK: self._hand_over,
            }  # fmt: skip
            if (answer := answers.get(asked.kind)) is None:
                raise FrameError(f"{stream.peer} asks a relay for {asked.kind}")
            answer(stream, asked.head)
        except (TransportError, OSError) as error:
            log.info("%s: nothing is relayed for %s: %s", self._direct.identity, stream.peer, error)
            stream.close()
        finally:
            if asks:
                self._asked(stream)

    def _tell_whether_dialled(self, stream: Stream, _: bytes) -> None:
        """Open a connection to whoever asks, at the address of its record: only with its certificate it counts."""
        address = self._addresses.get(stream.peer)
        try:
            if address is None:
                raise PeerLost("its record is not known")
            self._direct.connect(address, CHANNEL, timeout_s=DIAL_S).close()
        except TransportError as error:
            log.info("%s cannot dial %s: %s", self._direct.identity, stream.peer, error)
            stream.send(NO, timeout_s=ASK_S)
        else:
            stream.send(YES, timeout_s=ASK_S)
        stream.close()

    def _fill(self, stream: Stream, _: bytes) -> None:
        """Send what somebody measures its link with, at this relay's rate."""
        for _number in range(MEASURED_CHUNKS):
            self._bucket.pass_through(CHUNK_BYTES)
            stream.send(BYTES, b"", bytes(CHUNK_BYTES), timeout_s=ASK_S)
        with suppress(TransportError):  # it hangs up when it has all
            stream.receive(_small, timeout_s=ASK_S)
        stream.close()

    def _serve(self, stream: Stream, _: bytes) -> None:
        peer = stream.peer
        with self._lock:
            agreed = self._serves and (len(self._served) < MAX_SERVED or peer in self._served)
            before = self._served.get(peer)
            if agreed:
                self._served[peer] = stream
        if not agreed:
            stream.send(NO, timeout_s=ASK_S)
            stream.close()
            return
        if before is not None:
            before.close()
        try:
            stream.send(YES, timeout_s=ASK_S)
            self._say(peer, "others cannot dial it: its streams go through this island")
            while True:
                stream.receive(_small, timeout_s=SILENT_S)
                stream.send(BEAT, timeout_s=ASK_S)
        except TransportError as lost:
            log.info("%s is relayed for no more: %s", peer, lost)
        finally:
            stream.close()
            with self._lock:
                if self._served.get(peer) is stream:
                    del self._served[peer]

    def _call(self, peer: str, timeout_s: float) -> Stream:
        """Have an island that is served open a connection to here, and return that."""
        with self._lock:
            served = self._served.get(peer)
        if served is None:
            raise PeerLost(f"{peer} has no connection open to here")
        token, call = secrets.token_bytes(TOKEN_BYTES), Call()
        with self._lock:
            self._calls[token] = peer, call
        try:
            served.send(CALL, token, timeout_s=timeout_s)
            return call.wait(peer, timeout_s)
        finally:
            with self._lock:
                self._calls.pop(token, None)

    def _hand_over(self, stream: Stream, token: bytes) -> None:
        with self._lock:
            peer, call = self._calls.pop(token, ("", None))
        if call is None or peer != stream.peer or not call.answer(stream):
            raise FrameError("nobody has called it")

    def _open(self, stream: Stream, head: bytes) -> None:
        target = head.decode(errors="replace")
        with self._lock:
            crowded = self._tunnels.total() >= MAX_TUNNELS or self._tunnels[stream.peer] >= MAX_TUNNELS_OF_ONE
            if not crowded:
                self._tunnels[stream.peer] += 1
        if crowded:
            stream.send(NO, b"it has too many tunnels already", timeout_s=ASK_S)
            stream.close()
            return
        try:
            try:
                other = self._call(target, ASK_S)
            except TransportError as error:
                stream.send(NO, str(error).encode()[:100], timeout_s=ASK_S)
                return
            stream.send(YES, timeout_s=ASK_S)
            self._splice(stream, other, self.traffic.setdefault(target, Traffic()))
        finally:
            stream.close()
            with self._lock:
                self._tunnels[stream.peer] -= 1

    def _splice(self, one: Stream, other: Stream, traffic: Traffic) -> None:
        back = threading.Thread(target=self._pass_on, args=(other, one, traffic), daemon=True)
        back.start()
        self._pass_on(one, other, traffic)
        back.join()

    def _pass_on(self, source: Stream, target: Stream, traffic: Traffic) -> None:
        with suppress(TransportError):
            while True:
                frame = source.receive(_chunk, timeout_s=IDLE_S)
                self._bucket.pass_through(len(frame.payload))
                traffic.bytes += len(frame.payload)
                target.send(BYTES, b"", frame.payload)
        source.close()
        target.close()

    def close(self) -> None:
        """Serve nobody any more, and give up this island's own relay."""
        self._closed = True
        with self._lock:
            streams = [*self._served.values(), *([self._own] if self._own is not None else [])]
        for stream in streams:
            stream.close()


class Call:
    """Wait for the connection that an island opens when it is called."""

    def __init__(self) -> None:
        self._came, self._lock = threading.Event(), threading.Lock()
        self._stream: Stream | None = None
        self._over = False

    def answer(self, stream: Stream) -> bool:
        """Hand the connection over; return False if nobody waits any more."""
        with self._lock:
            if self._over:
                return False
            self._stream = stream
        self._came.set()
        return True

    def wait(self, peer: str, timeout_s: float) -> Stream:
        """Return the connection; raise TransportTimeout if it does not come in time."""
        self._came.wait(timeout_s)
        with self._lock:
            self._over = True
        if self._stream is None:
            raise TransportTimeout(f"{peer} was called, and has not answered")
        return self._stream


def _end_of_tunnel(stream: Stream) -> socket.socket:
    """Return a socket whose bytes go through the stream, both ways, until either is closed."""
    near, far = socket.socketpair()
    threading.Thread(target=_send_all, args=(far, stream), daemon=True).start()
    threading.Thread(target=_receive_all, args=(stream, far), daemon=True).start()
    return near


def _send_all(far: socket.socket, stream: Stream) -> None:
    with suppress(OSError, TransportError):
        while data := far.recv(CHUNK_BYTES):
            stream.send(BYTES, b"", data)
    stream.close()
    _hang_up(far)


def _receive_all(stream: Stream, far: socket.socket) -> None:
    with suppress(OSError, TransportError):
        while True:
            far.sendall(stream.receive(_chunk).payload)
    stream.close()
    _hang_up(far)


def _hang_up(far: socket.socket) -> None:
    with suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)


def _small(kind: int, head: bytes, length: int) -> memoryview:
    if length or len(head) > 256:
        raise FrameError("a relay speaks in short frames")
    return memoryview(bytearray())


def _chunk(kind: int, head: bytes, length: int) -> memoryview:
    if kind not in (BYTES, END) or length > CHUNK_BYTES:
        raise FrameError(f"a frame of kind {kind} with {length} bytes in a tunnel")
    return memoryview(bytearray(length))
