"""The transport for peers that cannot be reached directly: libp2p streams, through relays and punched holes.

hivemind's daemon p2pd hands over every stream as a local socket. It is opened on the directory's loop and then taken
from it: ordinary threads read and write it, so that the kernel's buffers are the only ones, a slow reader stops the
sender, and the end of p2pd, for which the kernel closes every socket, wakes whoever waits.

Through a relay go control messages rather than bulk: p2pd relays 128 KiB or two minutes of a connection and then cuts
it with all its streams; 4 GiB or half an hour where its peers have found it to be public.
"""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from diloco.comm.peers.directory import Directory
from diloco.comm.transport.frame import Limits
from diloco.comm.transport.inbox import Inbox, open_channel, read_channel, refusal
from diloco.comm.transport.socketwire import SocketWire
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import WireCarrier, deadline_in, seconds_to
from diloco.errors import DirectoryError, PeerLost, TransportError

PROTOCOL = "/diloco/stream/1"
HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 256  # at the same time, of peers that may connect; strangers get no thread at all
SOCKET_BUFFER_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


class Libp2pWire(SocketWire):
    # libp2p authenticates what goes from daemon to daemon, relays included. The checksum also covers the way through
    # the daemons themselves, and costs a hundredth of what they do.
    secure = False

    def __init__(self, connection: socket.socket, early: bytes, peer: str) -> None:
        """`early` is what had been read of the connection before it came here."""
        super().__init__(connection, peer)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._early = memoryview(early)

    def _send_some(self, data: memoryview) -> int:
        return self._socket.send(data)

    def _read_some(self, view: memoryview) -> int:
        if not self._early:
            return self._socket.recv_into(view)
        count = min(len(view), len(self._early))
        view[:count], self._early = self._early[:count], self._early[count:]
        return count

    def _has_pending(self) -> bool:
        return bool(self._early)

    def bytes_for(self, length: int) -> int:
        return length  # what p2pd adds cannot be seen from here: about one in a thousand


async def detach(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[socket.socket, bytes]:
    """A socket of its own for what was the loop's, and what the loop had read of it."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    reader.feed_eof()
    early = await reader.read()  # never waits: the end was fed
    connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
    writer.transport.abort()  # closes the loop's descriptor, not the connection
    return connection, early


class Libp2pTransport:
    """Streams of the directory's peer. One for each directory: it serves all streams that come in."""

    def __init__(self, directory: Directory, *, limits: Limits | None = None, inbox: Inbox | None = None) -> None:
        self.identity = directory.identity.peer_id
        self.limits = limits or Limits()
        self.inbox = inbox or Inbox()
        self._shares_inbox = inbox is not None
        self._directory = directory
        self._p2p = directory.p2p
        self._allowed: frozenset[str] = frozenset()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._closed = False
        directory.call(self._p2p.add_binary_stream_handler(PROTOCOL, self._on_stream))
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), directory.thread.loop)

    def address(self) -> PeerAddress:
        return PeerAddress(self.identity, control=self._directory.addresses)

    def allow(self, peers: Iterable[PeerAddress]) -> None:
        """Exactly these may connect from now on. Streams that exist stay."""
        self._allowed = frozenset(peer.identity for peer in peers)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        deadline = deadline_in(timeout_s)
        try:
            wire = self._directory.call(self._open(peer), timeout_s)
        except DirectoryError as error:
            raise PeerLost(f"{peer.identity}: no libp2p stream ({error})") from None
        stream = self.inbox.keep(Stream(WireCarrier(wire, self.limits)))
        return open_channel(stream, channel, seconds_to(deadline) or 0.0)

    async def _open(self, peer: PeerAddress) -> Libp2pWire:
        reader, writer = await self._p2p.open_stream(peer.identity, peer.control, PROTOCOL)
        return Libp2pWire(*await detach(reader, writer), peer.identity)

    def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
        return self.inbox.take(channel, timeout_s)

    def forget(self, channel: str) -> None:
        self.inbox.forget(channel)

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(info.peer_id)
        if peer not in self._allowed:
            reason = "not among the peers that may connect"
            log.info("%s refused a stream from %s: %s", self.identity, peer, reason)  # perhaps its record comes soon
            writer.write(refusal(reason))
            writer.close()
        elif not self._handshakes.acquire(blocking=False):
            self._drop(writer, peer, f"{MAX_HANDSHAKES} others are being opened")
        else:
            await self._take_over(peer, reader, writer)

    def _drop(self, writer: asyncio.StreamWriter, peer: str, reason: object) -> None:
        log.warning("%s refused a stream from %s: %s", self.identity, peer, reason)
        writer.close()

    async def _take_over(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            wire = Libp2pWire(*await detach(reader, writer), peer)
        except OSError as error:
            self._handshakes.release()
            self._drop(writer, peer, error)
            return
        stream = Stream(WireCarrier(wire, self.limits))
        threading.Thread(target=self._welcome, args=(stream,), name=f"welcome-{peer}", daemon=True).start()

    def _welcome(self, stream: Stream) -> None:
        try:
            channel = read_channel(stream, HANDSHAKE_S)
            self.inbox.put(channel, stream)
        except TransportError as error:
            log.warning("%s refused a stream from %s: %s", self.identity, stream.peer, error)
            stream.close()
        finally:
            self._handshakes.release()

    async def _watch(self) -> None:
        """Streams end by themselves when p2pd does; whoever waits for new ones would wait for ever."""
        try:
            await self._p2p.ended()
        finally:
            if not self._closed:
                log.error("%s: p2pd has ended, there are no more libp2p streams", self.identity)
                if not self._shares_inbox:
                    self.inbox.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watching.cancel()
            with suppress(DirectoryError):  # no daemon any more: nobody who would send us streams
                self._directory.call(self._p2p.remove_binary_stream_handler(PROTOCOL))
        self.inbox.close()
