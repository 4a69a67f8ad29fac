"""A peer of islands in memory that is let in and then says what it likes."""

from islands import TestIsland

from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.elastic.runtime.mailbox import CHANNEL, MESSAGE


class Liar:
    """One that is known to all, as Z."""

    def __init__(self, network: MemoryNetwork, islands: list[TestIsland]) -> None:
        known = network.peers.get("Z")
        self.transport = known if known is not None else network.transport("Z")
        self.streams: list[Stream] = []
        for island in islands:
            island.driver.know({"Z": PeerAddress("Z")})
            stream = self.transport.connect(PeerAddress(island.name), CHANNEL, timeout_s=5)
            self.streams.append(stream)

    def say(self, raw: bytes) -> None:
        for stream in self.streams:
            try:
                stream.send(MESSAGE, b"", raw, timeout_s=1)
            except Exception:  # noqa: BLE001 -- they hung up
                return
