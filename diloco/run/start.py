"""An island from its first message to its goodbye: it founds a run, resumes one, or joins one by a ticket.

`RunEntry` does that for every participant, the built-in trainer and loops of other people (`diloco.connect`) alike. An
island alone founds a run of one that nobody else can join (no `Connection`): in all else it is a run like any other.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.save.facts import saves
from diloco.comm.codec.registry import warm_up
from diloco.comm.peers.identity import Identity, run_id_of
from diloco.comm.peers.ticket import Ticket
from diloco.config.file import own_island
from diloco.config.schema import Config, IslandConfig
from diloco.elastic.runtime.restoring import Origin, newest_end
from diloco.errors import SaveError
from diloco.island.mesh import ProcessMesh, open_mesh
from diloco.island.signs import ENDED
from diloco.report.announce import Announcer
from diloco.report.console import LastingConsole
from diloco.report.events import Note, TicketReady
from diloco.report.live import LiveView, Show, WaitsView, open_view
from diloco.report.sinks import Events, Sink
from diloco.run.amending import amend_on_resuming, wait_for_more
from diloco.run.attach import Attachment, anybody_has_the_run
from diloco.run.branch import branch_if_needed
from diloco.run.folder import (
    IDENTITY_KEY,
    OUTER,
    OWNER_KEY,
    has_begun,
    has_log,
    has_state,
    open_folder,
    refuse_other_protocols,
    refuse_taken,
    remove_if_refused,
)
from diloco.run.genesis import Genesis, own_sections, read_genesis
from diloco.run.invites import TICKET, keep_ticket, open_ticket, own_ticket
from diloco.run.join import (
    Search,
    Start,
    find_start,
    known_fragments,
    known_genesis,
    leased_incarnation,
    meet,
    open_store,
    publish,
)
from diloco.run.local import Connection, LocalPeer
from diloco.run.machine import TOGETHER
from diloco.run.peer import Peer
from diloco.run.shared import refuse_unshared
from diloco.run.signals import LEFT, TRAINER_STOPS, WITNESS_STOPS, Stop, exit_on_signal, stop_on_signal
from diloco.run.witness import Witness
from diloco.train.amend import in_words
from diloco.train.participant import Participant
from diloco.train.resume import find_earlier
from diloco.train.rounds import Rounds
from diloco.train.sync import samples_ahead
from diloco.train.trainer import Outcome, Trainer

GETTING_IN = "the search for the run"

Build = Callable[[Config], Participant]  # refuses what cannot work, before anything on disk is touched
Check = Callable[[Config, ProcessMesh], str]  # a warning in one line, before that; empty if all is well


def unchecked(config: Config, place: ProcessMesh) -> str:
    """Return no warning."""
    return ""


def run(
    config: Config, connection: Connection | None = None, *, resume: bool = False, fresh: bool = False,
    show: Show = "auto", check: Check = unchecked,
) -> Outcome:  # fmt: skip
    """Train in a run that was founded here, or found it first. Without a connection nobody else can join."""
    with _built_in(config.island, connection, show, check) as entrance:
        return _train(entrance, entrance.resume(config) if resume else entrance.found(config, fresh=fresh))


def attach(
    config: Config, connection: Connection, attachment: Attachment, show: Show = "auto", check: Check = unchecked
) -> Outcome:
    """Train in the run of a secret: found it, resume it or join it, whichever is right."""
    with exit_on_signal(LEFT), _built_in(config.island, connection, show, check) as entrance:
        return _train(entrance, entrance.attach(config, attachment))


def join(
    text: str, own: dict[str, Any], connection: Connection, folder: Path, show: Show = "auto", check: Check = unchecked
) -> Outcome:
    """Take part in a run by its ticket. Configuration and state come from the other islands, or, as far as it goes,
    from this island's own disk, if it was here before."""
    with _built_in(own_island(own), connection, show, check) as entrance:
        return _train(entrance, entrance.join(Ticket.parse(text, 0.0), own, folder))


def witness(text: str, own: dict[str, Any], connection: Connection, folder: Path, show: Show = "auto") -> Outcome:
    """Store and vote in a run by its ticket, without training anything."""
    with ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        place = ProcessMesh(0, 1, torch.device("cpu"), None)
        build = partial(Trainer, place=place, events=events)
        entrance = RunEntry(place, events, stack, connection, build, show=show)
        part, stop = entrance.witness(Ticket.parse(text, 0.0), own, folder), entrance.stop
        return part.run(lambda: stop.asked, lambda: stop.pausing)


@contextmanager
def _built_in(island: IslandConfig, connection: Connection | None, show: Show, check: Check) -> Iterator["RunEntry"]:
    with open_mesh(island) as place, ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        slowness = 1.0 if connection is None else connection.slowness
        build = partial(Trainer, place=place, events=events, slowness=slowness)
        yield RunEntry(place, events, stack, connection, build, show=show, check=check)


def _given(peer: Peer | None) -> Peer:
    assert peer is not None
    return peer


def _train(entrance: "RunEntry", part: Participant) -> Outcome:
    assert isinstance(part, Trainer)
    stop = entrance.stop
    return part.run(lambda: stop.asked, lambda: stop.pausing)


@dataclass
class RunEntry:
    """Bring an island into a run. What it opens is closed with the stack, the last first; only the leader process of an
    island has a peer."""

    place: ProcessMesh
    events: Events
    stack: ExitStack
    connection: Connection | None
    build: Build
    view: bool = True  # of the terminal, and signals: a program of its own has its own
    show: Show = "auto"
    check: Check = unchecked
    stop: Stop = field(default_factory=Stop)
    search: Search = field(default_factory=Search)  # for members, by one that joins
    ticket: Ticket | None = None

    def __post_init__(self) -> None:
        self._console = LastingConsole(file=sys.stdout, highlight=False, emoji=False)
        drawn = self.view and self.show == "auto" and self._console.is_terminal
        quiet = self.show == "quiet" or not self.place.leader
        self._announcer = Announcer(self._console if drawn else None, quiet=quiet)
        self._warning = ""

    def _built(self, config: Config) -> Participant:
        """Build the participant, after a warning of the check of any of the island's processes."""
        self._warning = next(filter(None, self.place.gather(self.check(config, self.place))), "")
        if self._warning and self.place.leader and TOGETHER not in os.environ:
            self._announcer.say(self._warning)
            self._warning = ""
        return self.build(config)

    def _says(self, what: str, *, local: bool = False) -> AbstractContextManager[None]:
        """Have the person told what is done inside; one who has a program of their own only hears of waits."""
        return nullcontext() if local and not self.view else self._announcer.during(what, local=local)

    @property
    def _search(self) -> Search:
        """Return how to look for members, with what is said meanwhile; an attached island says it by itself."""
        report = self._announcer.searching if self.search.report is Search.report else self.search.report
        return replace(self.search, report=report, download=self._announcer.downloading)

    @property
    def closed(self) -> bool:
        """Tell whether nobody else can join, for want of a connection."""
        return self.connection is None

    def found(self, config: Config, *, fresh: bool) -> Participant:
        """Start a new run, with this island as its first. Others join with the ticket that lies in its folder."""
        folder, config = Path(config.dir), config.of_island()
        return self._found(config, lambda: self._founding_peer(folder, config.run), resume=False, fresh=fresh)

    def _found(
        self, config: Config, open_peer: Callable[[], LocalPeer], note: Callable[[], None] = lambda: None, **how: bool
    ) -> Participant:
        folder = Path(config.dir)
        with self._says("opening the model and the data", local=True):
            part = self._built(config)
        self._open_folder(config, **how)
        vectors = part.initial_vectors()
        peer, start = None, None
        if self.place.leader:
            with self._says("opening the run's directory", local=True):
                peer = open_peer()
            owner = Identity.load(folder / OWNER_KEY)
            genesis = Genesis.of(config, part.layout, part.samples, peer.id, part.frozen).signed(owner)
            store, state = open_store(peer, genesis, config, self.events), genesis.state()
            store.begin(genesis.digest, state.head.digest, state.head.round, known=False)
            note()
            start = Start(genesis, Origin(state, vectors), store, returns=False)
            if self.ticket is not None:
                self.events.emit(TicketReady(file=str(folder / TICKET)))
        return self._take_part(part, peer, start)

    def resume(self, config: Config) -> Participant:
        """Continue a run that was founded here, from this island's disk and from whichever others are present."""
        folder, config = Path(config.dir), config.of_island()
        open_peer = partial(self._founding_peer, folder, folder.name)
        refuse_unshared(folder, self.place)
        refuse_other_protocols(folder)
        if self.closed and not has_log(folder) and not saves(folder):
            raise SaveError(f"{folder} holds no save to resume from: start without --resume")
        if (has_log(folder) or not self.closed) and not (folder / OWNER_KEY).exists():
            raise SaveError(
                f"{folder} holds no run that was founded there: start without --resume, or, if this island joined one, "
                f"diloco join TICKET --dir {folder}"
            )
        if not self.closed:
            if not self.place.share(has_begun(folder)):  # the leader's answer: it changes the folder as it goes on
                return self.found(config, fresh=False)
            return self._enter(folder, own_sections(config), self._built, open_peer, founded_with=config)
        part = self._built(config)
        self._open_folder(config, resume=True, prepare=lambda: branch_if_needed(folder, part))
        return self._enter(folder, own_sections(config), lambda _: part, open_peer)

    def attach(self, config: Config, attachment: Attachment) -> Participant:
        """Enter the run of a secret: found it, resume it or join it, whichever is right."""
        folder, peer, founds = Path(config.dir), None, False
        self.place.leader_first(lambda: attachment.prepare(folder))
        if self.place.leader:
            peer = self._attached_peer(folder, attachment)
            known = read_genesis(folder / OUTER, peer.run_id) is not None
            founds = not known and attachment.founds and not anybody_has_the_run(peer)
            if not known and not founds:
                attachment.expect_others(folder)
            if not founds:
                attachment.note_founded()
        config, self.search = attachment.config(config.of_island()), attachment.search()
        if self.place.share(founds):
            return self._found(config, lambda: _given(peer), attachment.note_founded, resume=True)
        founded_with = config if attachment.secret.owner is not None else None
        return self._enter(folder, own_sections(config), self._built, lambda: _given(peer), founded_with=founded_with)

    def join(self, ticket: Ticket, own: dict[str, Any], folder: Path) -> Participant:
        """Enter the run that a ticket names, with this island's own settings; its files lie in `folder`."""
        checkpoint = {**own.get("checkpoint", {}), "dir": str(folder)}
        return self._enter(
            folder, {**own, "checkpoint": checkpoint}, self._built, partial(self._joining_peer, folder, ticket)
        )

    def witness(self, ticket: Ticket, own: dict[str, Any], folder: Path) -> Witness:
        """Enter the run that a ticket names as a witness: neither model nor data are opened, only the outer state."""
        with self._says("looking for members of the run"):
            peer = self._joining_peer(folder, ticket, as_witness=True)
            genesis = known_genesis(folder, peer, self._search)
        config = genesis.configure({**own, "checkpoint": {**own.get("checkpoint", {}), "dir": str(folder)}})
        self._open_folder(config, resume=True)
        publish(peer)
        part = Witness(config, self.place, self.events, known_fragments(folder, peer, genesis), peer.name_of)
        with self._says("fetching the run's state"):
            start = find_start(peer, genesis, part, search=self._search)
        self.stack.enter_context(stop_on_signal(self.stop, WITNESS_STOPS))
        warm_up(config.sync.codec)
        part.driver = meet(self.stack, peer, start, part)
        wait_for_more(part.driver, config, self.events, lambda: self.stop.asked)
        self.stop.on_pause = part.driver.pause
        return part

    def _enter(
        self, folder: Path, own: dict[str, Any], build: Build, open_peer: Callable[[], LocalPeer],
        founded_with: Config | None = None,
    ) -> Participant:  # fmt: skip
        peer, genesis, start = None, None, None
        if self.place.leader:
            with self.place.activity.during(GETTING_IN, waits=True), self._says("looking for members of the run"):
                peer = open_peer()
                genesis = known_genesis(folder, peer, self._search)
            if founded_with is not None:
                signed = amend_on_resuming(folder, genesis, newest_end(folder / OUTER), founded_with)
                if signed is not None:
                    self.events.emit(Note(text=f"the owner's change {signed.number}: {in_words(signed)}"))
        genesis = self.place.share(genesis)
        config = genesis.configure(own)
        with self._says("opening the model and the data", local=True):
            part = build(config)
        genesis.check(part.layout, part.samples, part.frozen)
        if not self.closed:
            self._open_folder(config, resume=True)
        # its founder was killed before it had saved anything: the run begins again, on all processes of the island
        again = self.place.share(peer is not None and genesis.founder == peer.id and not has_state(folder))
        vectors = part.initial_vectors() if again else None
        if peer is not None:
            with self.place.activity.during(GETTING_IN, waits=True), self._says("fetching the run's state"):
                publish(peer)
                start = find_start(peer, genesis, part, vectors, self._search)
        return self._take_part(part, peer, start)

    def _open_folder(self, config: Config, **how: Any) -> None:
        self.place.leader_first(lambda: open_folder(config, self.events, view=self._open_view(config), **how))
        refuse_unshared(Path(config.dir), self.place)
        if self.place.leader and self._warning:
            self.events.emit(Note(text=self._warning))  # what shows all islands shows it
        if self.place.leader and (ended := os.environ.get(ENDED)):
            self.events.emit(Note(text=f"restarted: {ended}"))

    def _open_view(self, config: Config) -> Sink | None:
        if not self.view:
            return WaitsView()
        view = open_view(Path(config.dir), self.show, console=self._console, notice=lambda: self.stop.said)
        if isinstance(view, LiveView):
            self.stop.shown = lambda: view.drawn
        return view

    def _attached_peer(self, folder: Path, attachment: Attachment) -> Peer:
        """Open the peer of an island with a secret. It is fine if nobody answers yet."""
        assert self.connection is not None
        if attachment.secret.owner is not None:
            return self._open_founding_peer(folder, self.connection, attachment.places)
        self.ticket = attachment.secret.ticket.at(attachment.places)
        everywhere = replace(self.ticket, addresses=attachment.places)  # more than fit into a ticket
        peer = self._open_peer(folder, everywhere, self.connection, lonely=True)
        keep_ticket(folder, self.ticket)
        return peer

    def _founding_peer(self, folder: Path, name: str) -> LocalPeer:
        """Open the first peer of a run, with a ticket that lets others in; without a connection nobody gets in."""
        if self.connection is None:
            run_id = run_id_of(Identity.load(folder / OWNER_KEY).public_key)
            return self.stack.enter_context(closing(LocalPeer(folder, run_id, Connection(name=name))))
        return self._open_founding_peer(folder, self.connection)

    def _open_founding_peer(self, folder: Path, connection: Connection, places: tuple[str, ...] = ()) -> Peer:
        owner = Identity.load(folder / OWNER_KEY)
        own = replace(own_ticket(owner, Identity.load(folder / IDENTITY_KEY)), addresses=places)
        peer = self._open_peer(folder, own, connection, lonely=True)
        self.ticket = open_ticket(folder, owner, peer.addresses)
        keep_ticket(folder, self.ticket)
        return peer

    def _joining_peer(self, folder: Path, ticket: Ticket, *, as_witness: bool = False) -> Peer:
        assert self.connection is not None
        returns = read_genesis(folder / OUTER, ticket.run_id) is not None
        self.ticket = ticket
        if not returns:
            ticket.refuse_newcomer(as_witness=as_witness)
        if not (folder / IDENTITY_KEY).exists():  # else the folder is an earlier life's, or another process has it
            self.stack.push(remove_if_refused(folder))
        peer = self._open_peer(folder, ticket, self.connection, lonely=returns)
        keep_ticket(folder, ticket)
        return peer

    def _open_peer(self, folder: Path, ticket: Ticket, connection: Connection, *, lonely: bool) -> Peer:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            refuse_taken(folder)  # or the directory would speak of its identity
        except OSError as error:
            raise SaveError(
                f"{folder} cannot be made: {error}; name another one with --dir or checkpoint.dir"
            ) from None
        return self.stack.enter_context(closing(Peer(folder, ticket, connection, lonely=lonely)))

    def _take_part(self, part: Participant, peer: LocalPeer | None, start: Start | None) -> Participant:
        config, rounds, earlier, incarnation = part.config, None, None, None
        if self.view:
            words = TRAINER_STOPS if self.place.leader else ""
            self.stack.enter_context(stop_on_signal(self.stop, words, always_pause=self.closed))
        if peer is not None and start is not None:
            with self._says("compiling the codec", local=True):
                warm_up(config.sync.codec)
            if start.returns:
                parent = start.genesis.parent
                chain = parent.chain if parent is not None else ""
                earlier = find_earlier(Path(config.dir), start.origin.state.head, start.store.entries(), chain)
            if earlier is not None:
                moved = earlier.moved is not None
                incarnation = leased_incarnation(peer.id, start.genesis.state()) if moved else earlier.incarnation
            with self.place.activity.during(GETTING_IN, waits=True), self._says("meeting the other islands"):
                driver = meet(self.stack, peer, start, part, incarnation)
                more = not self.closed and wait_for_more(driver, config, self.events, lambda: self.stop.asked)
            rounds = Rounds(driver, config, peer.name_of)
            if more and part.samples is not None:  # it had come to look, and asked for none
                rounds.session.request_samples(samples_ahead(config, config.island.batch))
            self.stop.on_pause = rounds.driver.pause
        part.join(rounds, self.place.share(earlier))
        return part
