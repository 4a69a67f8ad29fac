"""The transport for bulk: TCP with mutual TLS 1.3. Both sides accept exactly the certificates of signed peer records.

Several streams to a peer are several connects. Peers that may connect are named with `allow()`.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from diloco.comm.certificate import client_context, create_certificate, server_context
from diloco.comm.frame import Limits
from diloco.comm.inbox import Inbox, open_channel, read_channel
from diloco.comm.tlswire import SOCKET_BUFFER_BYTES, TlsWire, tune
from diloco.comm.transport import PeerAddress, Stream
from diloco.comm.wire import WireCarrier
from diloco.errors import PeerLost, PeerRefused, TransportError, WrongPeer

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 64  # at the same time: strangers cannot make us hold more threads than that

log = logging.getLogger(__name__)


class DirectTransport:
    def __init__(
        self,
        identity: str,
        host: str = "0.0.0.0",
        port: int = 0,
        *,
        limits: Limits | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self.identity = identity
        self.limits = limits or Limits()
        self.inbox = inbox or Inbox()
        self._certificate = create_certificate()
        self._identities: dict[bytes, str] = {}
        self._context = server_context(self._certificate, [])
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._listener = _listen(host, port)
        self._closed = False
        threading.Thread(target=self._listen, name=f"accept-{identity}", daemon=True).start()

    def address(self, host: str) -> PeerAddress:
        """What this peer publishes; `host` is how others see this machine."""
        return PeerAddress(self.identity, host, self._listener.getsockname()[1], self._certificate.der)

    def allow(self, peers: Iterable[PeerAddress]) -> None:
        """Exactly these may connect from now on. Streams that exist stay."""
        identities = {peer.certificate_der: peer.identity for peer in peers}
        context = server_context(self._certificate, identities)
        self._identities, self._context = identities, context

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        wire = TlsWire(self._dial(peer, timeout_s), peer.identity)
        stream = self.inbox.keep(Stream(WireCarrier(wire, self.limits)))
        try:
            return open_channel(stream, channel, timeout_s)
        except PeerLost as lost:  # TLS 1.3 tells a client only now that its certificate was refused
            if "alert" in str(lost).lower():
                raise PeerRefused(f"{peer.identity} refused the certificate of {self.identity}: {lost}") from None
            raise

    def _dial(self, peer: PeerAddress, timeout_s: float) -> ssl.SSLSocket:
        context = client_context(self._certificate, peer.certificate_der)
        try:
            plain = socket.create_connection((peer.host, peer.port), timeout_s)
        except OSError as error:
            raise PeerLost(f"{peer.identity} cannot be reached at {peer.host}:{peer.port} ({error})") from None
        tune(plain)
        try:
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

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        return self.inbox.take(channel, timeout_s)

    def _listen(self) -> None:
        while not self._closed:
            try:
                plain, where = self._listener.accept()
            except OSError as error:
                if not self._closed:  # out of descriptors, say: others must still get in later
                    log.warning("%s: cannot accept (%s)", self.identity, error)
                    time.sleep(0.1)
                continue
            self._handshakes.acquire()
            threading.Thread(target=self._welcome, args=(plain, where), daemon=True).start()
        self._listener.close()

    def _welcome(self, plain: socket.socket, where: tuple[str, int]) -> None:
        stream = None
        try:
            stream = self._admit(plain)
            self.inbox.put(read_channel(stream, HANDSHAKE_S), stream)
        except (OSError, TransportError) as error:
            log.warning("%s refused a connection from %s: %s", self.identity, where[0], error)
            (stream or plain).close()
        finally:
            self._handshakes.release()

    def _admit(self, plain: socket.socket) -> Stream:
        identities, context = self._identities, self._context
        tune(plain)
        plain.settimeout(HANDSHAKE_S)
        connection = context.wrap_socket(plain, server_side=True)
        identity = identities.get(connection.getpeercert(binary_form=True) or b"")
        if identity is None:
            connection.close()
            raise PeerRefused("its certificate belongs to no peer we know")
        return Stream(WireCarrier(TlsWire(connection, identity), self.limits))

    def forget(self, channel: str) -> None:
        self.inbox.forget(channel)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):  # not every system can shut a listening socket down
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        self.inbox.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    # inherited by accepted sockets; it must be set before the connection is made to widen the TCP window
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    return listener
