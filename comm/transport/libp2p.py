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
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diloco.comm.transport.socketwire import SocketWire
from diloco.comm.transport.transport import Accepting, Inbox, PeerAddress, Stream, open_channel, read_channel, refusal
from diloco.comm.transport.wire import WireCarrier, deadline_in, seconds_to
from diloco.errors import DirectoryError, PeerLost, TransportError

if TYPE_CHECKING:
    from diloco.comm.peers.directory import Directory

PROTOCOL = "/diloco/stream/1"
HANDSHAKE_S = 10.0
P2PD_ENDS_S = 1.0  # from its broken connection to its exit code
MAX_HANDSHAKES = 256  # at the same time, of peers that may connect; strangers get no thread at all
SOCKET_BUFFER_BYTES = 1024 * 1024

log = logging.getLogger(__name__)


async def detach(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> SocketWire:
    """Take a stream from the loop, with what the loop had read of it, and return a wire with a socket of its own.

    It is not `secure`, though libp2p authenticates what goes from daemon to daemon, relays included: the checksum also
    covers the way through the daemons themselves, and costs a hundredth of what they do. What p2pd adds to the bytes
    cannot be seen from here: about one in a thousand.
    """
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    reader.feed_eof()
    early = await reader.read()  # never waits: the end was fed
    connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
    writer.transport.abort()  # closes the loop's descriptor, not the connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return SocketWire(connection, peer, early)


class Libp2pTransport(Accepting):
    """Open and accept libp2p streams as the directory's peer.

    One for each directory: it serves all streams that come in.
    """

    def __init__(self, directory: "Directory", *, inbox: Inbox | None = None) -> None:
        super().__init__(directory.identity.peer_id, inbox)
        self._shares_inbox = inbox is not None
        self._directory = directory
        self._allowed: frozenset[str] = frozenset()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._closed = False
        self._watching: Future[None] | None = None
        directory.after_reopening(self._serve)
        try:
            directory.call(self._serve())
        except DirectoryError as error:
            with suppress(DirectoryError):
                directory.thread.call(self._p2p.ended(), P2PD_ENDS_S)
            if directory.running:
                raise  # otherwise `reopen` serves them
            log.warning("%s: no libp2p streams come in until p2pd is started again: %s", self.identity, error)

    @property
    def _p2p(self) -> Any:
        return self._directory.p2p

    async def _serve(self) -> None:
        """Take the streams that come in through the present p2pd."""
        if not self._closed:
            await self._p2p.add_binary_stream_handler(PROTOCOL, self._on_stream)
            self._watching = asyncio.run_coroutine_threadsafe(self._watch(self._p2p), self._directory.thread.loop)

    def address(self) -> PeerAddress:
        """Return what this peer publishes for libp2p: its id and its multiaddrs."""
        return PeerAddress(self.identity, control=self._directory.addresses)

    def allow(self, peers: Iterable[PeerAddress]) -> None:
        """Let exactly these peers connect from now on. Streams that exist stay."""
        self._allowed = frozenset(peer.identity for peer in peers)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        """Open a libp2p stream to this peer, relayed if need be, within `timeout_s` altogether."""
        deadline = deadline_in(timeout_s)
        try:
            wire = self._directory.call(self._open(peer), timeout_s)
        except DirectoryError as error:
            raise PeerLost(f"{peer.identity}: no libp2p stream ({error})") from None
        stream = self.inbox.keep(Stream(WireCarrier(wire)))
        return open_channel(stream, channel, seconds_to(deadline) or 0.0)

    async def _open(self, peer: PeerAddress) -> SocketWire:
        return await detach(peer.identity, *await self._p2p.open_stream(peer.identity, peer.control, PROTOCOL))

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

    def _drop(self, stream: asyncio.StreamWriter | Stream, peer: str, reason: object) -> None:
        log.warning("%s refused a stream from %s: %s", self.identity, peer, reason)
        stream.close()

    async def _take_over(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = None
        try:
            stream = Stream(WireCarrier(await detach(peer, reader, writer)))
            threading.Thread(target=self._welcome, args=(stream,), name=f"welcome-{peer}", daemon=True).start()
        except (OSError, RuntimeError) as error:  # RuntimeError: out of threads; others must still get in later
            self._handshakes.release()
            self._drop(stream or writer, peer, error)

    def _welcome(self, stream: Stream) -> None:
        try:
            channel = read_channel(stream, HANDSHAKE_S)
            self.inbox.put(channel, stream)
        except TransportError as error:
            log.warning("%s refused a stream from %s: %s", self.identity, stream.peer, error)
            stream.close()
        finally:
            self._handshakes.release()

    async def _watch(self, p2p: Any) -> None:
        """Close the inbox when p2pd ends, unless it is shared: then p2pd may be started again.

        Streams end by themselves then; a thread that waits for new ones would wait for ever.
        """
        try:
            await p2p.ended()
        finally:
            if not self._closed:
                log.warning("%s: p2pd has ended, and with it all libp2p streams", self.identity)
                if not self._shares_inbox:
                    self.inbox.close()

    def close(self) -> None:
        """Stop serving streams that come in, and close all streams of the inbox. The directory stays open."""
        if not self._closed:
            self._closed = True
            if self._watching is not None:
                self._watching.cancel()
            with suppress(DirectoryError):  # no daemon any more: nobody who would send us streams
                self._directory.call(self._p2p.remove_binary_stream_handler(PROTOCOL))
        super().close()
