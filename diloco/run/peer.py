"""This machine as a peer: its identity, the directory, transports, and which others are present."""

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.atomic import write_file
from diloco.comm.peers.addressbook import AddressBook, by_peer, free_port, multiaddr
from diloco.comm.peers.admission import Admission
from diloco.comm.peers.identity import Identity, peer_id_of, public_key_in
from diloco.comm.peers.record import PeerRecord
from diloco.comm.peers.redial import Redial
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.auto import AutoTransport
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.link import Link, Paths
from diloco.comm.transport.link import Path as Way
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.relay import Relay
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Inbox, PeerAddress, Transport
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import EVICTED, Network
from diloco.errors import ConfigError, DaemonLost, DirectoryError, Evicted, IdentityError, TicketError
from diloco.run.folder import IDENTITY_KEY
from diloco.run.gate import TAKEN_OUT, Gate
from diloco.run.names import NAMES, Names, read_names
from diloco.run.reachable import Reachability
from diloco.run.status import CHANNEL as STATUS_CHANNEL

if TYPE_CHECKING:
    from diloco.comm.peers.directory import Directory

PUBLISH_S = 15.0
EXPIRES_S = 60.0
LOOK_S, ASK_OTHERS_S = 1.0, 15.0  # between looks into the directory: at what is here, and at what others have
OVERDUE_S = 2 * PUBLISH_S  # a record that was not renewed for so long: its peer is dialled
REOPENINGS, REOPENINGS_S = 5, 60.0  # p2pd is started again so many times within so long
GIVE_UP_S = 3600.0  # p2pd did not start for so long
SAY_AGAIN_S = 60.0
ANYWHERE = "0.0.0.0"

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
    found_now: Callable[[], tuple[str, ...]] = tuple  # multiaddrs at which others are by now, as its scheduler says

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Return bits per second up and down; None where there is no limit."""
        return self.up_bits_per_s, self.down_bits_per_s


@dataclass(frozen=True)
class WayTo:
    """Describe the way to another member as it was found just now."""

    through: str = ""  # its relay, where it has one
    dials: bool | None = None  # whether it can open connections to this machine; None: it does not say
    bytes_per_s: float = 0.0  # from there to here


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


class Peer(LocalPeer):
    """Represent this machine among others: in the directory from `publish` on. `watch` reports who comes and goes."""

    def __init__(self, folder: Path, ticket: Ticket, connection: Connection, *, lonely: bool = False) -> None:
        """`lonely`: it is fine if nobody answers; the peers it knows of are tried again and again."""
        super().__init__(folder, ticket.run_id, connection)
        self._book = AddressBook(folder)
        self._ticket, self.admission = ticket, ticket.admission(self.identity.public_key)
        self.records: dict[str, PeerRecord] = {}  # those in the directory, and the last ones of members that are not
        self._renewed_at: dict[str, float] = {}
        self._publish_soon, self._ask_soon = threading.Event(), threading.Event()
        self._told_reached = ""
        self._gate = Gate(lambda: self.state())
        self._watchers: frozenset[str] = frozenset()
        self._redial = Redial()
        self._reopened_at: list[float] = []
        self._ran_at = time.monotonic()  # p2pd
        self.directory = self._enter(lonely=lonely)
        self._book.keep_own(self.addresses)
        inbox = Inbox()
        inbox.may_open = self._may_open
        self._direct = self._listen(inbox)
        rate = connection.relay_bits_per_s
        self._relay = Relay(
            self._direct, serves=rate != 0, bytes_per_s=rate / 8 if rate else None, say=self._say_relayed
        )
        self._auto = AutoTransport(self._direct, Libp2pTransport(self.directory, inbox=inbox), self._relay)
        self.plain = _shape(self._auto, connection)
        self.bulk = PooledTransport(self.plain)

    def _listen(self, inbox: Inbox) -> DirectTransport:
        port = self.connection.port + 1 if self.connection.port else 0
        try:
            return DirectTransport(self.id, listen_host(self.connection.host), port=port, inbox=inbox)
        except OSError as error:
            self.directory.close()
            raise DirectoryError(f"cannot listen at port {port} ({error.strerror}): use another --port") from None

    def _enter(self, *, lonely: bool) -> "Directory":
        """Start the directory, at this peer's old address where that is free: old tickets name it."""
        from diloco.comm.peers.directory import Directory  # takes seconds: hivemind

        host = self.connection.host
        listen = listen_host(host)
        port = self.connection.port or self._book.own_port(listen)
        where: dict[str, Any] = {"listen_host": listen, "listen_port": port, "fixed": bool(self.connection.port)}
        if listen != host:
            where["listen_port"] = where["listen_port"] or free_port(listen)  # it has to be said beforehand
            where["announce"] = [multiaddr(host, where["listen_port"])]
        if listen in (ANYWHERE, "::"):
            ports = f"{port} and {port + 1}" if self.connection.port else "every port (fix them with --port)"
            log.warning("%s is not an address of this machine: your router must forward %s to it", host, ports)
        where |= {"is_cut": self.connection.is_cut, "objection": self._objection}
        if not lonely:
            places = [place for known in self._places().values() for place in known]
            return Directory.start(self.identity, self.admission, bootstrap=places, **where)
        directory = Directory.start(self.identity, self.admission, **where)
        directory.reach(self._places())  # at once, for the run's time; whoever does not answer is tried again
        return directory

    def _places(self) -> dict[str, tuple[str, ...]]:
        """Return where others may be, by their ids: as last seen, as found just now, and as this peer's ticket says."""
        places = by_peer((*self.connection.found_now(), *self._ticket.addresses))
        for peer, last_seen in self._book.others.items():
            places[peer] = tuple(dict.fromkeys((*last_seen, *places.get(peer, ()))))
        places.pop(self.id, None)
        return places

    @property
    def ticket_head(self) -> tuple[int, str]:
        """Return how far the run was when this peer's ticket was printed: round and digest; 0 where it does not say."""
        return self._ticket.head[0], self._ticket.head[1].hex()

    @property
    def ticket_addresses(self) -> tuple[str, ...]:
        """Return where others may be, as this peer's ticket says."""
        return self._ticket.addresses

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return this peer's multiaddrs, for a ticket's bootstrap."""
        return self.directory.addresses

    def network(self) -> Network:
        """Return the transports for rounds, which admit those alone whom the run's owner has invited."""
        return Network(self.plain, self.bulk)

    def way_to(self, peer: str) -> "WayTo":
        """Find out how a member is reached, how fast its bytes arrive, and whether it can dial this machine."""
        address, relay = address_of(peer, self.records[peer]), self._relay
        if address.relay:
            return WayTo(through=address.relay)
        return WayTo(dials=relay.can_be_dialled(address), bytes_per_s=relay.bytes_per_s_from(address))

    def _objection(self, peer: str, admission: Admission) -> str:
        """Return why the directory gives a peer no answer; if somebody new gets one, its record may lie elsewhere."""
        reason = self._gate.objection(peer, admission)
        if not reason and peer not in self.records:
            self._ask_soon.set()
        return reason

    def publish(self, expires_s: float = EXPIRES_S) -> None:
        """Put this peer's record into the directory, with its addresses and its present head, for some seconds."""
        me = self._direct.address(self.connection.host)
        (round_number, digest), relay = self.head(), self._relay.relay
        up, down = self.connection.up_bits_per_s or 0, self.connection.down_bits_per_s or 0
        record = PeerRecord(
            self.run_id, self.identity.public_key, self.addresses, ((me.host, me.port),), me.certificate_der,
            self.connection.name, self.connection.devices, self.connection.mesh, int(up), int(down),
            round_number, bytes.fromhex(digest), relay=public_key_in(relay) if relay else b"",
        )  # fmt: skip
        self.directory.publish(record, expires_s)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Renew this peer's record while somebody else's answer is waited for, before `watch` does: members refuse one
        whose record has expired, and a state may take an hour to come."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(PUBLISH_S):
                try:
                    self.publish()
                except (DirectoryError, OSError) as error:
                    log.warning("%s: cannot be announced: %s", self.connection.name, error)

        thread = threading.Thread(target=renew, name="announce", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def find_peers(self, *, ask_others: bool = True) -> dict[str, PeerAddress]:
        """Return the addresses of all others in the directory now, or as far as this node has been told.

        They may connect, and so may members that were there before: a cut may outlast every record.
        """
        found = {peer_id_of(key): record for key, record in self.directory.peers(ask_others=ask_others).items()}
        found.pop(self.id, None)
        watchers = {peer: record for peer, record in found.items() if self._gate.may_watch(peer, record)}
        found = {peer: record for peer, record in found.items() if self._gate.may_speak(peer, record)}
        for peer, record in found.items():
            if peer not in self.records or self.records[peer].sequence != record.sequence:
                self._renewed_at[peer] = time.monotonic()
        before = {peer: record for peer, record in self.records.items() if self._gate.knows(peer)}
        self.records = {peer: record for peer, record in before.items() if self._gate.may_speak(peer, record)} | found
        self._keep_names({peer: record.name for peer, record in found.items()})
        self._watchers = frozenset(watchers)
        self._auto.allow(address_of(peer, record) for peer, record in (self.records | watchers).items())
        for peer in self._gate.kept_out:
            self._direct.inbox.drop(peer)  # again and again: it may have been about to open another one
        return {peer: address_of(peer, record) for peer, record in found.items()}

    def _may_open(self, peer: str, channel: str) -> bool:
        """Tell whether a peer may open a stream: one that only watches may ask for the status, and nothing else."""
        return channel == STATUS_CHANNEL or peer not in self._watchers

    def _is_member(self, peer: str) -> bool:
        state = self.state()
        return state is not None and peer in state.roster

    def watch(self, know: Know, fail: Fail) -> None:
        super().watch(know, fail)
        reachable = Reachability(self._relay, self._known, self.name_of, self._reached_otherwise)
        threading.Thread(target=reachable.watch, args=(self._stop,), name="reachable", daemon=True).start()

    def _known(self) -> dict[str, PeerAddress]:
        return {peer: address_of(peer, record) for peer, record in self.records.items()}

    def _reached_otherwise(self, text: str) -> None:
        self._publish_soon.set()
        if text != self._told_reached:
            self._told_reached = text
            self.report("reached", self.id, text)

    def _say_relayed(self, peer: str, text: str) -> None:
        self.report("relays", peer, text)

    def _watch(self, know: Know, fail: Fail) -> None:
        published, asked, said, said_at, refused = -PUBLISH_S, -ASK_OTHERS_S, "", 0.0, ""
        since = time.monotonic()
        while not self._stop.wait(LOOK_S):
            try:
                if not self.directory.running:
                    self._reopen()
                    published = -PUBLISH_S
                self._ran_at = time.monotonic()
                if (refusal := self.directory.refusal) != refused:
                    refused = refusal
                    self.report("kept out", self.id, f"another island does not let this one in: {refusal}")
                if self._is_taken_out(refusal, since):
                    fail(Evicted(EVICTED))
                    return
                if self.reach_lost(time.monotonic()) or self._publish_soon.is_set():
                    published = -PUBLISH_S  # they have not heard of us, or of our relay
                    self._publish_soon.clear()
                if time.monotonic() - published > PUBLISH_S:
                    self.publish()
                    published = time.monotonic()
                ask = time.monotonic() - asked > ASK_OTHERS_S or self._ask_soon.is_set()
                self._ask_soon.clear()
                know(self.find_peers(ask_others=ask))
                asked = time.monotonic() if ask else asked
                present = {peer: record.control for peer, record in self.records.items() if self._gate.knows(peer)}
                self._book.remember(present, self._is_member)
            except DaemonLost as lost:
                fail(lost)
                return
            except (TicketError, IdentityError) as error:  # of one record: the others count
                log.warning("%s: a record is not used: %s", self.connection.name, error)
            except (DirectoryError, OSError) as error:  # it does not answer; a full disk, no descriptors: that passes
                if str(error) != said or time.monotonic() - said_at > SAY_AGAIN_S:
                    log.warning("%s: cannot look into the directory: %s", self.connection.name, error)
                    said, said_at = str(error), time.monotonic()

    def _is_taken_out(self, refusal: str, since: float) -> bool:
        """Tell whether the owner has taken this island out while it was away, as others say and none contradicts: a
        liar alone could not keep those silent that would let it in."""
        heard_at = max((since, *self._renewed_at.values()))
        return refusal == TAKEN_OUT and time.monotonic() - heard_at > OVERDUE_S

    def reach_lost(self, now: float) -> bool:
        """Dial those whose records are overdue, as often as their turns come; return whether anybody answered."""
        places = self._places()
        overdue = {peer for peer in places if now - self._renewed_at.get(peer, -OVERDUE_S) >= OVERDUE_S}
        lost = sorted(overdue - self._gate.kept_out)
        due = self._redial.due(lost, now)
        if not due:
            return False
        answered = self.directory.reach({peer: places[peer] for peer in due})
        self._redial.tried(due, time.monotonic())
        return bool(answered)

    def _reopen(self) -> None:
        """Start p2pd again; raise DaemonLost if it has not started for an hour.

        Where it ends again and again, or before it is open, wait for a while: strangers may do that, and rounds do not
        need it.
        """
        now = time.monotonic()
        self._reopened_at = [at for at in self._reopened_at if now - at < REOPENINGS_S]
        if len(self._reopened_at) >= REOPENINGS:
            raise DirectoryError(
                f"the network daemon p2pd ended {REOPENINGS} times within {REOPENINGS_S:.0f} s; rounds go on, and"
                " it is started again in a while. Does somebody flood this island's address?"
            )
        self._reopened_at.append(now)
        try:
            self.directory.reopen()
        except DirectoryError as error:
            problem = DaemonLost if now - self._ran_at > GIVE_UP_S else DirectoryError
            raise problem(f"the network daemon p2pd cannot be started again: {error}") from error
        log.warning("%s: the network daemon p2pd had ended and was started again", self.connection.name)
        self._redial, self._renewed_at = Redial(), {}  # it knows nobody: all are to be dialled now
        self._book.keep_own(self.addresses)

    def close(self) -> None:
        super().close()
        self.directory.close()


def address_of(peer: str, record: PeerRecord) -> PeerAddress:
    """Return where a peer can be reached, by its record; without a bulk address only libp2p remains."""
    host, port = record.bulk[0] if record.bulk else ("", 0)
    relay = peer_id_of(record.relay) if record.relay else ""
    return PeerAddress(peer, host, port, record.certificate, record.control, relay)


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
    except (OSError, ValueError):  # ValueError: no name at all
        raise ConfigError(f"--host {host}: there is no machine of that name") from None
    try:
        free_port(address)
    except OSError:
        return "::" if ":" in host else ANYWHERE
    return address


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
