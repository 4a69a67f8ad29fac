"""This machine as a peer: its identity, the directory, transports, and which others are present."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.atomic import write_file
from diloco.comm.peers.identity import Identity, peer_id_of
from diloco.comm.peers.record import PeerRecord
from diloco.comm.peers.ticket import Ticket, check_greeting
from diloco.comm.transport.auto import AutoTransport
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.link import Link, Paths
from diloco.comm.transport.link import Path as Way
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Inbox, PeerAddress, Transport
from diloco.elastic.runtime.driver import Network
from diloco.errors import DirectoryError, PeerRefused

if TYPE_CHECKING:
    from diloco.comm.peers.directory import Directory

PUBLISH_S = 15.0
EXPIRES_S = 60.0
LOOK_S = 1.0
REACH_S = 3.0  # how often an island that knows of nobody tries those it once knew
MAX_REMEMBERED = 16
ANYWHERE = "0.0.0.0"

log = logging.getLogger(__name__)
Know = Callable[[Mapping[str, PeerAddress]], None]


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
    slowness: float = 1.0  # how many times longer inner steps are to take

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Return bits per second up and down; None where there is no limit."""
        return self.up_bits_per_s, self.down_bits_per_s


class LocalPeer:
    """Represent this machine in a run, as far as rounds need it. On its own it lets nobody else join: it opens no port
    and starts no daemon."""

    def __init__(self, folder: Path, run_id: bytes, connection: Connection) -> None:
        self.connection, self.run_id = connection, run_id
        self.identity = Identity.load(folder / "identity.key")
        self.id = self.identity.peer_id
        self.head: Callable[[], tuple[int, str]] = lambda: (0, "00" * 32)
        self.is_member: Callable[[str], bool] = lambda peer: False  # by what is committed
        self._names = {self.id: connection.name}  # they outlive records
        self.plain: Transport = MemoryNetwork().transport(self.id)
        self.bulk: Transport = self.plain
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def network(self) -> Network:
        """Return the transports for rounds; nobody else is admitted."""
        return Network(self.plain, self.bulk, b"", self._admit)

    def _admit(self, peer: str, greeting: bytes) -> None:
        raise PeerRefused(f"{peer} cannot join: this run is closed")

    def publish(self) -> None:
        """Announce this peer to the others, of which there are none here."""

    def find_peers(self) -> dict[str, PeerAddress]:
        """Return the addresses of all others; here there are none."""
        return {}

    def name_of(self, peer: str) -> str:
        """Return the name that a peer published, or the end of its id."""
        return self._names.get(peer, peer[-8:])

    def watch(self, know: Know) -> None:
        """Call `know` every second on a thread, even if it never brings an address: it also looks for amendments."""
        self._thread = threading.Thread(target=self._watch, args=(know,), name="watch", daemon=True)
        self._thread.start()

    def _watch(self, know: Know) -> None:
        while not self._stop.wait(LOOK_S):
            know({})

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        self.bulk.close()


class Peer(LocalPeer):
    """Represent this machine among others: in the directory from `publish` on. `watch` reports who comes and goes."""

    def __init__(
        self, folder: Path, run_id: bytes, ticket: Ticket | None, connection: Connection, *, lonely: bool = False
    ) -> None:
        """`lonely`: it is fine if nobody answers; the peers it knows of are tried again and again."""
        super().__init__(folder, run_id, connection)
        self._known = KnownPeers(folder)
        self.ticket = ticket
        self.records: dict[str, PeerRecord] = {}
        self._admitted: set[str] = set()  # by this process
        invited = ticket.addresses if ticket is not None else ()
        self._places = tuple(place for place in (*invited, *self._known.others()) if self.id not in place)
        self.directory = self._enter(lonely=lonely)
        inbox = Inbox()
        self._direct = DirectTransport(self.id, listen_host(connection.host), inbox=inbox)
        self._auto = AutoTransport(self._direct, Libp2pTransport(self.directory, inbox=inbox))
        self.plain = _shape(self._auto, connection)
        self.bulk = PooledTransport(self.plain)

    def _enter(self, *, lonely: bool) -> "Directory":
        """Start the directory, at this peer's old address where that is free: old tickets name it."""
        from diloco.comm.peers.directory import Directory  # takes seconds: hivemind

        host = self.connection.host
        listen = listen_host(host)
        where: dict[str, Any] = {"listen_host": listen, "listen_port": self._known.own_port(listen)}
        if listen != host:
            where["listen_port"] = where["listen_port"] or _free_port(listen)  # it has to be said beforehand
            where["announce"] = [f"/{_family(host)}/{host}/tcp/{where['listen_port']}"]
        if listen in (ANYWHERE, "::"):
            log.warning("%s is not an address of this machine: your router must forward every port to it", host)
        try:
            return Directory.start(self.identity, self.run_id, bootstrap=self._places, **where)
        except DirectoryError:
            if not lonely or not self._places:
                raise
        return Directory.start(self.identity, self.run_id, **where)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return this peer's multiaddrs, for a ticket's bootstrap."""
        return self.directory.addresses

    def network(self) -> Network:
        """Return the transports for rounds; this peer's ticket is its greeting."""
        assert self.ticket is not None
        return Network(self.plain, self.bulk, self.ticket.render().encode(), self._admit)

    def _admit(self, peer: str, greeting: bytes) -> None:
        """Check another peer's greeting; any member checks any other's admission by itself."""
        record = self.records.get(peer)
        if record is None:
            raise PeerRefused(f"{peer} has no record in the run's directory")
        known = peer in self._admitted or self.is_member(peer)
        check_greeting(greeting, self.run_id, record.public_key, time.time(), known=known)
        self._admitted.add(peer)

    def publish(self) -> None:
        """Put this peer's record into the directory, with its addresses and its present head, for EXPIRES_S seconds."""
        me = self._direct.address(self.connection.host)
        round_number, digest = self.head()
        up, down = self.connection.up_bits_per_s or 0, self.connection.down_bits_per_s or 0
        record = PeerRecord(
            self.run_id, self.identity.public_key, self.addresses, ((me.host, me.port),), me.certificate_der,
            self.connection.name, self.connection.devices, self.connection.mesh, int(up), int(down),
            round_number, bytes.fromhex(digest),
        )  # fmt: skip
        self.directory.publish(record, EXPIRES_S)

    def find_peers(self) -> dict[str, PeerAddress]:
        """Return the addresses of all others in the directory now; they, and only they, may connect."""
        found = {peer_id_of(key): record for key, record in self.directory.peers().items()}
        found.pop(self.id, None)
        self.records = found
        self._names |= {peer: record.name for peer, record in found.items()}
        addresses = {peer: address_of(peer, record) for peer, record in found.items()}
        self._auto.allow(addresses.values())
        return addresses

    def _watch(self, know: Know) -> None:
        published = reached = -PUBLISH_S
        while not self._stop.wait(LOOK_S):
            try:
                if not self.records and time.monotonic() - reached > REACH_S:
                    if any(self.directory.reach(place) for place in self._places):
                        published = -PUBLISH_S  # they have not heard of us
                    reached = time.monotonic()
                if time.monotonic() - published > PUBLISH_S:
                    self.publish()
                    published = time.monotonic()
                know(self.find_peers())
                self._known.remember(record.control for record in self.records.values())
            except (DirectoryError, OSError) as error:  # it does not answer; a full disk, no descriptors: that passes
                log.warning("%s: cannot look into the directory: %s", self.connection.name, error)

    def close(self) -> None:
        super().close()
        self.directory.close()


class KnownPeers:
    """Keep addresses on disk, this peer's own and those of the others, for when all have to start again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: tuple[str, ...] = self.others()

    def others(self) -> tuple[str, ...]:
        """Return the addresses of peers that were present last."""
        return _lines(self._folder / "peers")

    def own_port(self, host: str) -> int:
        """Return the port that this peer had last, if nobody else has it now; 0 stands for any."""
        ports = [int(parts[4]) for line in _lines(self._folder / "addresses") if len(parts := line.split("/")) > 4]
        for port in ports:
            with suppress(OSError):
                return _free_port(host, port)
        return 0

    def remember(self, addresses: Iterable[Sequence[str]]) -> None:
        """Write down the addresses of those who are present now; who is alone keeps those it knew."""
        found = tuple(sorted({place for places in addresses for place in places[:1]}))[:MAX_REMEMBERED]
        if not found or found == self._written:
            return
        try:
            write_file(self._folder / "peers", "".join(f"{place}\n" for place in found))
            self._written = found
        except OSError as error:
            log.warning("the others' addresses could not be kept: %s", error)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text().split())
    except (OSError, UnicodeDecodeError):
        return ()


def address_of(peer: str, record: PeerRecord) -> PeerAddress:
    """Return where a peer can be reached, by its record; without a bulk address only libp2p remains."""
    host, port = record.bulk[0] if record.bulk else ("", 0)
    return PeerAddress(peer, host, port, record.certificate, record.control)


def _shape(transport: Transport, connection: Connection) -> Transport:
    if connection.shape is not None:
        return connection.shape(transport)
    if connection.up_bits_per_s is None and connection.down_bits_per_s is None and not connection.delay_s:
        return transport
    link = Link(connection.up_bits_per_s, connection.down_bits_per_s)
    return ShapedTransport(transport, link, Paths(Way(delay_s=connection.delay_s)))


def own_name() -> str:
    """Return this machine's host name, in safe characters: what an island is called unless its owner says otherwise."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]


def listen_host(host: str) -> str:
    """Return where to listen for others who see this machine as `host`: there, if that is an address of this machine or
    a name for one; else, where a cloud or a router forwards it, on any address."""
    try:
        address = host if ":" in host else socket.gethostbyname(host)
        _free_port(address)
    except (OSError, ValueError):  # ValueError: no name at all
        return "::" if ":" in host else ANYWHERE
    return address


def _free_port(host: str, port: int = 0) -> int:
    """Return this port, or any free one for 0; raise OSError where it cannot be had."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _family(host: str) -> str:
    """Name the family of a host as multiaddrs do."""
    if ":" in host:
        return "ip6"
    return "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns4"


def host_towards(addresses: tuple[str, ...]) -> str:
    """Return the address under which the peers at these multiaddrs would see this machine; nothing is sent to them."""
    for address in addresses:
        parts = address.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "dns4"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((parts[2], 9))  # sends nothing
                    return str(probe.getsockname()[0])
                except OSError:
                    continue
    return "127.0.0.1"
