"""What an island knows while it takes part in rounds, and how it speaks. Shared by the parts of a `Node`."""

import hashlib
from dataclasses import dataclass, field

from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.messages import (
    Begin,
    Cancel,
    CatchUp,
    Done,
    Effect,
    Failed,
    Heartbeat,
    Held,
    Memory,
    Message,
    Note,
    Promise,
    Remember,
    Send,
)
from diloco.elastic.protocol.options import Options
from diloco.elastic.protocol.peers import Peers
from diloco.elastic.protocol.record import NO_BALLOT, Ballot, Head, Key, Record
from diloco.elastic.protocol.rules import Rules
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.term import Term

LONGEST_BACKOFF = 16  # times the shortest


@dataclass
class CurrentAttempt:
    """The attempt that this island takes part in."""

    begin: Begin
    sender: str
    reducing: bool = False
    done: Done | None = None  # once its result is held
    failed: Failed | None = None  # once it has come to nothing here

    def adopts(self, record: Record) -> bool:
        adopted = self.begin.adopted
        return bool(adopted) and Record(self.begin.proposal, adopted).digest == record.digest


@dataclass
class ProtocolState:
    me: str
    incarnation: int
    rules: Rules
    peers: Peers
    state: RunState
    options: Options
    want: int  # samples to hold
    commit_at: list[float]  # of each fragment's last update
    lead_at: float  # no term is started before
    promise: Ballot = NO_BALLOT
    held: Held | None = None
    highest_term: int = 0  # seen so far
    term: Term | None = None  # while this island leads
    drops: int = 0  # of its terms, since the last commit
    current: CurrentAttempt | None = None
    catching_up: str | None = None  # with whom
    state_digest: str = ""  # of the vectors, where it is known
    diverged: bool = False  # they differ from the others'
    bytes_per_s: int = 0  # of its link; 0: not known
    leaving: bool = False
    amendments: dict[int, Amendment] = field(default_factory=dict)  # the owner's: another branch may lack them
    effects: list[Effect] = field(default_factory=list)
    to_self: list[Message] = field(default_factory=list)

    @property
    def due(self) -> int:
        """Return the fragment of the next round."""
        return self.state.updates % self.options.fragments

    def same_key(self, key: Key) -> bool:
        return key == self.state.key if self.rules.key_names_the_parent else key.round == self.state.key.round

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.state.head, self.promise, self.term is not None, self.incarnation, self.state_digest)

    def promise_for(self, term: int) -> Promise:
        amendment = self.amendments.get(len(self.state.amendments) + 1)
        return Promise(self.state.key, term, self.incarnation, self.want, self.held, amendment)

    def send(self, peer: str, message: Message) -> None:
        if peer == self.me:
            self.to_self.append(message)
        elif not self.leaving:
            self.effects.append(Send(peer, message))

    def send_all(self, message: Message) -> None:
        for peer in self.peers.views:
            self.send(peer, message)

    def note(self, kind: str, peer: str, text: str) -> None:
        self.effects.append(Note(kind, peer, text))

    def ban(self, peer: str, reason: str, now: float, for_s: float | None = None) -> None:
        if peer != self.me:
            self.peers.view(peer, now).banned_until = now + (self.options.ban_s if for_s is None else for_s)
            self.note("excluded", peer, reason)

    def remember(self) -> None:
        self.effects.append(Remember(Memory(self.state.key, self.promise, self.held, self.highest_term)))

    def holds(self, digest: str) -> bool:
        return self.held is not None and self.held.record.digest == digest

    def hold(self, ballot: Ballot, record: Record) -> None:
        self.held = Held(ballot, record)
        self.remember()

    def catch_up(self, peer: str, head: Head) -> None:
        self.catching_up = peer
        self.effects.append(CatchUp(peer, head))

    def drop_term(self, now: float) -> None:
        """Stop leading for a while: others have promised more than this coordinator asked for."""
        if not self.rules.yield_to_higher_promises:
            return
        if not self.rules.new_term_after_sleep and self.term is not None and self.term.begin is not None:
            self.highest_term += 1
            self.term.number, self.term.begin = self.highest_term, None  # what others hold by now is not asked for
            return
        self.term = None
        self.drops += 1
        spread = hashlib.sha256(f"{self.me}/{self.highest_term}".encode()).digest()[0] / 256
        self.lead_at = now + self.options.heartbeat_s * (0.5 + spread) * min(2**self.drops, LONGEST_BACKOFF)

    def stop_attempt(self) -> None:
        if self.current is not None and self.current.reducing:
            self.effects.append(Cancel(self.current.begin.ballot))
        self.current = None
