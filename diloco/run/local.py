"""This machine in a run, as far as rounds need it: how it reaches others, where it does, and what they are called."""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.atomic import write_file
from diloco.comm.peers.identity import Identity
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Network
from diloco.run.folder import IDENTITY_KEY
from diloco.run.names import NAMES, Names, read_names

LOOK_S = 1.0  # between looks at who is there

log = logging.getLogger(__name__)
Know = Callable[[Mapping[str, PeerAddress]], None]
Fail = Callable[[BaseException], None]


@dataclass(frozen=True)
class Connection:
    """Describe how this island reaches the others."""

    host: str = "127.0.0.1"  # how others see it: an address of this machine, or one that is led to it
    up_bits_per_s: float | None = None
    down_bits_per_s: float | None = None
    delay_s: float = 0.0  # emulated, one way
    name: str = "island"
    devices: str = "cpu"
    mesh: str = "fsdp 1 x tp 1"
    shape: Callable[[Transport], Transport] | None = None  # a link that somebody else emulates
    is_cut: Callable[[str], bool] = lambda peer: False  # by that emulation, from the peer of this id
    slowness: float = 1.0  # how many times longer inner steps are to take
    port: int = 0  # to listen at, and at the next one; 0: any two
    relay_bits_per_s: float | None = None  # at which it passes on for islands that nobody can dial; 0: for none
    metered: bool = False  # its bytes are counted by the month, in its folder
    found_now: Callable[[], tuple[str, ...]] = tuple  # multiaddrs at which others are by now, as its scheduler says

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Return bits per second up and down; None where there is no limit."""
        return self.up_bits_per_s, self.down_bits_per_s


class LocalPeer:
    """Represent this machine in a run, as far as rounds need it. On its own it lets nobody else join: it opens no port
    and starts no daemon."""

    def __init__(self, folder: Path, run_id: bytes, connection: Connection) -> None:
        self.connection, self.run_id = connection, run_id
        self.identity = Identity.load(folder / IDENTITY_KEY)
        self.id = self.identity.peer_id
        self.head: Callable[[], tuple[int, str]] = lambda: (0, "00" * 32)
        self.state: Callable[[], RunState | None] = lambda: None  # what is committed, as far as it is known here
        self.report: Callable[[str, str, str], None] = lambda what, peer, text: None
        self._names_file = folder / NAMES
        self.names = Names({**read_names(folder), self.id: connection.name})  # they outlive records, and this process
        self.plain: Transport = MemoryNetwork().transport(self.id)
        self.bulk: Transport = self.plain
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def network(self) -> Network:
        """Return the transports for rounds; nobody else can reach them."""
        return Network(self.plain, self.bulk)

    def publish(self) -> None:
        """Announce this peer to the others, of which there are none here."""

    def find_peers(self) -> dict[str, PeerAddress]:
        """Return the addresses of all others; here there are none."""
        return {}

    def _keep_names(self, names: Mapping[str, str]) -> None:
        """Remember the names of islands, on the disk too: commands take them when nobody is there to ask."""
        if names.items() <= self.names.known.items():
            return
        self.names = Names({**self.names.known, **names})
        try:
            write_file(self._names_file, json.dumps(self.names.known, indent=1) + "\n")
        except OSError as error:
            log.warning("the others' names could not be kept: %s", error)

    def name_of(self, peer: str) -> str:
        """Return what an island is called, for people."""
        return self.names.of(peer)

    def watch(self, know: Know, fail: Fail) -> None:
        """Call `know` every second on a thread, even if it never brings an address: it also looks for amendments.

        `fail` is called, and the thread ends, if this peer can never be reached again.
        """
        self._thread = threading.Thread(target=self._watch, args=(know, fail), name="watch", daemon=True)
        self._thread.start()

    def _watch(self, know: Know, fail: Fail) -> None:
        while not self._stop.wait(LOOK_S):
            know({})

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self.bulk.close()
