"""A stranger: a libp2p node with a key of its own that knows an island's address, and no more."""

import asyncio
from pathlib import Path

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from diloco.comm.peers.dht import PING, GuardedP2P, close_node, dht_key
from diloco.comm.peers.directory import LoopThread
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.record import PeerRecord, encode


class Outsider:
    """A node with a key of its own that knows an island's address, checks nothing, and has no admission."""

    def __init__(self, path: Path, bootstrap: list[str]) -> None:
        self.identity, self.thread, self.bootstrap = Identity.load(path), LoopThread("outsider"), bootstrap
        options = {"initial_peers": bootstrap, "identity_path": str(path), "check_if_identity_free": False}
        p2p = self.thread.call(GuardedP2P.create(**options), 30)
        self.node = self.thread.call(DHTNode.create(p2p=p2p), 30)
        self._begun: list[object] = []
        self.peer = next(iter(self.thread.call(p2p.list_peers(), 10))).peer_id

    def read(self, run_id: bytes) -> object:
        protocol, key = self.node.protocol, self.node.protocol.node_id.generate(source=dht_key(run_id))
        return self.thread.call(protocol.call_find(self.peer, [key]), 30)

    def publish(self, run_id: bytes, record: PeerRecord, identity: Identity) -> list[bool] | None:
        key = self.node.protocol.node_id.generate(source=dht_key(run_id))
        raw = self.node.protocol.serializer.dumps(encode(record, identity))
        storing = self.node.protocol.call_store(
            self.peer, [key], [raw], record.expires_at, subkeys=[identity.public_key]
        )
        return self.thread.call(storing, 30)

    def stream(self, *, closes: bool = True) -> bytes:
        async def knock() -> bytes:
            _, reader, writer = await self.node.p2p.call_binary_stream_handler(self.peer, "/diloco/stream/1")
            answer = await asyncio.wait_for(reader.read(500), 10)
            if closes:
                writer.close()
            return answer

        return self.thread.call(knock(), 60)

    def speaks(self, protocol: str) -> bool:
        """Whether the island's libp2p node takes a stream of this protocol."""
        try:
            _, _, writer = self.thread.call(self.node.p2p.call_binary_stream_handler(self.peer, protocol), 30)
        except (P2PDaemonError, ControlFailure):
            return False
        self.thread.loop.call_soon_threadsafe(writer.close)
        return True

    def begin_messages(self, count: int) -> None:
        """Open so many streams, each with the length of a long message and no more: 4 bytes make p2pd take 4 MB."""

        async def begin() -> None:
            for _ in range(count):
                _, reader, writer = await self.node.p2p.call_binary_stream_handler(self.peer, PING)
                writer.write(b"\x80\x80\x80\x02")  # 4 MiB, as a varint
                await writer.drain()
                self._begun.append((reader, writer))

        self.thread.call(begin(), 60)

    def close(self) -> None:
        self.thread.at_end = lambda: close_node(self.node)
        self.thread.stop()
