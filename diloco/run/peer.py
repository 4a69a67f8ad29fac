"""This machine as a peer: its identity, the directory, transports, and which others are present."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.comm.peers.addressbook import AddressBook, multiaddr, refuse_taken
from diloco.comm.peers.admission import Admission
from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.peers.identity import peer_id_of, public_key_in
from diloco.comm.peers.noticeboard import Noticeboard
from diloco.comm.peers.record import PeerRecord
from diloco.comm.peers.redial import Redial
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.auto import AutoTransport
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.link import Link, Paths
from diloco.comm.transport.link import Path as Way
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.relay import Relay
from diloco.comm.transport.rendezvous import Rendezvous
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Inbox, PeerAddress, Transport
from diloco.elastic.runtime.driver import EVICTED, Network
from diloco.errors import DirectoryError, Evicted, IdentityError, TicketError
from diloco.run.allowance import TrafficMeter
from diloco.run.gate import TAKEN_OUT, Gate
from diloco.run.local import LOOK_S, Connection, Fail, Know, LocalPeer
from diloco.run.machine import ANYWHERE, listen_host
from diloco.run.neighbours import Neighbours
from diloco.run.reachable import Reachability
from diloco.run.status_streams import CHANNEL as STATUS_CHANNEL
from diloco.run.twins import END, Twins

if TYPE_CHECKING:
    from diloco.comm.peers.directory import Directory

PUBLISH_S = 15.0
EXPIRES_S = 60.0
ASK_OTHERS_S = 15.0  # between questions to others; what is here is looked at every second
OVERDUE_S = 2 * PUBLISH_S  # a record that was not renewed for so long: its peer is dialled
REFUSED_S = 120.0  # for which a refusal counts: dials are a minute apart at most
LINGER_S = 120.0  # that streams outlive the record of one that is no member
REOPENINGS, REOPENINGS_S = 5, 60.0  # p2pd is started again so many times within so long
SAY_AGAIN_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WayTo:
    """Describe the way to another member as it was found just now."""

    through: str = ""  # its relay, where it has one
    dials: bool | None = None  # whether it can open connections to this machine; None: it does not say
    bytes_per_s: float = 0.0  # from there to here


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
        self._auto: AutoTransport | None = None
        self._letting_in = threading.Lock()
        self._allowed_at: dict[str, float] = {}  # when each that has streams was last allowed to
        self._redial = Redial()
        self._reopened_at: list[float] = []
        self._said: dict[str, float] = {}
        self._board, inbox = Noticeboard(self.run_id), Inbox()
        self._board.is_member = lambda key: key == self.identity.public_key or self._gate.knows(peer_id_of(key))
        self._board.is_revoked = self._gate.is_revoked
        inbox.may_open = self._may_open
        listen = listen_host(connection.host)
        if connection.port:  # said here and now: of a daemon that cannot listen, others hear only that nobody answers
            refuse_taken(listen, connection.port)
        port = connection.port or self._book.own_port(listen)
        self._direct = self._listen(listen, port + 1, inbox)
        self._rendezvous = Rendezvous(
            self._direct, self.identity, self.admission, self._board,
            objection=self._objection, is_cut=connection.is_cut, when_left=self._let_known_in,
        )  # fmt: skip
        self._others = Neighbours(self.id, self._book, ticket, connection, self._board, self._rendezvous)
        try:
            self.directory = self._enter(listen, port, lonely=lonely)
        except BaseException:
            self._direct.close()
            raise
        self._book.keep_own(self.addresses)
        rate = connection.relay_bits_per_s
        self._relay = Relay(
            self._direct, serves=rate != 0, bytes_per_s=rate / 8 if rate else None, say=self._say_relayed
        )
        self._auto = AutoTransport(self._direct, Libp2pTransport(self.directory, inbox=inbox), self._relay)
        self.plain = _shape(self._auto, connection)
        self._meter = None
        if connection.metered and isinstance(self.plain, ShapedTransport):
            self._meter = TrafficMeter(folder, self.plain.link)
        self._twins: Twins | None = None  # from the first record on that this process publishes
        self.bulk = PooledTransport(self.plain)

    def _listen(self, host: str, port: int, inbox: Inbox) -> DirectTransport:
        try:
            return DirectTransport(self.id, host, port=port, inbox=inbox)
        except OSError as error:
            raise DirectoryError(f"cannot listen at port {port} ({error.strerror}): use another --port") from None

    def _enter(self, listen: str, port: int, *, lonely: bool) -> "Directory":
        """Start the directory, at this peer's old address where that is free: old tickets name it.

        Others are visited first, for the run's time and for who is there. Whoever lets this peer in there need not have
        a daemon that answers: strangers may have ended it.
        """
        from diloco.comm.peers.directory import Directory  # takes seconds: hivemind

        host = self.connection.host
        where: dict[str, Any] = {"listen_host": listen, "listen_port": port, "fixed": bool(self.connection.port)}
        if listen != host:
            where["announce"] = [multiaddr(host, port)]
        if listen in (ANYWHERE, "::"):
            log.warning(
                "%s is not an address of this machine: your router must forward %d and %d to it", host, port, port + 1
            )
        where |= {"is_cut": self.connection.is_cut, "objection": self._objection}
        places, start = (
            self._others.places(),
            partial(Directory.start, self.identity, self.admission, self._board, **where),
        )
        if self._others.visit(places) or lonely:
            directory = start()
            with suppress(DirectoryError):  # whoever does not answer is tried again
                directory.reach(places)
            return directory
        bootstrap = [place for known in places.values() for place in known]
        if self._rendezvous.refusal:
            raise DirectoryError(f"nobody lets this peer in at {', '.join(bootstrap)}: {self._rendezvous.refusal}")
        return start(bootstrap=bootstrap)

    def reach(self, places: Mapping[str, Sequence[str]]) -> set[str]:
        """Return which of these peers let this one in, by a visit or in the directory.

        From then on they and this one know each other's records.
        """
        with ThreadPoolExecutor(1, "visit") as pool:
            visiting, reached = pool.submit(self._others.visit, places), set[str]()
            try:
                reached = self.directory.reach(places)
            except DirectoryError as error:
                self._say_once("cannot reach others through p2pd", error)
            return reached | visiting.result()

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
        if self._twins is None:
            self._twins = Twins(me.certificate_der, int(1000 * RUN_CLOCK.now()))
            self._twins.look(self._own_record)  # before ours takes its place
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
                    self._publish_again()
                    self.reach_lost(time.monotonic())  # to whom the directory does not bring it
                except OSError as error:
                    self._say_once("cannot be announced", error)

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
        try:
            self.directory.peers(ask_others=ask_others)  # what they say is on the board then
        except DirectoryError as error:
            self._say_once("cannot look into the directory", error)
        found = self._let_known_in()
        self._drop_others()
        return {peer: address_of(peer, record) for peer, record in found.items()}

    def _let_known_in(self) -> dict[str, PeerRecord]:
        """Let those connect whose records are on the board, and return these. Any thread may call it."""
        with self._letting_in:
            return self._let_in()

    def _let_in(self) -> dict[str, PeerRecord]:
        found = {peer_id_of(key): record for key, record in self._board.peers().items()}
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
        if self._auto is not None:  # else it is not open yet
            self._auto.allow(address_of(peer, record) for peer, record in (self.records | watchers).items())
        return found

    def _drop_others(self) -> None:
        """Close the streams of those who are kept out, and of those who have long had no record and are no members.

        Again and again: one may have been about to open another one.
        """
        now, inbox = time.monotonic(), self._direct.inbox
        open_to, kept_out = inbox.peers() - {self.id}, self._gate.kept_out
        allowed = self.records.keys() | self._watchers
        self._allowed_at = {peer: now if peer in allowed else self._allowed_at.get(peer, now) for peer in open_to}
        for peer in open_to:
            if peer in kept_out or now - self._allowed_at[peer] > LINGER_S:
                inbox.drop(peer)

    def _may_open(self, peer: str, channel: str) -> bool:
        """Tell whether a peer may open a stream now: one that only watches may ask for the status, and nothing else."""
        return peer in self.records or (channel == STATUS_CHANNEL and peer in self._watchers)

    def _is_member(self, peer: str) -> bool:
        state = self.state()
        return state is not None and peer in state.roster

    def watch(self, know: Know, fail: Fail) -> None:
        super().watch(know, fail)
        reachable = Reachability(self._relay, self._known, self.name_of, self._reached_otherwise)
        threading.Thread(target=reachable.watch, args=(self._stop,), name="reachable", daemon=True).start()
        threading.Thread(target=self._look_for_lost, name="visits", daemon=True).start()

    def _look_for_lost(self) -> None:
        """Dial and visit on a thread of its own: who answers slowly must not keep this island from all others."""
        while not self._stop.wait(LOOK_S):
            try:
                if self.reach_lost(time.monotonic()):
                    self._publish_soon.set()  # they have not heard of us
            except OSError as error:
                self._say_once("cannot dial others", error)

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
        published, asked, refused, told_twin = -PUBLISH_S, -ASK_OTHERS_S, "", ""
        since = time.monotonic()
        while not self._stop.wait(LOOK_S):
            try:
                if not self.directory.running and self._reopen():
                    published = -PUBLISH_S
                if (refusal := self._refusal) and refusal != refused:
                    refused = refusal
                    self.report("kept out", self.id, f"another island does not let this one in: {refusal}")
                # before it publishes: of two records under one key the newer is kept, and a twin's would not be seen
                ask = time.monotonic() - asked > ASK_OTHERS_S or self._ask_soon.is_set()
                self._ask_soon.clear()
                know(self.find_peers(ask_others=ask))
                asked = time.monotonic() if ask else asked
                twin, was_first = ("", False) if self._twins is None else self._twins.look(self._own_record)
                if twin and was_first:
                    fail(IdentityError(f"{twin}: {END}"))
                    return
                if twin and twin != told_twin:
                    told_twin = twin
                    self.report("twin", self.id, twin)
                if self._is_taken_out(since):
                    fail(Evicted(EVICTED))
                    return
                if self._publish_soon.is_set():  # others have not heard of us, or of our relay
                    published = -PUBLISH_S
                    self._publish_soon.clear()
                if time.monotonic() - published > PUBLISH_S and self._publish_again():
                    published = time.monotonic()
                present = {peer: record.control for peer, record in self.records.items() if self._gate.knows(peer)}
                self._book.remember(present, self._is_member)
            except (TicketError, IdentityError) as error:  # of one record: the others count
                log.warning("%s: a record is not used: %s", self.connection.name, error)
            except OSError as error:  # a full disk, no descriptors: that passes
                self._say_once("cannot look for others", error)

    @property
    def _own_record(self) -> PeerRecord | None:
        """Return the newest record under this peer's key: its own, unless another process has the key, too."""
        return self._board.peers().get(self.identity.public_key)

    @property
    def _refusal(self) -> str:
        return self._rendezvous.refusal or self.directory.refusal

    def _publish_again(self) -> bool:
        try:
            self.publish()
        except DirectoryError as error:
            self._say_once("cannot be announced", error)
            return False
        return True

    def _say_once(self, what: str, error: BaseException) -> None:
        """Log what goes wrong, and again after a minute if it still does."""
        text, now = f"{what}: {error}", time.monotonic()
        self._said = {said: at for said, at in self._said.items() if now - at < SAY_AGAIN_S}
        if text not in self._said:
            self._said[text] = now
            log.warning("%s: %s", self.connection.name, text)

    def _is_taken_out(self, since: float) -> bool:
        """Tell whether the owner has taken this island out while it was away, as members have just said and none
        contradicts: a liar alone could not keep those silent that would let it in."""
        now, said = time.monotonic(), list(self._rendezvous.refused_by.items())
        lately = [peer for peer, (reason, at) in said if reason == TAKEN_OUT and now - at < REFUSED_S]
        heard_at = max((since, *self._renewed_at.values()))
        return any(map(self._gate.knows, lately)) and now - heard_at > OVERDUE_S

    def reach_lost(self, now: float) -> bool:
        """Dial those whose records are overdue, as often as their turns come, and visit those of whom others have told;
        return whether anybody answered."""
        places = self._others.places()
        overdue = {peer for peer in places if now - self._renewed_at.get(peer, -OVERDUE_S) >= OVERDUE_S}
        lost = sorted(overdue - self._gate.kept_out)
        due = self._redial.due(lost, now)
        answered = self._others.meet_new()
        if due:
            answered |= self.reach({peer: places[peer] for peer in due})
            self._redial.tried(due, time.monotonic())
        return bool(answered)

    def _reopen(self) -> bool:
        """Start p2pd again, and return whether that was done.

        Where it ends again and again, or before it is open, wait for a while: strangers may do that, and neither rounds
        nor newcomers need it.
        """
        now = time.monotonic()
        self._reopened_at = [at for at in self._reopened_at if now - at < REOPENINGS_S]
        if len(self._reopened_at) >= REOPENINGS:
            log_text = f"it ended {REOPENINGS} times within {REOPENINGS_S:.0f} s, and is started again in a while"
            self._say_once("the network daemon p2pd does not run; rounds go on", DirectoryError(log_text))
            return False
        self._reopened_at.append(now)
        try:
            self.directory.reopen()
        except DirectoryError as error:
            self._say_once("the network daemon p2pd cannot be started again; rounds go on", error)
            return False
        log.warning("%s: the network daemon p2pd had ended and was started again", self.connection.name)
        self._redial, self._renewed_at = Redial(), {}  # it knows nobody: all are to be dialled now
        self._book.keep_own(self.addresses)
        return True

    def close(self) -> None:
        super().close()
        self.directory.close()
        if self._meter is not None:
            self._meter.close()


def address_of(peer: str, record: PeerRecord) -> PeerAddress:
    """Return where a peer can be reached, by its record; without a bulk address only libp2p remains."""
    host, port = record.bulk[0] if record.bulk else ("", 0)
    relay = peer_id_of(record.relay) if record.relay else ""
    return PeerAddress(peer, host, port, record.certificate, record.control, relay)


def _shape(transport: Transport, connection: Connection) -> Transport:
    if connection.shape is not None:
        return connection.shape(transport)
    limited = connection.up_bits_per_s is not None or connection.down_bits_per_s is not None
    if not limited and not connection.delay_s and not connection.metered:
        return transport
    link = Link(connection.up_bits_per_s, connection.down_bits_per_s)
    return ShapedTransport(transport, link, Paths(Way(delay_s=connection.delay_s)))
