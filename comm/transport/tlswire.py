"""The bytes of one TLS connection.

OpenSSL forbids two threads in one connection at the same time and Python 3.11 does not guard it: a lock is held for a
few records, and waiting happens outside of it.
"""

import socket
import ssl
from contextlib import suppress

from diloco.comm.transport.socketwire import SocketWire
from diloco.comm.transport.wire import Deadline

SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
RECORD_BYTES = 16 * 1024
RECORD_OVERHEAD = 22  # 5 header, 1 content type, 16 tag
# On an idle connection, a peer that vanished without a word is noticed within half a minute. Not TCP_USER_TIMEOUT for
# busy ones: it would also cut a peer that is there and merely slow to read.
PATIENCE = {
    "TCP_KEEPIDLE": 15,  # seconds
    "TCP_KEEPALIVE": 15,  # the same, on macOS
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
}
TCP_CORK: int | None = getattr(socket, "TCP_CORK", None)  # Linux only


def tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PATIENCE.items():
        option: int | None = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TlsWire(SocketWire):
    secure = True
    _socket: ssl.SSLSocket

    def write(self, data: memoryview, deadline: Deadline) -> None:
        if len(data) <= RECORD_BYTES:
            super().write(data, deadline)
            return
        self._cork(True)
        try:
            super().write(data, deadline)
        finally:
            self._cork(False)

    def _cork(self, corked: bool) -> None:
        """OpenSSL writes record by record. The kernel should send full segments, not wake the peer for each record."""
        if TCP_CORK is not None:
            with suppress(OSError):  # on a broken or closed connection, of which the write tells
                self._socket.setsockopt(socket.IPPROTO_TCP, TCP_CORK, corked)

    def _send_some(self, data: memoryview) -> int:
        with self._lock:
            return self._socket.send(data)

    def _read_some(self, view: memoryview) -> int:
        """Several records where they are at hand: OpenSSL hands them out one by one, thousands in a round. So not by
        SSLSocket.read, which looks each time whether there still is a TLS layer: here there always is."""
        filled, size = 0, len(view)
        read = self._socket._sslobj.read  # type: ignore[attr-defined]
        with self._lock:
            while filled < size:
                try:
                    count = int(read(size - filled, view[filled:]))
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if filled:
                        break
                    raise
                except ssl.SSLEOFError:  # we close without a farewell
                    break
                if not count:
                    break
                filled += count
        return filled

    def _has_pending(self) -> bool:
        with self._lock:
            return bool(self._socket.pending())

    def bytes_for(self, length: int) -> int:
        return length + RECORD_OVERHEAD * -(-length // RECORD_BYTES)
