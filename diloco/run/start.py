"""An island from its first message to its goodbye: it founds a run, resumes one, or joins one by a ticket.

`Entrance` does that for every participant, the built-in trainer and loops of other people (`diloco.connect`) alike. An
island alone founds a run of one that nobody else can join (no `Connection`): otherwise it is a run like any other.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco.checkpoint.save import saves
from diloco.comm.codec.registry import warm_up
from diloco.comm.peers.ticket import Ticket
from diloco.config.file import own_island
from diloco.config.schema import Config, IslandConfig
from diloco.elastic.protocol.node import Options
from diloco.errors import ConfigError, JoinRefused, SaveError
from diloco.island.mesh import Place, take_place
from diloco.report.events import Events
from diloco.run.branch import branch_if_needed
from diloco.run.folder import OUTER, has_log, open_folder
from diloco.run.genesis import FILE, Genesis, own_sections, read_genesis
from diloco.run.join import (
    AnyPeer,
    Search,
    Start,
    find_start,
    founding_peer,
    leased_incarnation,
    meeting,
    new_start,
    options_for,
    peer_at,
    write_ticket,
)
from diloco.run.peer import Connection
from diloco.run.signals import Stop, stop_on_signal
from diloco.train.amend import amended
from diloco.train.participant import Participant
from diloco.train.resume import Earlier, find_earlier
from diloco.train.schedule import schedule_of
from diloco.train.trainer import Outcome, Trainer

Build = Callable[[Config], Participant]  # refuses what cannot work, before anything on disk is touched


def run(config: Config, connection: Connection | None = None, *, resume: bool = False, fresh: bool = False) -> Outcome:
    """Train in a run that was founded here, or found it first. Without a connection nobody else can join."""
    if resume and fresh:
        raise ConfigError("--resume goes on with the earlier run, --fresh starts again: use one of them")
    with _built_in(config.island, connection) as entrance:
        if resume:
            return _train(entrance, entrance.resume(config))
        return _train(entrance, entrance.found(config, fresh=fresh))


def join(text: str, own: dict[str, Any], connection: Connection, folder: Path) -> Outcome:
    """Take part in a run. Its configuration and its state come from the others, or, as far as it goes, from this
    island's own disk, if it was here before."""
    with _built_in(own_island(own), connection) as entrance:
        return _train(entrance, entrance.join(Ticket.parse(text, time.time()), own, folder))


@contextmanager
def _built_in(island: IslandConfig, connection: Connection | None) -> Iterator["Entrance"]:
    with take_place(island) as place, ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        slowness = 1.0 if connection is None else connection.slowness
        build = partial(Trainer, place=place, events=events, slowness=slowness)
        yield Entrance(place, events, stack, connection, build)


def _train(entrance: "Entrance", part: Participant) -> Outcome:
    assert isinstance(part, Trainer)
    stop = entrance.stop
    return part.run(lambda: stop.asked, lambda: stop.pausing)


class Entrance:
    """What it opens is closed with the stack, the last first. Only the leader process has a peer."""

    def __init__(
        self,
        place: Place,
        events: Events,
        stack: ExitStack,
        connection: Connection | None,
        build: Build,
        *,
        view: bool = True,
    ) -> None:
        self.place, self.events, self.stack, self.connection = place, events, stack, connection
        self._build, self._view = build, view
        self.stop = Stop()
        self.ticket: Ticket | None = None

    @property
    def closed(self) -> bool:
        return self.connection is None

    def found(self, config: Config, *, fresh: bool) -> Participant:
        """A new run, with this island as its first. Others join with the ticket that lies in its folder."""
        part, folder = self._build(config), Path(config.dir)
        self._open_folder(config, resume=False, fresh=fresh)
        vectors = part.initial_vectors()
        peer, start = None, None
        if self.place.leader:
            peer = self._founding_peer(folder, config.run)
            genesis = Genesis.of(config, part.layout, part.samples, peer.id)
            start = new_start(peer, genesis, vectors, config, self.events)
            if self.ticket is not None:
                self.events.emit("ticket", ticket=self.ticket.render())
        return self._take_part(part, peer, start)

    def resume(self, config: Config) -> Participant:
        """A run that was founded here, once more: from this island's disk, and from whoever else is there."""
        folder = Path(config.dir)
        self._refuse_nothing(folder)
        if not self.closed:
            return self._enter(folder, own_sections(config), self._build, founded_with=config)
        part = self._build(config)
        self._open_folder(config, resume=True, prepare=lambda: branch_if_needed(folder, part))
        return self._enter(folder, own_sections(config), lambda _: part)

    def join(self, ticket: Ticket, own: dict[str, Any], folder: Path) -> Participant:
        checkpoint = {**own.get("checkpoint", {}), "dir": str(folder)}
        return self._enter(folder, {**own, "checkpoint": checkpoint}, self._build, ticket=ticket)

    def _refuse_nothing(self, folder: Path) -> None:
        if self.closed and not has_log(folder) and not saves(folder):
            raise SaveError(f"{folder} holds no save to resume from: start without --resume")
        if (has_log(folder) or not self.closed) and not (folder / "owner.key").exists():
            raise SaveError(
                f"{folder} holds no run that was founded there: start without --resume, or, if this island joined one, "
                f"diloco join TICKET --dir {folder}"
            )

    def _enter(
        self,
        folder: Path,
        own: dict[str, Any],
        build: Build,
        *,
        ticket: Ticket | None = None,
        founded_with: Config | None = None,
    ) -> Participant:
        peer: AnyPeer | None = None
        genesis = None
        if self.place.leader:
            peer = self._founding_peer(folder, folder.name) if ticket is None else self._joining_peer(folder, ticket)
            genesis = _known_genesis(folder, peer)
            if founded_with is not None:
                genesis.refuse_changes(founded_with)
        genesis = self.place.share(genesis)
        config = genesis.configure(own)
        part = build(config)
        genesis.check(part.layout, part.samples)
        if not self.closed:
            self._open_folder(config, resume=True)
        start = None
        if peer is not None:
            peer.publish()
            start = find_start(peer, genesis, config, part.fragments, self.events)
        return self._take_part(part, peer, start)

    def _open_folder(self, config: Config, **how: Any) -> None:
        how = {"fresh": False, "view": self._view} | how
        self.place.leader_first(lambda: open_folder(config, self.events, **how))

    def _founding_peer(self, folder: Path, name: str) -> AnyPeer:
        peer, self.ticket = self.stack.enter_context(founding_peer(folder, self.connection, name))
        if self.ticket is not None:
            write_ticket(folder, self.ticket)
        return peer

    def _joining_peer(self, folder: Path, ticket: Ticket) -> AnyPeer:
        assert self.connection is not None
        returns = read_genesis(folder / OUTER, ticket.run_id) is not None
        self.ticket = ticket
        return self.stack.enter_context(peer_at(folder, ticket.run_id, ticket, self.connection, lonely=returns))

    def _take_part(self, part: Participant, peer: AnyPeer | None, start: Start | None) -> Participant:
        config, rounds, earlier = part.config, None, None
        if self._view:  # a program of its own has handlers of its own
            self.stack.enter_context(stop_on_signal(self.stop, loud=self.place.leader, always_pause=self.closed))
        if peer is not None and start is not None:
            warm_up(config.sync.codec)
            if start.returns:
                earlier = _earlier_of(part, start)
            incarnation = earlier.incarnation if earlier is not None else None
            if earlier is not None and earlier.moved is not None:
                incarnation = leased_incarnation(peer.id, start.genesis.state())
            options = _options(part, start)
            start = start.on(self.place.outer_device(config.island))
            entered = meeting(
                peer, start, config, part.fragments, self.events, options=options, incarnation=incarnation
            )  # fmt: skip
            rounds = self.stack.enter_context(entered)
            self.stop.on_pause = rounds.pause
        part.join(rounds, self.place.share(earlier))
        return part


def _earlier_of(part: Participant, start: Start) -> Earlier | None:
    parent = start.genesis.parent
    chain = parent.chain if parent is not None else ""
    return find_earlier(Path(part.config.dir), start.state.head, start.store.entries(), chain)


def _options(part: Participant, start: Start) -> Options:
    config, state, options = part.config, start.state, options_for(part.config)
    now = amended(config, state.amendments)
    over = schedule_of(now.sync, now.inner).is_over(state.step, state.updates)
    # it has come to look: no round is needed to give it samples; a loop of one's own asks when it wants batches
    return replace(options, want=0) if over or part.samples is None else options


def _known_genesis(folder: Path, peer: AnyPeer) -> Genesis:
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
