"""The bytes of one TLS connection.

OpenSSL forbids two threads in one connection at the same time and Python 3.11 does not guard it: the socket is
non-blocking, a lock is held for a few records, and waiting happens outside the lock in poll().
"""

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from diloco.comm.wire import Deadline, seconds_to
from diloco.errors import PeerLost, StreamClosed

TURN_BYTES = 256 * 1024  # for one direction, before the other may have the connection
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
RECORD_BYTES = 16 * 1024
RECORD_OVERHEAD = 22  # 5 header, 1 content type, 16 tag
TCP_CORK: int | None = getattr(socket, "TCP_CORK", None)  # Linux only


def tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


class TlsWire:
    secure = True

    def __init__(self, connection: ssl.SSLSocket, peer: str) -> None:
        connection.setblocking(False)
        self.peer = peer
        self._socket = connection
        self._lock = threading.Lock()
        self._closed = False
        self._users = 0  # threads inside a call: the last one out closes the descriptor

    def write(self, data: memoryview, deadline: Deadline) -> None:
        with self._in_use():
            if len(data) <= RECORD_BYTES:
                self._write(data, deadline)
                return
            self._cork(True)
            try:
                self._write(data, deadline)
            finally:
                self._cork(False)

    def read_into(self, view: memoryview, deadline: Deadline) -> None:
        with self._in_use():
            self._read_into(view, deadline)

    def wait(self, deadline: Deadline) -> bool:
        with self._in_use():
            with self._lock:
                pending = self._socket.pending()
            return bool(pending) or self._poll(select.POLLIN, deadline)

    def _cork(self, corked: bool) -> None:
        """OpenSSL writes record by record. The kernel should send full segments, not wake the peer for each record."""
        if TCP_CORK is not None:
            with suppress(OSError):  # on a broken connection, of which the write tells
                self._socket.setsockopt(socket.IPPROTO_TCP, TCP_CORK, corked)

    def _write(self, data: memoryview, deadline: Deadline) -> None:
        sent = 0
        while sent < len(data):
            try:
                with self._lock:
                    sent += self._socket.send(data[sent : sent + TURN_BYTES])
            except ssl.SSLWantWriteError:
                self._wait_within(select.POLLOUT, deadline)
            except ssl.SSLWantReadError:
                self._wait_within(select.POLLIN, deadline)
            except OSError as error:
                raise self._broken(error) from None

    def _read_into(self, view: memoryview, deadline: Deadline) -> None:
        while len(view):
            try:
                view = view[self._read_some(view[:TURN_BYTES]) :]
            except ssl.SSLWantReadError:
                self._wait_within(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait_within(select.POLLOUT, deadline)
            except OSError as error:
                raise self._broken(error) from None

    def _read_some(self, view: memoryview) -> int:
        """What is at hand, at least one record: OpenSSL hands them out one by one."""
        filled, size = 0, len(view)
        with self._lock:
            while filled < size:
                try:
                    count = int(self._socket.read(size - filled, view[filled:]))
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if filled:
                        break
                    raise
                if not count:
                    raise ConnectionError("cut before its end mark")
                filled += count
        return filled

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

    def bytes_for(self, length: int) -> int:
        return length + RECORD_OVERHEAD * -(-length // RECORD_BYTES)

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
        """Wakes whoever waits in poll(), and who leaves last closes the descriptor: closed under a thread that still
        polls it, its number could belong to another connection."""
        self._closed = True
        with suppress(OSError):  # it may be broken already
            # SSLSocket.shutdown would also drop the TLS layer: a thread still reading would get ciphertext as data
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with self._lock:
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and not self._users:
            self._socket.close()
