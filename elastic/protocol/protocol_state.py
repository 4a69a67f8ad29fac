"""What an island knows while it takes part in rounds, and how it speaks. Shared by the parts of a `Node`."""

import hashlib
from dataclasses import dataclass, field

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.options import Options
from diloco.elastic.protocol.peers import Peers
from diloco.elastic.protocol.record import NO_BALLOT, Amendment, Ballot, Head, Key, Offer, Record
from diloco.elastic.protocol.rules import Rules
from diloco.elastic.protocol.state import RunState

LONGEST_BACKOFF = 16  # times the shortest
BAN = 20  # times silence_s


@dataclass
class Term:
    """One term of this coordinator. `begin` is the attempt under way; without one, it collects."""

    number: int
    coordinator: str
    attempt: int = 0
    answers: dict[str, msg.Promise | None] = field(default_factory=dict)  # None: it has another head
    asked: dict[str, float] = field(default_factory=dict)  # alive without an answer: since when
    ready: dict[str, msg.Ready] = field(default_factory=dict)
    ready_at: dict[str, float] = field(default_factory=dict)
    adopted: Record | None = None
    fetching: tuple[str, Record] | None = None  # what is to be adopted or committed, and who has it
    fetches: int = 0
    begin: msg.Begin | None = None
    begun_at: float = 0.0
    done: dict[str, str] = field(default_factory=dict)
    failures: list[tuple[str, msg.Failed]] = field(default_factory=list)
    settle_at: float = 0.0
    resend_at: float = 0.0
    resends: int = 0

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.number, self.coordinator, self.attempt)

    def promised(self) -> dict[str, msg.Promise]:
        return {peer: answer for peer, answer in self.answers.items() if answer is not None}

    def highest_held(self) -> tuple[str, msg.Held] | None:
        """Return who holds the result of the highest ballot, and that result.

        Attempts of this term do not count: only its coordinator could have committed them.
        """
        held = [(peer, answer.held) for peer, answer in self.promised().items() if answer.held is not None]
        held = [(peer, one) for peer, one in held if one.ballot[:2] != self.ballot[:2]]
        return max(held, key=lambda pair: (pair[1].ballot, pair[0])) if held else None

    def offers(self, fragment: int) -> dict[str, Offer]:
        return {
            peer: offer for peer, ready in self.ready.items() for offer in ready.offers if offer.fragment == fragment
        }


@dataclass
class CurrentAttempt:
    """The attempt that this island takes part in."""

    begin: msg.Begin
    sender: str
    reducing: bool = False
    done: msg.Done | None = None  # once its result is held
    failed: msg.Failed | None = None  # once it has come to nothing here

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
    held: msg.Held | None = None
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
    effects: list[msg.Effect] = field(default_factory=list)
    to_self: list[msg.Message] = field(default_factory=list)

    @property
    def due(self) -> int:
        """Return the fragment of the next round."""
        return self.state.updates % self.options.fragments

    def same_key(self, key: Key) -> bool:
        return key == self.state.key if self.rules.key_names_the_parent else key.round == self.state.key.round

    def heartbeat(self) -> msg.Heartbeat:
        return msg.Heartbeat(self.state.head, self.promise, self.term is not None, self.incarnation, self.state_digest)

    def promise_for(self, term: int) -> msg.Promise:
        amendment = self.amendments.get(len(self.state.amendments) + 1)
        return msg.Promise(self.state.key, term, self.incarnation, self.want, self.held, amendment)

    def send(self, peer: str, message: msg.Message) -> None:
        if peer == self.me:
            self.to_self.append(message)
        elif not self.leaving:
            self.effects.append(msg.Send(peer, message))

    def send_all(self, message: msg.Message) -> None:
        for peer in self.peers.views:
            self.send(peer, message)

    def note(self, kind: str, peer: str, text: str) -> None:
        self.effects.append(msg.Note(kind, peer, text))

    def ban(self, peer: str, reason: str, now: float, for_s: float | None = None) -> None:
        if peer != self.me:
            self.peers.view(peer, now).banned_until = now + (BAN * self.options.silence_s if for_s is None else for_s)
            self.note("excluded", peer, reason)

    def remember(self) -> None:
        self.effects.append(msg.Remember(msg.Memory(self.state.key, self.promise, self.held, self.highest_term)))

    def holds(self, digest: str) -> bool:
        return self.held is not None and self.held.record.digest == digest

    def hold(self, ballot: Ballot, record: Record) -> None:
        self.held = msg.Held(ballot, record)
        self.remember()

    def catch_up(self, peer: str, head: Head) -> None:
        self.catching_up = peer
        self.effects.append(msg.CatchUp(peer, head))

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
            self.effects.append(msg.Cancel(self.current.begin.ballot))
        self.current = None
