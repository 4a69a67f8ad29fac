"""A wire over a socket: calls that block up to a deadline, and that any thread may end by closing.

The socket is non-blocking and waiting happens in poll(), which a shutdown of the socket wakes.
"""

import select
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from diloco.comm.transport.wire import Deadline, deadline_in, seconds_to
from diloco.errors import PeerLost, StreamClosed

TURN_BYTES = 1024 * 1024  # for one direction, before the other may have the connection


class SocketWire(ABC):
    secure: bool

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        self.peer = peer
        self._socket = connection
        self._lock = threading.Lock()
        self._closed = False
        self._users = 0  # threads inside a call: the last one out closes the descriptor

    def write(self, data: memoryview, deadline: Deadline) -> None:
        with self._in_use():
            self._all_of(data, self._send_some, select.POLLOUT, lambda: deadline)

    def read_into(self, view: memoryview, stall_s: float) -> None:
        with self._in_use():
            self._all_of(view, self._read_some, select.POLLIN, lambda: deadline_in(stall_s))

    def wait(self, deadline: Deadline) -> bool:
        with self._in_use():
            return self._has_pending() or self._poll(select.POLLIN, deadline)

    @abstractmethod
    def _send_some(self, data: memoryview) -> int:
        """How many bytes went out. Like the others, it raises what the socket does when it would have to wait."""

    @abstractmethod
    def _read_some(self, view: memoryview) -> int:
        """How many bytes came in; 0 when the connection was cut."""

    @abstractmethod
    def _has_pending(self) -> bool:
        """Whether bytes are here that the socket does not know of any more."""

    @abstractmethod
    def bytes_for(self, length: int) -> int: ...

    def _all_of(
        self, view: memoryview, some: Callable[[memoryview], int], event: int, deadline: Callable[[], Deadline]
    ) -> None:
        """`deadline` is asked before each wait, that is after whatever progress was made."""
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
