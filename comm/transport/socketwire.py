"""A wire over a socket, plain or with TLS: calls that block up to a deadline, and that any thread may end by closing.

The socket is non-blocking and waiting happens in poll(), which a shutdown of the socket wakes.
"""

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from diloco.comm.transport.wire import Deadline, deadline_in, seconds_to
from diloco.errors import PeerLost, StreamClosed

TURN_BYTES = 1024 * 1024  # for one direction, before the other may have the connection
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


class SocketWire:
    """Carry bytes over a plain socket. Calls block up to a deadline, and closing ends them."""

    secure = False

    def __init__(self, connection: socket.socket, peer: str, early: bytes = b"") -> None:
        """Take over a connection; `early` is what had been read of it before."""
        connection.setblocking(False)
        self.peer = peer
        self._socket = connection
        self._early = memoryview(early)
        self._lock = threading.Lock()
        self._closed = False
        self.bytes_read = 0
        self._users = 0  # threads inside a call: the last one out closes the descriptor

    def write(self, data: memoryview, deadline: Deadline) -> None:
        with self._in_use():
            self._all_of(data, self._send_some, select.POLLOUT, lambda: deadline)

    def read_into(self, view: memoryview, stall_s: float) -> None:
        def read_some(view: memoryview) -> int:
            count = self._read_some(view)
            self.bytes_read += count
            return count

        with self._in_use():
            self._all_of(view, read_some, select.POLLIN, lambda: deadline_in(stall_s))

    def wait(self, deadline: Deadline) -> bool:
        with self._in_use():
            return self._has_pending() or self._poll(select.POLLIN, deadline)

    def _send_some(self, data: memoryview) -> int:
        """Send some bytes and return how many.

        Like the others, it raises what the socket does when it would have to wait.
        """
        return self._socket.send(data)

    def _read_some(self, view: memoryview) -> int:
        """Read some bytes and return how many; 0 when the connection was cut."""
        if not self._early:
            return self._socket.recv_into(view)
        count = min(len(view), len(self._early))
        view[:count], self._early = self._early[:count], self._early[count:]
        return count

    def _has_pending(self) -> bool:
        """Tell whether bytes are here that the socket does not know of any more."""
        return bool(self._early)

    def bytes_for(self, length: int) -> int:
        return length

    def _all_of(
        self, view: memoryview, some: Callable[[memoryview], int], event: int, deadline: Callable[[], Deadline]
    ) -> None:
        """Repeat `some` until the whole view is done.

        `deadline` is asked before each wait, that is after whatever progress was made.
        """
        while len(view):
            try:
                count = some(view[:TURN_BYTES])
            except BlockingIOError:
                self._wait_within(event, deadline())
            except ssl.SSLWantReadError:
                self._wait_within(select.POLLIN, deadline())
            except ssl.SSLWantWriteError:
                self._wait_within(select.POLLOUT, deadline())
            except OSError as error:
                raise self._broken(error) from None
            else:
                if not count:
                    raise self._broken("cut before its end mark")
                view = view[count:]

    def _wait_within(self, event: int, deadline: Deadline) -> None:
        if not self._poll(event, deadline):
            raise PeerLost(f"{self.peer} stalled within a frame")

    def _poll(self, event: int, deadline: Deadline) -> bool:
        if self._closed:
            raise self._broken("")
        poller = select.poll()
        poller.register(self._socket.fileno(), event)
        left = seconds_to(deadline)
        return bool(poller.poll(None if left is None else left * 1000))

    def _broken(self, reason: object) -> PeerLost | StreamClosed:
        if self._closed:
            return StreamClosed(f"the stream to {self.peer} was closed here")
        return PeerLost(f"{self.peer}: connection lost ({reason})")

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise self._broken("")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def close(self) -> None:
        """Wake all threads that wait in poll(); the one that leaves last closes the descriptor.

        Closed under a thread that still polls it, its number could belong to another connection.
        """
        self._closed = True
        with suppress(OSError):  # it may be broken already
            # SSLSocket.shutdown would also drop the TLS layer: a thread still reading would get ciphertext as data
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with self._lock:
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and not self._users:
            self._socket.close()


class TlsWire(SocketWire):
    """Carry bytes over a TLS connection.

    OpenSSL forbids two threads in one connection at the same time and Python 3.11 does not guard it: a lock is held for
    a few records, and waiting happens outside of it.
    """

    secure = True
    _socket: ssl.SSLSocket

    def write(self, data: memoryview, deadline: Deadline) -> None:
        """Write all bytes; what is longer than one record goes out in full segments, not record by record."""
        if len(data) <= RECORD_BYTES:
            super().write(data, deadline)
            return
        self._cork(True)
        try:
            super().write(data, deadline)
        finally:
            self._cork(False)

    def _cork(self, corked: bool) -> None:
        """Cork the socket, or uncork it.

        OpenSSL writes record by record; the kernel should send full segments, not wake the peer for each record.
        """
        if TCP_CORK is not None:
            with suppress(OSError):  # on a broken or closed connection, of which the write tells
                self._socket.setsockopt(socket.IPPROTO_TCP, TCP_CORK, corked)

    def _send_some(self, data: memoryview) -> int:
        with self._lock:
            return self._socket.send(data)

    def _read_some(self, view: memoryview) -> int:
        """Read several records where they are at hand: OpenSSL hands them out one by one, thousands in a round.

        So not by SSLSocket.read, which looks each time whether there still is a TLS layer: here there always is.
        """
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
        """Return the length plus 22 bytes for each record of 16 KiB."""
        return length + RECORD_OVERHEAD * -(-length // RECORD_BYTES)


def tune(connection: socket.socket) -> None:
    """Set up a TCP socket: no delay, a large send buffer, and keepalive that notices a silent peer in half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PATIENCE.items():
        option: int | None = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
