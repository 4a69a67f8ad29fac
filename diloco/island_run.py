"""An island among others, from its first message to its goodbye: found a run, or join one."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.asking import ask
from diloco.comm.codec import warm_up
from diloco.comm.identity import Identity
from diloco.comm.ticket import Ticket, run_id_of
from diloco.comm.transport import PeerAddress
from diloco.config import Config
from diloco.configfile import parse_config
from diloco.elastic.driver import Driver, Run
from diloco.elastic.fetching import Snapshot, fetch_state
from diloco.elastic.mailbox import greet
from diloco.elastic.messages import Note
from diloco.elastic.node import Node, Options
from diloco.elastic.state import RunState
from diloco.errors import JoinRefused, MessageRefused, TransferFailed, TransportError
from diloco.events import Events
from diloco.genesis import Genesis
from diloco.outer import VECTORS, apply_record
from diloco.peer import Connection, Peer
from diloco.place import Place, take_place
from diloco.runner import open_folder, stop_on_signal
from diloco.together import Together, decider
from diloco.trainer import Outcome, Trainer

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


def found(config: Config, connection: Connection, *, fresh: bool) -> Outcome:
    """A new run, with this island as its first. Others join with the ticket that lies in its folder."""
    with _island(config) as (place, events, stack):
        trainer = Trainer(config, place, events)
        place.leader_first(lambda: open_folder(config, events, resume=False, fresh=fresh))
        peer, start = None, None
        if place.leader:
            folder = Path(config.dir)
            owner = Identity.load(folder / "owner.key")
            peer = stack.enter_context(_peer(folder, run_id_of(owner.public_key), None, connection))
            peer.ticket = Ticket.issue(owner, peer.addresses, now=time.time(), lifetime_s=TICKET_S)
            genesis = Genesis.of(config, trainer.island.layout, trainer.samples, peer.id)
            start = Start(genesis, genesis.state(), trainer.outer)
            events.emit("ticket", ticket=peer.ticket.render())
            write_ticket(folder, peer.ticket)
        return _take_part(trainer, stack, peer, start)


def join(text: str, own: dict[str, Any], connection: Connection, folder: Path) -> Outcome:
    """Take part in a run that is under way: its configuration and its state come from the others."""
    ticket = Ticket.parse(text, time.time())
    island = parse_config({"island": own.get("island", {})})
    with _island(island) as (place, events, stack):
        peer, genesis = None, None
        if place.leader:
            peer = stack.enter_context(_peer(folder, ticket.run_id, ticket, connection))
            peer.publish()
            genesis = Search(peer).genesis()
        genesis = place.share(genesis)
        checkpoint = {**own.get("checkpoint", {}), "dir": str(folder)}
        config = genesis.configure({**own, "checkpoint": checkpoint})
        trainer = Trainer(config, place, events)
        genesis.check(trainer.island.layout, trainer.samples)
        place.leader_first(lambda: open_folder(config, events, resume=True, fresh=False))
        start = None
        if peer is not None:
            names = VECTORS[config.outer.optimizer]
            snapshot = Search(peer).state(genesis, dict.fromkeys(names, trainer.island.layout.size))
            start = Start(genesis, snapshot.state, snapshot.vectors)
            givers = sum(size > 0 for size in snapshot.donors.values())
            story = f"state of round {snapshot.state.head.round} from {givers} peer{'s' * (givers != 1)}"
            events.emit("elastic", what="joined", island=connection.name, text=story)
        return _take_part(trainer, stack, peer, start)


@contextmanager
def _island(config: Config) -> Iterator[tuple[Place, Events, ExitStack]]:
    with take_place(config.island) as place, ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        yield place, events, stack


@contextmanager
def _peer(folder: Path, run_id: bytes, ticket: Ticket | None, connection: Connection) -> Iterator[Peer]:
    folder.mkdir(parents=True, exist_ok=True)
    peer = Peer(folder, run_id, ticket, connection)
    try:
        peer.write_addresses(folder)
        yield peer
    finally:
        peer.close()


def _take_part(trainer: Trainer, stack: ExitStack, peer: Peer | None, start: Start | None) -> Outcome:
    place, events = trainer.place, trainer.events
    together = None
    if peer is not None and start is not None:
        warm_up()
        together = _connect(trainer, stack, peer, start)
    trainer.join(together)
    with stop_on_signal(loud=place.leader) as stop:
        outcome = trainer.run(lambda: stop.asked)
    if together is not None:
        events.emit("agreed", **_agreement(together))
    return outcome


def _connect(trainer: Trainer, stack: ExitStack, peer: Peer, start: Start) -> Together:
    config = trainer.config
    node = Node(peer.id, start.state, options_for(config), now=time.monotonic(), incarnation=int(time.time() * 1000))
    node.bytes_per_s = int(min(filter(None, peer.connection.rates), default=0) / 8)
    run = Run(start.genesis.raw, start.genesis.digest, trainer.fragments, apply_record)

    def tell(note: Note) -> None:
        island = peer.name_of(note.peer)
        trainer.events.emit("elastic", what=note.kind, island=island, text=note.text)

    driver = Driver(node, run, start.vectors, peer.network(), tell)
    stack.callback(driver.close)
    peer.head = lambda: (driver.applied.head.round, driver.applied.head.digest)
    peer.publish()
    driver.know(peer.look())
    peer.watch(driver.know)
    return Together(driver, config, peer.name_of)


def options_for(config: Config) -> Options:
    elastic = config.elastic
    return Options(
        decider(config), elastic.silence_s, elastic.straggler, elastic.min_islands, elastic.partition,
        fragments=config.sync.fragments, want=PHASES_AHEAD * config.sync.every * config.island.batch,
    )  # fmt: skip


def _agreement(together: Together) -> dict[str, Any]:
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
