"""An island of the built-in trainer, from its first message to its goodbye: alone, founding a run, or joining one."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.comm.codec.registry import warm_up
from diloco.comm.peers.ticket import Ticket
from diloco.config.file import own_island
from diloco.config.schema import Config, IslandConfig
from diloco.errors import ConfigError, JoinRefused, SaveError
from diloco.island.mesh import Place, take_place
from diloco.report.events import Events
from diloco.run.folder import open_folder, refuse_remote
from diloco.run.genesis import FILE, Genesis, own_sections, read_genesis
from diloco.run.join import (
    OUTER,
    Search,
    Start,
    agreement,
    find_start,
    founding_peer,
    meeting,
    new_start,
    options_for,
    peer_at,
    write_ticket,
)
from diloco.run.peer import Connection, Peer
from diloco.run.signals import stop_on_signal
from diloco.train.amend import amended
from diloco.train.resume import Earlier, find_earlier
from diloco.train.rounds import Together
from diloco.train.schedule import schedule_of
from diloco.train.trainer import Outcome, Trainer


def run(config: Config, *, resume: bool = False, fresh: bool = False) -> Outcome:
    if resume and fresh:
        raise ConfigError("--resume goes on with the earlier run, --fresh starts again: use one of them")
    refuse_remote(config)
    with take_place(config.island) as place:
        events = Events()
        trainer = Trainer(config, place, events)  # before anything on disk is touched: it refuses what cannot work
        if resume:
            trainer.resume()
        place.leader_first(lambda: open_folder(config, events, resume=resume, fresh=fresh))
        try:
            with stop_on_signal(loud=place.leader) as stop:
                return trainer.run(lambda: stop.asked)
        finally:
            events.close()


def found(config: Config, connection: Connection, *, fresh: bool) -> Outcome:
    """A new run, with this island as its first. Others join with the ticket that lies in its folder."""
    with _island(config.island) as (place, events, stack):
        trainer = Trainer(config, place, events, slowness=connection.slowness)
        place.leader_first(lambda: open_folder(config, events, resume=False, fresh=fresh))
        peer, start = None, None
        if place.leader:
            folder = Path(config.dir)
            peer, ticket = stack.enter_context(founding_peer(folder, connection))
            genesis = Genesis.of(config, trainer.island.layout, trainer.samples, peer.id)
            start = new_start(peer, genesis, trainer.outer, config, events)
            events.emit("ticket", ticket=ticket.render())
            write_ticket(folder, ticket)
        return _take_part(trainer, stack, peer, start)


def go_on(config: Config, connection: Connection) -> Outcome:
    """A run that was founded here, once more: from this island's disk, and from whoever else is there."""
    folder = Path(config.dir)
    if not (folder / "owner.key").exists():
        raise SaveError(
            f"{folder} holds no run that was founded there: start without --resume, or, if this island joined one, "
            f"diloco join TICKET --dir {folder}"
        )
    with _island(config.island) as (place, events, stack):
        peer, genesis = None, None
        if place.leader:
            peer, ticket = stack.enter_context(founding_peer(folder, connection))
            write_ticket(folder, ticket)
            genesis = _known_genesis(folder, peer)
            genesis.refuse_changes(config)
        return _enter(place, events, stack, peer, genesis, own_sections(config), connection.slowness)


def join(text: str, own: dict[str, Any], connection: Connection, folder: Path) -> Outcome:
    """Take part in a run. Its configuration and its state come from the others, or, as far as it goes, from this
    island's own disk, if it was here before."""
    ticket = Ticket.parse(text, time.time())
    with _island(own_island(own)) as (place, events, stack):
        peer, genesis = None, None
        if place.leader:
            returns = read_genesis(folder / OUTER, ticket.run_id) is not None
            peer = stack.enter_context(peer_at(folder, ticket.run_id, ticket, connection, lonely=returns))
            genesis = _known_genesis(folder, peer)
        checkpoint = {**own.get("checkpoint", {}), "dir": str(folder)}
        own = {**own, "checkpoint": checkpoint}
        return _enter(place, events, stack, peer, genesis, own, connection.slowness)


def _known_genesis(folder: Path, peer: Peer) -> Genesis:
    genesis = read_genesis(folder / OUTER, peer.run_id)
    if genesis is None:
        peer.publish()
        try:
            genesis = Search(peer).genesis()
        except JoinRefused as refused:
            if (damaged := folder / OUTER / FILE).exists():
                raise SaveError(f"{damaged} is not what was written, and nobody gives it again: {refused}") from None
            raise
    return genesis


def _enter(
    place: Place,
    events: Events,
    stack: ExitStack,
    peer: Peer | None,
    genesis: Genesis | None,
    own: dict[str, Any],
    slowness: float,
) -> Outcome:
    genesis = place.share(genesis)
    config = genesis.configure(own)
    genesis.refuse_own_loop()
    trainer = Trainer(config, place, events, slowness=slowness)
    genesis.check(trainer.island.layout, trainer.samples)
    place.leader_first(lambda: open_folder(config, events, resume=True, fresh=False))
    start = None
    if peer is not None:
        peer.publish()
        start = find_start(peer, genesis, config, trainer.fragments, events)
    return _take_part(trainer, stack, peer, start)


@contextmanager
def _island(config: IslandConfig) -> Iterator[tuple[Place, Events, ExitStack]]:
    with take_place(config) as place, ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        yield place, events, stack


def _take_part(trainer: Trainer, stack: ExitStack, peer: Peer | None, start: Start | None) -> Outcome:
    place, events, config = trainer.place, trainer.events, trainer.config
    together, earlier = None, None
    stop = stack.enter_context(stop_on_signal(loud=place.leader))
    if peer is not None and start is not None:
        warm_up(config.sync.codec)
        if start.returns:
            earlier = find_earlier(Path(config.dir), start.state.head, start.store.entries())
        entered = _meeting(peer, start.on(place.outer_device(config.island)), trainer, earlier)
        together = stack.enter_context(entered)
        stop.on_pause = together.pause
    trainer.join(together, place.share(earlier))
    outcome = trainer.run(lambda: stop.asked, lambda: stop.pausing)
    if together is not None:
        events.emit("agreed", **agreement(together))
    return outcome


def _meeting(peer: Peer, start: Start, trainer: Trainer, earlier: Earlier | None) -> AbstractContextManager[Together]:
    config, state, options = trainer.config, start.state, options_for(trainer.config)
    now = amended(config, state.amendments)
    if schedule_of(now.sync, now.inner).is_over(state.step, state.updates):
        options = replace(options, want=0)  # it has come to look: no round is needed to give it samples
    incarnation = earlier.incarnation if earlier is not None else None
    return meeting(peer, start, config, trainer.fragments, trainer.events, options=options, incarnation=incarnation)
