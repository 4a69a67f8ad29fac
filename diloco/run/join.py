"""How an island gets a state and a store, from its own disk or from others, and then takes part in rounds."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.snapshot import manifests
from diloco.checkpoint.transfer.fetch import request
from diloco.checkpoint.transfer.mirror import Mirror, Remote
from diloco.comm.codec.rooms import CPU
from diloco.comm.peers.identity import Identity
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.config.schema import Config
from diloco.data.samples import Samples
from diloco.elastic.protocol.messages import Note
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.ranges import Ranges
from diloco.elastic.protocol.record import Amendment, Latch
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode
from diloco.elastic.runtime.applier import Vectors
from diloco.elastic.runtime.driver import EVICTED, Driver, RunContext, among_friends, open_island
from diloco.elastic.runtime.fetching import FetchedState, check_contains, fetch_state
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import Origin, kept_in, memory_of, restore
from diloco.errors import (
    DirectoryError,
    Evicted,
    JoinRefused,
    MessageRefused,
    SaveError,
    TransferFailed,
    TransportError,
)
from diloco.island.layout import Layout
from diloco.island.mesh import ProcessMesh
from diloco.report.events import IslandNews
from diloco.report.sinks import Events
from diloco.run.amending import is_over
from diloco.run.folder import OUTER, OWNER_KEY
from diloco.run.genesis import FILE, Genesis, read_genesis, write_genesis
from diloco.run.local import LocalPeer
from diloco.run.peer import Peer
from diloco.run.status import StatusKeeper, say_starting
from diloco.train.amend import Inbox, amended, objection
from diloco.train.optimizers import optimizer_named
from diloco.train.outer import apply_record
from diloco.train.participant import Participant
from diloco.train.rounds import Rounds, decider
from diloco.train.sync import samples_ahead
from diloco.units import counted

SEARCH_S = 60.0  # for a member that answers
AGAIN_S = 0.3
PUBLISH_AGAIN_S = 3.0
GENESIS_BYTES = 8 << 20
FRAGMENTS_BYTES = 8 << 20

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Search:
    """Say for how long to look for a member that answers, and who is told of it and of a download meanwhile."""

    limit_s: float = SEARCH_S
    report: Callable[[float, str], None] = lambda waited_s, reason: None
    download: Callable[[int, int, Mapping[str, int]], None] = lambda done, total, donors: None


class Entrant(Protocol):
    """Describe who enters a run, as far as its state and its store need to know: a participant, or a witness."""

    @property
    def config(self) -> Config: ...
    @property
    def place(self) -> ProcessMesh: ...
    @property
    def events(self) -> Events: ...
    @property
    def fragments(self) -> Fragments: ...
    @property
    def samples(self) -> Samples | None: ...
    @property
    def is_witness(self) -> bool: ...


@dataclass(frozen=True)
class Start:
    """Hold where an island begins: in which run, with which state, and in which store it writes on."""

    genesis: Genesis
    origin: Origin
    store: DiskStore
    returns: bool  # from its own disk
    donors: tuple[str, ...] = ()  # who gave the state, if others did


def known_genesis(folder: Path, peer: LocalPeer, search: Search = Search()) -> Genesis:
    """Return the genesis as this island's own disk has it, or else as a member of the run gives it."""
    if (known := read_genesis(folder / OUTER, peer.run_id)) is not None:
        return known

    def ask_for_it(first: str, others: dict[str, PeerAddress]) -> Genesis:
        raw = request(peer.plain, others[first], "genesis", limit=GENESIS_BYTES, timeout_s=10)
        return Genesis.given(raw, peer.run_id)

    publish(peer)
    try:
        return ask_members(peer, ask_for_it, search)
    except JoinRefused as refused:
        if (damaged := folder / OUTER / FILE).exists():
            raise SaveError(f"{damaged} is not what was written, and nobody gives it again: {refused}") from None
        raise


def known_fragments(folder: Path, peer: LocalPeer, genesis: Genesis) -> Fragments:
    """Return how the run's vectors are divided, as this island's own disk has it, or else as a member of the run gives
    it. Only who builds no model has to ask."""
    count = Layout(genesis.names, genesis.shapes).size
    for manifest, path in manifests(folder / OUTER):
        return Fragments(kept_in(manifest, path).fragments)

    def ask_for_it(first: str, others: dict[str, PeerAddress]) -> Fragments:
        raw = request(peer.plain, others[first], "fragments", limit=FRAGMENTS_BYTES, timeout_s=10)
        ranges = decode(tuple[Ranges, ...], raw)
        parts = sorted(part for each in ranges for part in each)
        if [lo for lo, _ in parts] + [count] != [0] + [hi for _, hi in parts]:
            raise MessageRefused("the fragments that a peer gives do not cover the run's parameters")
        return Fragments(ranges)

    return ask_members(peer, ask_for_it)


def find_start(
    peer: LocalPeer, genesis: Genesis, part: Entrant, first: Vectors | None = None, search: Search = Search()
) -> Start:
    """Restore the state that this island's own disk ends with, from which the others help it to catch up; without one,
    fetch theirs. `first` are the vectors with which the run begins, of a founder that has neither."""
    config, fragments, donors = part.config, part.fragments, tuple[str, ...]()
    store = open_store(peer, genesis, config, part.events)
    device = part.place.outer_device(config.island)
    run = run_of(genesis, config, fragments, part.place.device)
    own = restore(store.folder, store.journal, run, store.report, device)
    if own is not None:
        origin, giver = own, "its own disk"
    elif first is not None:
        memory = memory_of(store.journal, store.report)
        origin, giver = Origin(genesis.state(), dict(first), memory), "the run's beginning: nothing had been saved"
    else:
        sizes = dict.fromkeys(optimizer_named(config.outer.optimizer).vectors, fragments.count)

        def ask_for_it(first: str, others: dict[str, PeerAddress]) -> tuple[FetchedState, dict[str, Tensor]]:
            def come(done: int, total: int, donors: Mapping[str, int]) -> None:
                search.download(done, total, {peer.name_of(donor): size for donor, size in donors.items()})

            fetched = fetch_state(peer.plain, first, others, genesis.digest, sizes, store.download, come)
            found = fetched.of(genesis.owner)
            if not found.state.admitted:
                raise MessageRefused("in the state that a peer gives nobody was ever admitted")
            if not set(found.state.roster) <= found.state.invites.keys():
                raise MessageRefused("in the state that a peer gives there are members that nobody has admitted")
            if genesis.state().latch and not found.state.latch:
                raise MessageRefused("the state that a peer gives needs no quorum, though the run was founded with one")
            if isinstance(peer, Peer) and found.state.latch:  # there is one history: the ticket's head is in it
                check_contains(peer.plain, others[first], peer.ticket_head, found.state.head)
            return found, found.vectors(device)

        try:
            snapshot, vectors = ask_members(peer, ask_for_it, search, lambda: store.download.bytes_come)
        except JoinRefused as refused:
            if genesis.founder != peer.id:
                raise
            raise JoinRefused(f"{refused} This island founded it and has no state of it: --fresh starts over") from None
        givers = sum(size > 0 for size in snapshot.donors.values())
        donors = tuple(snapshot.donors)
        promises = memory_of(store.journal, store.report)  # of a life that ended before it had a snapshot
        origin, giver = Origin(snapshot.state, vectors, promises), counted(givers, "peer")
    head = origin.state.head
    store.begin(genesis.digest, head.digest, head.round, known=own is not None)
    store.report("joined", f"state of round {head.round} from {giver}")
    vectors = {name: vector.to(device) for name, vector in origin.vectors.items()}
    return Start(genesis, replace(origin, vectors=vectors), store, returns=own is not None, donors=donors)


def ask_members(
    peer: LocalPeer, question: Callable[[str, dict[str, PeerAddress]], Answer], search: Search = Search(),
    come: Callable[[], int] = lambda: 0,
) -> Answer:  # fmt: skip
    """Ask as a newcomer, among peers that may not know it yet, until one answers; raise JoinRefused when the search is
    over. `come` counts what has come of an answer that takes long: when there is more, the search begins anew."""
    if not isinstance(peer, Peer):
        raise JoinRefused("nobody else is in this run")
    reason = "nobody is in the run's directory"
    began = published = time.monotonic()
    while (waited_s := time.monotonic() - began) < search.limit_s:
        search.report(waited_s, reason)
        try:
            met = peer.reach_lost(time.monotonic())
        except DirectoryError as error:  # its daemon may have ended just now: others are visited without it
            met, reason = False, str(error)
        if met or time.monotonic() - published > PUBLISH_AGAIN_S:
            reason = publish(peer) or reason  # somebody may have missed the first one
            published = time.monotonic()
        addresses = peer.find_peers()
        members = [other for other in addresses if any(peer.records[other].chain_digest)]  # newcomers have no state
        if addresses and not members:
            reason = "those who are there do not have the run yet"
        for first in members:
            before = come()
            try:
                with peer.announced():
                    return question(first, {other: addresses[other] for other in members})
            except (TransferFailed, TransportError, MessageRefused, DirectoryError, ValueError) as error:
                reason = str(error)
            if come() > before:
                began = time.monotonic()
        time.sleep(AGAIN_S)
    raise JoinRefused(f"no member of the run answered within {search.limit_s:.0f} s ({reason}): is it still on?")


def publish(peer: LocalPeer) -> str:
    """Announce a peer, and return why the directory does not take it yet; "" if it does. It is visited meanwhile."""
    try:
        peer.publish()
    except DirectoryError as error:
        return str(error)
    return ""


def open_store(peer: LocalPeer, genesis: Genesis, config: Config, events: Events) -> DiskStore:
    """Open the island's store and write the genesis there; a remote that does not work is refused first."""
    folder = Path(config.dir) / OUTER

    def report(what: str, text: str) -> None:
        events.emit(IslandNews(what=what, island=peer.connection.name, text=text))

    if (remote := remote_of(peer, config)) is not None:
        remote.check()
    try:
        store = DiskStore(folder, report, keep=config.checkpoint.keep)
        say_starting(Path(config.dir), config.run, peer.id, peer.connection.name)
        if (folder / FILE).exists() and read_genesis(folder) is None:
            store.report("damaged", f"{FILE} is not what was written: peers have given it again")
        write_genesis(folder, peer.run_id, genesis)
    except OSError as error:
        raise SaveError(f"{folder} cannot be used ({error.strerror}): set checkpoint.dir to another folder") from None
    return store


def remote_of(peer: LocalPeer, config: Config) -> Remote | None:
    """Return where `checkpoint.remote` keeps this run, None without one. Each run has a folder there: others may be
    copied to the same address."""
    url = config.checkpoint.remote
    return None if url is None else Remote(f"{url.rstrip('/')}/{config.run}-{peer.run_id.hex()[:8]}")


def run_of(genesis: Genesis, config: Config, fragments: Fragments, device: torch.device = CPU) -> RunContext:
    """Build the context of a run, in which `snapshot_every` counts updates of fragments instead of rounds."""
    every = config.checkpoint.snapshot_every * len(fragments)
    apply = partial(apply_record, device=device)
    return RunContext(genesis.raw, genesis.digest, fragments, apply, every, device)


def meet(stack: ExitStack, peer: LocalPeer, start: Start, part: Entrant, incarnation: int | None = None) -> Driver:
    """Take part among the others until the stack is closed; without an `incarnation` to continue, as a new one."""
    config, origin, store = part.config, start.origin, start.store
    if peer.id in origin.state.evicted:
        raise Evicted(EVICTED)
    inbox = Inbox(Path(config.dir))

    def report(note: Note) -> None:
        what, island, text = note.kind, peer.name_of(note.peer), peer.names.in_text(note.text)
        part.events.emit(IslandNews(what=what, island=island, text=text))

    def hand_in(bring: Callable[[Amendment], None]) -> None:
        for found in inbox.new():
            if isinstance(found, SaveError):
                report(Note("refused", peer.id, str(found)))
            else:
                bring(found)

    def prepare(node: Node) -> None:
        node.own.bytes_per_s = int(min(filter(None, peer.connection.rates), default=0) / 8)
        hand_in(node.bring)  # before it leads anything

    def refresh(addresses: Mapping[str, PeerAddress]) -> None:
        driver.know(addresses)
        if isinstance(peer, Peer):
            driver.keep_only(peer.records)
        hand_in(driver.amend)

    run = run_of(start.genesis, config, part.fragments, part.place.device)
    options = _options_at(origin.state, part, peer)
    options = replace(options, admission=peer.admission.pack().hex() if isinstance(peer, Peer) else "")
    if (owner := owner_of(Path(config.dir), start.genesis)) is not None:
        options = replace(options, sign_latch=partial(Latch.sign, owner))
    incarnation = incarnation or new_incarnation(peer.id, origin.state)
    if (remote := remote_of(peer, config)) is not None:  # the rest is copied when the store has been closed
        stack.callback(Mirror(store.folder, remote, peer.id, store.report).close)
    stack.callback(store.close)
    island = open_island(
        run, origin, options, peer.network(), incarnation=incarnation, store=store, report=report, prepare=prepare
    )
    driver = stack.enter_context(island)
    peer.head = lambda: (driver.applied.head.round, driver.applied.head.digest)
    peer.state = lambda: driver.applied
    peer.report = lambda what, other, text: report(Note(what, other, text))
    publish(peer)
    driver.know(peer.find_peers())
    if start.donors:
        driver.take_history(origin.state.head.digest, start.donors)
    peer.watch(refresh, driver.fail)
    keeper = StatusKeeper(Path(config.dir), driver, peer, part)
    stack.callback(keeper.close)  # before the driver and the store are closed
    part.events.attach(keeper)
    return driver


def owner_of(folder: Path, genesis: Genesis) -> Identity | None:
    """Return the key of the run's owner, where this island has it."""
    if not (folder / OWNER_KEY).exists():
        return None
    owner = Identity.load(folder / OWNER_KEY)
    return owner if owner.public_key.hex() == genesis.owner else None


@contextmanager
def alone(part: Participant) -> Iterator[None]:
    """Let a participant take part in a run of one that nobody can join and no disk keeps: for benches and tests."""
    config, vectors = part.config, part.initial_vectors()
    if not part.place.leader:
        part.join(None)
        yield
        return
    transport = MemoryNetwork().transport("alone")
    genesis = Genesis.of(config, part.layout, part.samples, transport.identity, part.frozen)
    run, origin = run_of(genesis, config, part.fragments, part.place.device), Origin(genesis.state(), vectors)
    options = options_for(config, alone=True)
    with closing(transport), open_island(run, origin, options, among_friends(transport)) as driver:
        part.join(Rounds(driver, config, lambda peer: config.run))
        yield


def _options_at(state: RunState, part: Entrant, peer: LocalPeer) -> Options:
    options = replace(options_for(part.config, alone=not isinstance(peer, Peer)), witness=part.is_witness)
    # it has come to look: no round is needed to give it samples; a loop of one's own asks when it wants batches
    return replace(options, want=0) if part.samples is None or is_over(part.config, state) else options


def new_incarnation(me: str, state: RunState) -> int:
    """Return an incarnation above all earlier ones that any peer could know of, even if the clock was set back."""
    marks = [incarnation for (island, incarnation, _), _ in state.marks if island == me]
    leases = [int(holder.rpartition("#")[2]) for holder, _ in state.ledger.leases if holder.startswith(f"{me}#")]
    return max(int(time.time() * 1000), *(earlier + 1 for earlier in [0, *marks, *leases]))


def leased_incarnation(me: str, state: RunState) -> int | None:
    """Return the incarnation of this island that holds samples when the run begins; None where none does."""
    held = (holder.rpartition("#") for holder, _ in state.ledger.leases)
    return next((int(incarnation) for island, _, incarnation in held if island == me), None)


def options_for(config: Config, *, alone: bool = False) -> Options:
    """Build the protocol's options, which follow amendments. `alone`: no other can come, so rounds wait for nobody."""
    elastic = config.elastic

    def heeding(options: Options, state: RunState) -> Options:
        now = amended(config, state.amendments)
        least = 1 if alone else now.elastic.min_islands
        straggler, steps = now.elastic.straggler, now.inner.steps
        return replace(options, decide=decider(now), steps=steps, straggler=straggler, min_islands=least)

    least = 1 if alone else elastic.min_islands
    return Options(
        decider(config), elastic.silence_s, elastic.straggler, least, "merge" if alone else elastic.partition,
        slowest=elastic.slowest, min_voters=elastic.min_voters, rejoin_s=elastic.rejoin_s,
        start_islands=1 if alone else elastic.start_islands, start_s=elastic.start_s,
        fragments=config.sync.fragments, want=samples_ahead(config, config.island.batch),
        steps=config.inner.steps, amended=heeding,
        objection=lambda state, amendment: objection(config, (*state.amendments, amendment)),
    )  # fmt: skip
