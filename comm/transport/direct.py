"""The transport for bulk: TCP with mutual TLS 1.3. Both sides accept exactly the certificates of signed peer records.

Several streams to a peer are several connects. Peers that may connect are named with `allow()`. Who is not known yet
begins a connection with `KNOCK` in place of TLS, and gets no further than to whoever serves visitors (`rendezvous.py`).
"""

import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress

from diloco.comm.transport import certificate
from diloco.comm.transport.socketwire import SOCKET_BUFFER_BYTES, TlsWire, tune
from diloco.comm.transport.transport import Accepting, Inbox, PeerAddress, Stream, open_channel, read_channel
from diloco.comm.transport.wire import Deadline, WireCarrier, deadline_in, seconds_to
from diloco.errors import PeerLost, PeerRefused, TransportError, WrongPeer

HANDSHAKE_S = 10.0
KNOCK = b"diloco rendezvous 1\n"  # TLS begins with 22
MAX_HANDSHAKES = 64  # at the same time: strangers cannot make us hold more threads than that

log = logging.getLogger(__name__)


class Handshakes:
    """Hold the unfinished handshakes, oldest first, each with the place that it comes from.

    One too many ends the oldest of the place that has most: silent strangers keep no member out, however fast they
    come, unless they come from as many places as there are handshakes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[ssl.SSLSocket, str] = {}

    def add(self, connection: ssl.SSLSocket, host: str) -> None:
        """Add a connection whose handshake begins; if there are 64 already, end one."""
        with self._lock:
            if len(self._pending) >= MAX_HANDSHAKES:
                busiest = Counter(self._pending.values()).most_common(1)[0][0]
                oldest = next(pending for pending, place in self._pending.items() if place == busiest)
                del self._pending[oldest]
                _wake(oldest)
            self._pending[connection] = _place(host)

    def replace(self, connection: ssl.SSLSocket, other: ssl.SSLSocket) -> bool:
        """Put another one in the place of a connection; return False where that had to make way."""
        with self._lock:
            place = self._pending.pop(connection, None)
            if place is not None:
                self._pending[other] = place
            return place is not None

    def remove(self, connection: ssl.SSLSocket) -> bool:
        """Remove a connection; return False where it had to make way."""
        with self._lock:
            return self._pending.pop(connection, None) is not None


class DirectTransport(Accepting):
    """Open and accept streams over TCP with mutual TLS, on a port that the system chooses if none is given."""

    def __init__(self, identity: str, host: str, *, port: int = 0, inbox: Inbox | None = None) -> None:
        super().__init__(identity, inbox)
        self._certificate = certificate.create_certificate(identity)
        self._identities: dict[bytes, str] = {}
        self._context = certificate.server_context(self._certificate, [])
        self._rendezvous = certificate.rendezvous_context(self._certificate)
        self._serve_visitor: Callable[[Stream], None] | None = None
        self._handshakes = Handshakes()
        self._listener = _listen(host, port)
        self._closed = False
        threading.Thread(target=self._listen, name=f"accept-{identity}", daemon=True).start()

    def address(self, host: str) -> PeerAddress:
        """Return what this peer publishes; `host` is how others see this machine."""
        return PeerAddress(self.identity, host, self._listener.getsockname()[1], self._certificate.der)

    def allow(self, peers: Iterable[PeerAddress]) -> None:
        """Let exactly these peers connect from now on. Streams that exist stay."""
        identities = self._owners(peers)
        if identities == self._identities:
            return
        context = certificate.server_context(self._certificate, identities)
        self._identities, self._context = identities, context

    def _owners(self, peers: Iterable[PeerAddress]) -> dict[bytes, str]:
        """Return who each certificate belongs to.

        Of several who claim one, it is the one that it names; if it names none, it proves nothing: one could pass for
        another.
        """
        claims: dict[bytes, set[str]] = defaultdict(set)
        for peer in peers:
            if problem := certificate.certificate_problem(peer.certificate_der):
                log.warning("%s does not admit %s: unreadable certificate (%s)", self.identity, peer.identity, problem)
            else:
                claims[peer.certificate_der].add(peer.identity)
        return {der: owner for der, claimants in claims.items() if (owner := self._owner(der, claimants)) is not None}

    def _owner(self, der: bytes, claimants: set[str]) -> str | None:
        if len(claimants) == 1:
            return next(iter(claimants))
        named, names = certificate.owner_named_in(der), ", ".join(sorted(claimants))
        log.warning("%s: %s claim the same certificate, of %s", self.identity, names, named or "nobody")
        return named if named in claimants else None

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a stream to this peer.

        Raises WrongPeer if another one answers there, PeerRefused if it does not admit us.
        """
        deadline = deadline_in(timeout_s)
        if problem := certificate.certificate_problem(peer.certificate_der):
            raise PeerLost(f"{peer.identity}: the certificate of its record is unreadable ({problem})")
        plain = _reach(peer, deadline)
        tune(plain)
        return self.connect_over(plain, peer, channel, deadline)

    def connect_over(self, plain: socket.socket, peer: PeerAddress, channel: str, deadline: Deadline) -> Stream:
        """Open a stream over a connection to this peer that exists already: a direct one, or a tunnel."""
        wire = TlsWire(self._secure(plain, peer, deadline), peer.identity)
        stream = self.inbox.keep(Stream(WireCarrier(wire)))
        try:
            return open_channel(stream, channel, seconds_to(deadline) or 0.0)
        except PeerLost as lost:  # TLS 1.3 tells a client only now that its certificate was refused
            if "alert" in str(lost).lower():
                raise PeerRefused(f"{peer.identity} refused the certificate of {self.identity}: {lost}") from None
            raise

    def shake_hands_over(self, plain: socket.socket, peer: PeerAddress, deadline: Deadline) -> None:
        """Find out that this peer, by its key, is at the other end of a connection; raise TransportError if not."""
        self._secure(plain, peer, deadline).close()

    def _secure(self, plain: socket.socket, peer: PeerAddress, deadline: Deadline) -> ssl.SSLSocket:
        try:
            context = certificate.client_context(self._certificate, peer.certificate_der)
            plain.settimeout(_time_left(deadline))
            connection = context.wrap_socket(plain)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise WrongPeer(f"{peer.identity}: its certificate is not that of its record ({error})") from None
        except OSError as error:
            plain.close()
            raise PeerLost(f"{peer.identity} at {peer.host}:{peer.port}: no TLS ({error})") from None
        if connection.getpeercert(binary_form=True) != peer.certificate_der:
            connection.close()
            raise WrongPeer(f"{peer.identity}: its certificate is not that of its record")
        return connection

    def serve_visitors(self, serve: Callable[[Stream], None]) -> None:
        """Have this called, on a thread of its own, with every stream that begins with `KNOCK`: it may be anybody's."""
        self._serve_visitor = serve

    def visit(self, peer: str, host: str, port: int, timeout_s: float) -> tuple[Stream, bytes]:
        """Open a stream to the rendezvous at an address; return it with the certificate that was shown there.

        Whether that is the peer's is for the caller to find out.
        """
        deadline = deadline_in(timeout_s)
        plain = _reach(PeerAddress(peer, host, port), deadline)
        try:
            tune(plain)
            plain.settimeout(_time_left(deadline))
            plain.sendall(KNOCK)
            connection = certificate.visitor_context().wrap_socket(plain)
        except OSError as error:
            plain.close()
            raise PeerLost(f"{peer} at {host}:{port}: no rendezvous ({error})") from None
        shown = connection.getpeercert(binary_form=True) or b""
        return self.inbox.keep(Stream(WireCarrier(TlsWire(connection, peer)))), shown

    def _listen(self) -> None:
        while not self._closed:
            try:
                plain, where = self._listener.accept()
            except OSError as error:
                if not self._closed:  # out of descriptors, say: others must still get in later
                    log.warning("%s: cannot accept (%s)", self.identity, error)
                    time.sleep(0.1)
                continue
            with suppress(OSError):  # it is broken already: the handshake will tell
                tune(plain)
            self.take_in(plain, where[0])
        self._listener.close()

    def take_in(self, plain: socket.socket, host: str) -> None:
        """Start the handshake of a connection; everything that may block happens in a thread of its own."""
        identities, context = self._identities, self._context
        try:
            plain.settimeout(HANDSHAKE_S)
            connection = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            log.info("%s lost a connection from %s: %s", self.identity, host, error)  # strangers can fill no disk
            plain.close()
            return
        self._handshakes.add(connection, host)
        try:
            threading.Thread(target=self._welcome, args=(connection, identities, host), daemon=True).start()
        except RuntimeError as error:  # out of threads: others must still get in later
            log.warning("%s cannot serve a connection from %s: %s", self.identity, host, error)
            self._handshakes.remove(connection)
            connection.close()

    def _welcome(self, connection: ssl.SSLSocket, identities: dict[bytes, str], host: str) -> None:
        stream = None
        try:
            if self._serve_visitor is not None and _peek(connection) == KNOCK[:1]:
                connection = self._as_visitor(connection)
                self._receive_visitor(connection, host)
                return
            stream = self._admit(connection, identities)
            channel = read_channel(stream, HANDSHAKE_S)
            if not self._handshakes.remove(connection):
                raise PeerRefused("its handshake made way for newer ones")
            self.inbox.put(channel, stream)
        except (OSError, TransportError) as error:
            log.info("%s refused a connection from %s: %s", self.identity, host, error)
            self._handshakes.remove(connection)
            (stream or connection).close()

    def _as_visitor(self, connection: ssl.SSLSocket) -> ssl.SSLSocket:
        """Return the same connection with a TLS that asks for no certificate, and its handshake done."""
        knock = b""
        while len(knock) < len(KNOCK) and (more := socket.socket.recv(connection, len(KNOCK) - len(knock))):
            knock += more
        if knock != KNOCK:
            raise PeerRefused("it speaks neither TLS nor knocks")
        plain = socket.socket(fileno=connection.detach())
        plain.settimeout(HANDSHAKE_S)
        visitor = self._rendezvous.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        if not self._handshakes.replace(connection, visitor):
            visitor.close()
            raise PeerRefused("its handshake made way for newer ones")
        return visitor

    def _receive_visitor(self, connection: ssl.SSLSocket, host: str) -> None:
        """Serve a visitor; its connection counts as an unfinished handshake until it is closed."""
        assert self._serve_visitor is not None
        connection.do_handshake()
        stream = self.inbox.keep(Stream(WireCarrier(TlsWire(connection, host))))
        try:
            self._serve_visitor(stream)
        finally:
            self._handshakes.remove(connection)
            stream.close()

    def _admit(self, connection: ssl.SSLSocket, identities: dict[bytes, str]) -> Stream:
        connection.do_handshake()
        identity = identities.get(connection.getpeercert(binary_form=True) or b"")
        if identity is None:
            raise PeerRefused("its certificate belongs to no peer we know")
        return Stream(WireCarrier(TlsWire(connection, identity)))

    def close(self) -> None:
        """Stop listening, and close all streams."""
        self._closed = True
        with suppress(OSError):  # not every system can shut a listening socket down
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        super().close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    # inherited by accepted sockets; it must be set before the connection is made to widen the TCP window
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    return listener


def _reach(peer: PeerAddress, deadline: Deadline) -> socket.socket:
    try:
        return socket.create_connection((peer.host, peer.port), _time_left(deadline))
    except (OSError, ValueError) as error:  # ValueError: a host that is no name, such as "a..b"
        raise PeerLost(f"{peer.identity} cannot be reached at {peer.host}:{peer.port} ({error})") from None


def _peek(connection: ssl.SSLSocket) -> bytes:
    """Return the first byte that a connection brings, before TLS has read it."""
    return socket.socket.recv(connection, 1, socket.MSG_PEEK)


def _time_left(deadline: Deadline) -> float:
    """Return the seconds left, or raise TimeoutError. For sockets, to which a timeout of 0 means something else."""
    left = seconds_to(deadline)
    if not left:
        raise TimeoutError("timed out")
    return left


def _place(host: str) -> str:
    """Return what one machine cannot easily change of its address: of IPv6, the network's half."""
    try:
        return str(ipaddress.ip_network(f"{host.partition('%')[0]}/64", strict=False)) if ":" in host else host
    except ValueError:
        return host


def _wake(connection: socket.socket) -> None:
    """Shut the connection down: the thread that waits for it gets an error and closes it.

    Closed under that thread, its descriptor could belong to another connection.
    """
    with suppress(OSError):  # it may be broken already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
