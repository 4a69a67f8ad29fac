"""An island of the built-in trainer among others, from its first message to its goodbye: found a run, or join one."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from diloco.comm.codec import warm_up
from diloco.comm.ticket import Ticket
from diloco.config import Config
from diloco.configfile import parse_config
from diloco.entry import (
    Search,
    Start,
    agreement,
    fetch_start,
    founding_peer,
    meeting,
    options_for,
    peer_at,
    write_ticket,
)
from diloco.events import Events
from diloco.genesis import Genesis
from diloco.peer import Connection, Peer
from diloco.place import Place, take_place
from diloco.runner import open_folder, stop_on_signal
from diloco.trainer import Outcome, Trainer


def found(config: Config, connection: Connection, *, fresh: bool) -> Outcome:
    """A new run, with this island as its first. Others join with the ticket that lies in its folder."""
    with _island(config) as (place, events, stack):
        trainer = Trainer(config, place, events)
        place.leader_first(lambda: open_folder(config, events, resume=False, fresh=fresh))
        peer, start = None, None
        if place.leader:
            folder = Path(config.dir)
            peer, ticket = stack.enter_context(founding_peer(folder, connection))
            genesis = Genesis.of(config, trainer.island.layout, trainer.samples, peer.id)
            start = Start(genesis, genesis.state(), trainer.outer)
            events.emit("ticket", ticket=ticket.render())
            write_ticket(folder, ticket)
        return _take_part(trainer, stack, peer, start)


def join(text: str, own: dict[str, Any], connection: Connection, folder: Path) -> Outcome:
    """Take part in a run that is under way: its configuration and its state come from the others."""
    ticket = Ticket.parse(text, time.time())
    island = parse_config({"island": own.get("island", {})})
    with _island(island) as (place, events, stack):
        peer, genesis = None, None
        if place.leader:
            peer = stack.enter_context(peer_at(folder, ticket.run_id, ticket, connection))
            peer.publish()
            genesis = Search(peer).genesis()
        genesis = place.share(genesis)
        checkpoint = {**own.get("checkpoint", {}), "dir": str(folder)}
        config = genesis.configure({**own, "checkpoint": checkpoint})
        genesis.refuse_own_loop()
        trainer = Trainer(config, place, events)
        genesis.check(trainer.island.layout, trainer.samples)
        place.leader_first(lambda: open_folder(config, events, resume=True, fresh=False))
        start = None
        if peer is not None:
            start = fetch_start(peer, genesis, config, trainer.island.layout.size, events)
        return _take_part(trainer, stack, peer, start)


@contextmanager
def _island(config: Config) -> Iterator[tuple[Place, Events, ExitStack]]:
    with take_place(config.island) as place, ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        yield place, events, stack


def _take_part(trainer: Trainer, stack: ExitStack, peer: Peer | None, start: Start | None) -> Outcome:
    place, events, config = trainer.place, trainer.events, trainer.config
    together = None
    if peer is not None and start is not None:
        warm_up(config.sync.codec)
        options = options_for(config)
        together = stack.enter_context(meeting(peer, start, config, trainer.fragments, events, options=options))
    trainer.join(together)
    with stop_on_signal(loud=place.leader) as stop:
        outcome = trainer.run(lambda: stop.asked)
    if together is not None:
        events.emit("agreed", **agreement(together))
    return outcome
