"""How an island gets into a run: as its founder or by a ticket, and then among the others."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.asking import ask
from diloco.comm.identity import Identity
from diloco.comm.ticket import Ticket, run_id_of
from diloco.comm.transport import PeerAddress
from diloco.config import Config
from diloco.elastic.driver import Driver, Run
from diloco.elastic.fetching import Snapshot, fetch_state
from diloco.elastic.fragments import Fragments
from diloco.elastic.mailbox import greet
from diloco.elastic.messages import Note
from diloco.elastic.node import Node, Options
from diloco.elastic.state import RunState
from diloco.errors import JoinRefused, MessageRefused, TransferFailed, TransportError
from diloco.events import Events
from diloco.genesis import Genesis
from diloco.outer import VECTORS, apply_record
from diloco.peer import Connection, Peer
from diloco.together import Together, decider

TICKET_S = 30 * 24 * 3600.0
SEARCH_S = 60.0  # for a member that answers
AGAIN_S = 0.3
PUBLISH_AGAIN_S = 3.0
GENESIS_BYTES = 8 << 20
PHASES_AHEAD = 2  # worth of samples that an island leases


@dataclass(frozen=True)
class Start:
    """Where an island begins: what all agree on at that point, and the vectors."""

    genesis: Genesis
    state: RunState
    vectors: dict[str, torch.Tensor]


@contextmanager
def peer_at(folder: Path, run_id: bytes, ticket: Ticket | None, connection: Connection) -> Iterator[Peer]:
    folder.mkdir(parents=True, exist_ok=True)
    peer = Peer(folder, run_id, ticket, connection)
    try:
        peer.write_addresses(folder)
        yield peer
    finally:
        peer.close()


@contextmanager
def founding_peer(folder: Path, connection: Connection) -> Iterator[tuple[Peer, Ticket]]:
    """The first peer of a new run, and what lets others in."""
    owner = Identity.load(folder / "owner.key")
    with peer_at(folder, run_id_of(owner.public_key), None, connection) as peer:
        ticket = peer.ticket = Ticket.issue(owner, peer.addresses, now=time.time(), lifetime_s=TICKET_S)
        yield peer, ticket


def fetch_start(peer: Peer, genesis: Genesis, config: Config, size: int, events: Events) -> Start:
    """Where the others are."""
    snapshot = Search(peer).state(genesis, dict.fromkeys(VECTORS[config.outer.optimizer], size))
    givers = sum(size > 0 for size in snapshot.donors.values())
    story = f"state of round {snapshot.state.head.round} from {givers} peer{'s' * (givers != 1)}"
    events.emit("elastic", what="joined", island=peer.connection.name, text=story)
    return Start(genesis, snapshot.state, snapshot.vectors)


@contextmanager
def meeting(
    peer: Peer, start: Start, config: Config, fragments: Fragments, events: Events, *, options: Options
) -> Iterator[Together]:
    """Among the others, for as long as it is open."""
    node = Node(peer.id, start.state, options, now=time.monotonic(), incarnation=int(time.time() * 1000))
    node.bytes_per_s = int(min(filter(None, peer.connection.rates), default=0) / 8)
    run = Run(start.genesis.raw, start.genesis.digest, fragments, apply_record)

    def tell(note: Note) -> None:
        island = peer.name_of(note.peer)
        events.emit("elastic", what=note.kind, island=island, text=note.text)

    driver = Driver(node, run, start.vectors, peer.network(), tell)
    try:
        peer.head = lambda: (driver.applied.head.round, driver.applied.head.digest)
        peer.publish()
        driver.know(peer.look())
        peer.watch(driver.know)
        yield Together(driver, config, peer.name_of)
    finally:
        driver.close()


def options_for(config: Config) -> Options:
    elastic = config.elastic
    return Options(
        decider(config), elastic.silence_s, elastic.straggler, elastic.min_islands, elastic.partition,
        fragments=config.sync.fragments, want=samples_ahead(config, config.island.batch),
    )  # fmt: skip


def samples_ahead(config: Config, per_step: int) -> int:
    """What an island would like to hold."""
    return PHASES_AHEAD * config.sync.every * per_step


def agreement(together: Together) -> dict[str, Any]:
    state = together.session.state
    return {
        "round": state.head.round, "chain": state.head.digest, "state": together.driver.replica.digest(),
        "tokens": state.head.tokens, "bytes_sent": together.driver.bytes_sent,
    }  # fmt: skip


class Search:
    """A newcomer among peers that may not know it yet: ask until somebody answers."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._reason = "nobody is in the run's directory"

    def genesis(self) -> Genesis:
        return self._ask(lambda first, others: Genesis.parse(self._item(others[first])))

    def _item(self, address: PeerAddress) -> bytes:
        return ask(self.peer.plain, address, "genesis", limit=GENESIS_BYTES, timeout_s=10)

    def state(self, genesis: Genesis, sizes: dict[str, int]) -> Snapshot:
        return self._ask(lambda first, others: fetch_state(self.peer.plain, first, others, genesis.digest, sizes))

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
    draft = folder / ".ticket"
    draft.write_text(ticket.render() + "\n")
    draft.rename(folder / "ticket")
