"""A taker of items and its donors, real ones and others, on one network in memory."""

import threading
from collections.abc import Callable
from contextlib import suppress

from items import MANIFEST, SMALL_CHUNK, STATE, holding

from diloco.checkpoint.log.library import Item, ItemManifest, Library
from diloco.checkpoint.transfer.donor import CHANNEL, READY, Donor
from diloco.checkpoint.transfer.fetch import Transfer, describe, request
from diloco.comm.peers import packing
from diloco.comm.transport.memory import MemoryNetwork, MemoryTransport
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.errors import TransportError

SOON = 20.0
GONE = "gives nothing to others any more"  # what a donor says that has failed
NAME = packing.text("state", 255)


class Swarm:
    """A taker `me` and any number of donors on one network in memory."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.me = self.network.transport("me")
        self.transports: dict[str, MemoryTransport] = {}
        self.donors: dict[str, Donor] = {}

    def peer(self, name: str) -> MemoryTransport:
        self.transports[name] = self.network.transport(name)
        return self.transports[name]

    def donor(self, name: str, library: Library | None = None, **options: object) -> Donor:
        self.donors[name] = Donor(self.peer(name), library or holding(STATE), **options)  # type: ignore[arg-type]
        return self.donors[name]

    def watched(self, name: str, on_request: Callable[[], object]) -> None:
        """A donor of STATE that does something before each answer."""
        item = Item("state", STATE, SMALL_CHUNK)

        class Watched(Library):
            def get(self, name: str) -> Item | None:
                on_request()
                return item

        self.donor(name, Watched())

    @property
    def addresses(self) -> dict[str, PeerAddress]:
        return {name: PeerAddress(name) for name in self.transports}

    def stream(self, to: str, channel: str = CHANNEL) -> Stream:
        return self.me.connect(PeerAddress(to), channel, timeout_s=SOON)

    def transfer(self, manifest: ItemManifest = MANIFEST, patience_s: float = 30.0) -> Transfer:
        """Into memory of its own."""
        return Transfer(manifest, self.addresses, self.me, memoryview(bytearray(manifest.size)), patience_s=patience_s)

    def fetch(self, manifest: ItemManifest = MANIFEST, patience_s: float = 30.0) -> Transfer:
        transfer = self.transfer(manifest, patience_s)
        transfer.run()
        return transfer

    def request(self, donor: str, name: str = "state", limit: int = SMALL_CHUNK, timeout_s: float = SOON) -> bytes:
        return request(self.me, PeerAddress(donor), name, limit=limit, timeout_s=timeout_s)

    def describe(self, donor: str, name: str = "state", timeout_s: float = SOON) -> ItemManifest:
        return describe(self.me, PeerAddress(donor), name, timeout_s)

    def by_hand(self, name: str, how: Callable[[Stream], None]) -> None:
        """Something else than a donor: it does this with every stream."""
        transport = self.peer(name)

        def accept() -> None:
            with suppress(TransportError):
                while True:
                    how(transport.accept(CHANNEL, timeout_s=SOON))

        threading.Thread(target=accept).start()

    def answering(self, name: str, kind: int, head: bytes, payload: bytes) -> None:
        """This, whatever the first question on a stream is."""

        def how(stream: Stream) -> None:
            stream.send(READY)
            stream.receive(timeout_s=SOON)
            stream.send(kind, head, payload)

        self.by_hand(name, how)

    def close(self) -> None:
        for source in self.donors.values():
            source.close()
        for transport in [self.me, *self.transports.values()]:
            transport.close()


class Countdown:
    """Counts its calls; at the given one it does something."""

    def __init__(self, calls: int, then: Callable[[], object] = lambda: None) -> None:
        self.calls, self.then, self.count = calls, then, 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.count += 1
            due = self.count == self.calls
        if due:
            self.then()


def greeted(stream: Stream) -> Stream:
    assert stream.receive(timeout_s=SOON).kind == READY
    return stream
