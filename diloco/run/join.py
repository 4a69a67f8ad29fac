"""How an island gets into a run: as its founder or by a ticket, and then among the others."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from diloco.atomic import write_file
from diloco.checkpoint.log.begun import Begun
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.store import Store
from diloco.checkpoint.transfer.asking import ask
from diloco.checkpoint.transfer.mirror import Mirror
from diloco.checkpoint.transfer.remote import Remote
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket, run_id_of
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.config.schema import Config
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.messages import Memory, Note
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Run, among_friends, open_island
from diloco.elastic.runtime.fetching import Snapshot, fetch_state
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.mailbox import greet
from diloco.elastic.runtime.restoring import Origin, restore
from diloco.errors import JoinRefused, MessageRefused, SaveError, TransferFailed, TransportError
from diloco.report.events import Events
from diloco.run.closed import ClosedPeer
from diloco.run.folder import OUTER
from diloco.run.genesis import FILE, Genesis, read_genesis, write_genesis
from diloco.run.peer import Connection, Peer
from diloco.train.amend import Inbox, amended, objection
from diloco.train.optimizers import optimizer_named
from diloco.train.outer import apply_record
from diloco.train.participant import Participant
from diloco.train.rounds import Rounds, decider
from diloco.train.sync import samples_ahead

TICKET_S = 30 * 24 * 3600.0
SEARCH_S = 60.0  # for a member that answers
RETURN_S = 60.0  # for the others of the roster to come back with this island, before it goes on without them
AGAIN_S = 0.3
PUBLISH_AGAIN_S = 3.0
GENESIS_BYTES = 8 << 20
OWNER_KEY = "owner.key"  # in the folder of the island that founded the run

AnyPeer = Peer | ClosedPeer


@dataclass(frozen=True)
class Start:
    """Where an island begins: what all agree on at that point, and the vectors."""

    genesis: Genesis
    state: RunState
    vectors: dict[str, torch.Tensor]
    store: Store = field(default_factory=Store)
    memory: Memory | None = None  # of promises made in an earlier life
    returns: bool = False  # from its own disk

    def on(self, device: torch.device) -> "Start":
        return replace(self, vectors={name: vector.to(device) for name, vector in self.vectors.items()})


@contextmanager
def peer_at(
    folder: Path, run_id: bytes, ticket: Ticket | None, connection: Connection, *, lonely: bool = False
) -> Iterator[Peer]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaveError(f"{folder} cannot be made: {error}; name another one with --dir or checkpoint.dir") from None
    peer = Peer(folder, run_id, ticket, connection, lonely=lonely)
    try:
        peer.write_addresses(folder)
        yield peer
    finally:
        peer.close()


@contextmanager
def founding_peer(folder: Path, connection: Connection | None, name: str) -> Iterator[tuple[AnyPeer, Ticket | None]]:
    """The first peer of a run, and what lets others in; without a connection nobody gets in."""
    owner = Identity.load(folder / OWNER_KEY)
    if connection is None:
        with closing(ClosedPeer(folder, run_id_of(owner.public_key), name)) as closed:
            yield closed, None
        return
    with peer_at(folder, run_id_of(owner.public_key), None, connection, lonely=True) as peer:
        ticket = peer.ticket = Ticket.issue(owner, peer.addresses, now=time.time(), lifetime_s=TICKET_S)
        yield peer, ticket


def new_start(
    peer: AnyPeer, genesis: Genesis, vectors: dict[str, torch.Tensor], config: Config, events: Events
) -> Start:
    """Of a run that begins here."""
    genesis = genesis.signed(Identity.load(Path(config.dir) / OWNER_KEY))
    store, state = open_store(peer, genesis, config, events), genesis.state()
    store.begin(genesis.digest, state.head.digest, state.head.round, known=False)
    return Start(genesis, state, vectors, store)


def find_start(peer: AnyPeer, genesis: Genesis, config: Config, fragments: Fragments, events: Events) -> Start:
    """Where this island's own disk ends, from where the others take it on; or where they are."""
    store = open_store(peer, genesis, config, events)
    own = restore(store.folder, store.journal, run_of(genesis, config, fragments), store.tell)
    if own is not None:
        state, vectors, giver = own.state, own.vectors, "its own disk"
    else:
        sizes = dict.fromkeys(optimizer_named(config.outer.optimizer).vectors, fragments.count)
        snapshot = Search(peer).state(genesis, sizes, store.begun)
        givers = sum(size > 0 for size in snapshot.donors.values())
        state, vectors, giver = snapshot.state, snapshot.vectors, f"{givers} peer{'s' * (givers != 1)}"
    store.begin(genesis.digest, state.head.digest, state.head.round, known=own is not None)
    text = f"state of round {state.head.round} from {giver}"
    events.emit("elastic", what="joined", island=peer.connection.name, text=text)
    return Start(genesis, state, vectors, store, own.memory if own is not None else None, own is not None)


def open_store(peer: AnyPeer, genesis: Genesis, config: Config, events: Events) -> DiskStore:
    folder = Path(config.dir) / OUTER
    if (remote := remote_of(peer, config)) is not None:
        remote.check()
    try:
        store = DiskStore(folder, teller(peer, events), keep=config.checkpoint.keep)
        if (folder / FILE).exists() and read_genesis(folder) is None:
            store.tell("damaged", f"{FILE} is not what was written: peers have given it again")
        write_genesis(folder, peer.run_id, genesis)
    except OSError as error:
        raise SaveError(f"{folder} cannot be used ({error.strerror}): set checkpoint.dir to another folder") from None
    return store


def teller(peer: AnyPeer, events: Events) -> Callable[[str, str], None]:
    """Of what happens to this island's own log."""
    return lambda what, text: events.emit("elastic", what=what, island=peer.connection.name, text=text)


def remote_of(peer: AnyPeer, config: Config) -> Remote | None:
    """A folder for each run: others may be copied to the same address."""
    url = config.checkpoint.remote
    return None if url is None else Remote(f"{url.rstrip('/')}/{config.run}-{peer.run_id.hex()[:8]}")


@contextmanager
def mirrored(peer: AnyPeer, store: Store, config: Config, events: Events) -> Iterator[None]:
    """For as long as it is open, what the store writes is copied; the rest of it when the store has been closed."""
    remote = remote_of(peer, config)
    folder = Path(config.dir) / OUTER
    mirror = None if remote is None else Mirror(folder, remote, peer.id, teller(peer, events))
    try:
        yield
    finally:
        store.close()
        if mirror is not None:
            mirror.close()


def run_of(genesis: Genesis, config: Config, fragments: Fragments) -> Run:
    every = config.checkpoint.snapshot_every * len(fragments)
    return Run(genesis.raw, genesis.digest, fragments, apply_record, every)


@contextmanager
def meeting(
    peer: AnyPeer,
    start: Start,
    config: Config,
    fragments: Fragments,
    events: Events,
    *,
    options: Options,
    incarnation: int | None = None,
) -> Iterator[Rounds]:
    """Among the others, for as long as it is open; as a new incarnation, unless one goes on."""
    inbox = Inbox(Path(config.dir))

    def tell(note: Note) -> None:
        island = peer.name_of(note.peer)
        events.emit("elastic", what=note.kind, island=island, text=note.text)

    def hand_in(bring: Callable[[Amendment], None]) -> None:
        for found in inbox.new():
            if isinstance(found, SaveError):
                tell(Note("refused", peer.id, str(found)))
            else:
                bring(found)

    def prepare(node: Node) -> None:
        if start.returns:
            node.peers.expect(start.state.roster, time.monotonic() + RETURN_S)
        node.own.bytes_per_s = int(min(filter(None, peer.connection.rates), default=0) / 8)
        hand_in(node.bring)  # before it leads anything

    def look(addresses: Mapping[str, PeerAddress]) -> None:
        driver.know(addresses)
        hand_in(driver.amend)

    run, origin = run_of(start.genesis, config, fragments), Origin(start.state, start.vectors, start.memory)
    incarnation = incarnation or new_incarnation(peer.id, start.state)
    with (
        mirrored(peer, start.store, config, events),
        open_island(
            run, origin, options, peer.network(), incarnation=incarnation, store=start.store, tell=tell, prepare=prepare
        ) as driver,
    ):
        peer.head = lambda: (driver.applied.head.round, driver.applied.head.digest)
        peer.is_member = lambda other: other in driver.applied.roster
        peer.publish()
        driver.know(peer.look())
        peer.watch(look)
        yield Rounds(driver, config, peer.name_of)


@contextmanager
def alone(part: Participant) -> Iterator[None]:
    """Let a participant take part in a run of one that nobody can join and no disk keeps: for benches and tests."""
    config, vectors = part.config, part.initial_vectors()
    if not part.place.leader:
        part.join(None)
        yield
        return
    transport = MemoryNetwork().transport("alone")
    genesis = Genesis.of(config, part.layout, part.samples, transport.identity)
    run, origin = run_of(genesis, config, part.fragments), Origin(genesis.state(), vectors)
    with closing(transport), open_island(run, origin, options_for(config), among_friends(transport)) as driver:
        part.join(Rounds(driver, config, lambda peer: config.run))
        yield


def new_incarnation(me: str, state: RunState) -> int:
    """Above all earlier ones that anybody could know of, even if this machine's clock was set back."""
    marks = [incarnation for (island, incarnation, _), _ in state.marks if island == me]
    leases = [int(holder.rpartition("#")[2]) for holder, _ in state.ledger.leases if holder.startswith(f"{me}#")]
    return max(int(time.time() * 1000), *(earlier + 1 for earlier in [0, *marks, *leases]))


def leased_incarnation(me: str, state: RunState) -> int | None:
    """Of this island, where the run begins with samples that it holds."""
    held = (holder.rpartition("#") for holder, _ in state.ledger.leases)
    return next((int(incarnation) for island, _, incarnation in held if island == me), None)


def options_for(config: Config) -> Options:
    elastic = config.elastic

    def heeding(options: Options, state: RunState) -> Options:
        now = amended(config, state.amendments)
        return replace(
            options, decide=decider(now), steps=now.inner.steps, straggler=now.elastic.straggler,
            min_islands=now.elastic.min_islands,
        )  # fmt: skip

    return Options(
        decider(config), elastic.silence_s, elastic.straggler, elastic.min_islands, elastic.partition,
        fragments=config.sync.fragments, want=samples_ahead(config, config.island.batch),
        steps=config.inner.steps, amended=heeding,
        objection=lambda state, amendment: objection(config, (*state.amendments, amendment)),
    )  # fmt: skip


class Search:
    """A newcomer among peers that may not know it yet: ask until somebody answers."""

    def __init__(self, peer: AnyPeer) -> None:
        if isinstance(peer, ClosedPeer):
            raise JoinRefused("nobody else is in this run")
        self.peer = peer
        self._reason = "nobody is in the run's directory"

    def genesis(self) -> Genesis:
        return self._ask(lambda first, others: Genesis.given(self._item(others[first]), self.peer.run_id))

    def _item(self, address: PeerAddress) -> bytes:
        return ask(self.peer.plain, address, "genesis", limit=GENESIS_BYTES, timeout_s=10)

    def state(self, genesis: Genesis, sizes: dict[str, int], begun: Begun | None) -> Snapshot:
        return self._ask(
            lambda first, others: fetch_state(self.peer.plain, first, others, genesis.digest, sizes, begun).of(
                genesis.owner
            )
        )

    def _members(self, addresses: dict[str, PeerAddress]) -> dict[str, PeerAddress]:
        """Those who have a state: other newcomers have none to give."""
        return {peer: address for peer, address in addresses.items() if any(self.peer.records[peer].chain_digest)}

    def _ask(self, question: Callable[[str, dict[str, PeerAddress]], Any]) -> Any:
        deadline, published = time.monotonic() + SEARCH_S, time.monotonic()
        while time.monotonic() < deadline:
            if time.monotonic() - published > PUBLISH_AGAIN_S:  # somebody may have missed the first one
                self.peer.publish()
                published = time.monotonic()
            addresses = self.peer.look()
            members = self._members(addresses)
            for address in members.values():  # all of them: each gives its part of a state
                with suppress(TransportError):
                    greet(self.peer.plain, address, self.peer.network().greeting)
            for first in members:
                try:
                    return question(first, addresses)
                except (TransferFailed, TransportError, MessageRefused, ValueError) as error:
                    self._reason = str(error)
            time.sleep(AGAIN_S)
        raise JoinRefused(f"no member of the run answered within {SEARCH_S:.0f} s ({self._reason}): is it still on?")


def write_ticket(folder: Path, ticket: Ticket) -> None:
    write_file(folder / "ticket", ticket.render() + "\n")
