"""The peer of a run that nobody else can join: no port, no directory, no daemon."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from diloco.comm.peers.identity import Identity
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.elastic.runtime.driver import Network
from diloco.errors import PeerRefused
from diloco.run.peer import LOOK_S, Connection


class ClosedPeer:
    """What `Peer` is for islands with others, as far as rounds need it."""

    def __init__(self, folder: Path, run_id: bytes, name: str) -> None:
        self.connection, self.run_id = Connection(name=name), run_id
        self.id = Identity.load(folder / "identity.key").peer_id
        self.head: Callable[[], tuple[int, str]] = lambda: (0, "")
        self.is_member: Callable[[str], bool] = lambda peer: False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._transport = MemoryNetwork().transport(self.id)

    def network(self) -> Network:
        return Network(self._transport, self._transport, b"", _refuse)

    def publish(self) -> None:
        """There is nobody to hear of it."""

    def look(self) -> dict[str, PeerAddress]:
        return {}

    def name_of(self, peer: str) -> str:
        return self.connection.name if peer == self.id else peer[-8:]

    def watch(self, know: Callable[[Mapping[str, PeerAddress]], None]) -> None:
        """Call `know` now and then, though it never brings an address: it also looks for the owner's amendments."""

        def work() -> None:
            while not self._stop.wait(LOOK_S):
                know({})

        self._thread = threading.Thread(target=work, name="amendments-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self._transport.close()


def _refuse(peer: str, greeting: bytes) -> None:
    raise PeerRefused(f"{peer} cannot join: this run is closed")
