"""What an island knows while it takes part in rounds, and how it sends. Shared by the parts of a `Node`."""

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
    """Hold one term of this coordinator. `begin` is the attempt under way; without one, it collects."""

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
        """Return the ballot of the present attempt in this term."""
        return Ballot(self.number, self.coordinator, self.attempt)

    def promised(self) -> dict[str, msg.Promise]:
        """Return the promises received, by peer, without those peers that have another head."""
        return {peer: answer for peer, answer in self.answers.items() if answer is not None}

    def highest_held(self) -> tuple[str, msg.Held] | None:
        """Return who holds the result of the highest ballot, and that result; None if nobody holds one.

        Attempts of this term do not count: only its coordinator could have committed them.
        """
        held = [(peer, answer.held) for peer, answer in self.promised().items() if answer.held is not None]
        held = [(peer, one) for peer, one in held if one.ballot[:2] != self.ballot[:2]]
        return max(held, key=lambda pair: (pair[1].ballot, pair[0])) if held else None

    def offers(self, fragment: int) -> dict[str, Offer]:
        """Return the offers for one fragment, by the peer that is ready with it."""
        return {
            peer: offer for peer, ready in self.ready.items() for offer in ready.offers if offer.fragment == fragment
        }


@dataclass
class CurrentAttempt:
    """Hold the attempt that this island takes part in, and the answer it has given."""

    begin: msg.Begin
    sender: str
    reducing: bool = False
    done: msg.Done | None = None  # once its result is held
    failed: msg.Failed | None = None  # once it has come to nothing here

    def adopts(self, record: Record) -> bool:
        """Return whether this attempt adopts exactly this record, rather than reducing anew."""
        adopted = self.begin.adopted
        return bool(adopted) and Record(self.begin.proposal, adopted).digest == record.digest


@dataclass
class ProtocolState:
    """Hold what an island knows while it takes part in rounds, and the effects that wait to be carried out."""

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
        """Return the fragment of the next round with contributions; fragments take turns."""
        return self.state.updates % self.options.fragments

    def same_key(self, key: Key) -> bool:
        """Return whether a message's key is that of the round which follows this island's head."""
        return key == self.state.key if self.rules.key_names_the_parent else key.round == self.state.key.round

    def heartbeat(self) -> msg.Heartbeat:
        """Return this island's present head, promise and state digest, to be sent as a sign of life."""
        return msg.Heartbeat(self.state.head, self.promise, self.term is not None, self.incarnation, self.state_digest)

    def promise_for(self, term: int) -> msg.Promise:
        """Return the promise for a term, with the result held and the owner's next change of settings."""
        amendment = self.amendments.get(len(self.state.amendments) + 1)
        return msg.Promise(self.state.key, term, self.incarnation, self.want, self.held, amendment)

    def send(self, peer: str, message: msg.Message) -> None:
        """Queue a message to a peer, or to this island itself. One that is leaving sends nothing to others."""
        if peer == self.me:
            self.to_self.append(message)
        elif not self.leaving:
            self.effects.append(msg.Send(peer, message))

    def send_all(self, message: msg.Message) -> None:
        """Queue a message to every known peer, alive or not."""
        for peer in self.peers.views:
            self.send(peer, message)

    def note(self, kind: str, peer: str, text: str) -> None:
        """Queue a note to people about what happened to a peer."""
        self.effects.append(msg.Note(kind, peer, text))

    def ban(self, peer: str, reason: str, now: float, for_s: float | None = None) -> None:
        """Exclude a peer for `for_s` seconds, 20 times `silence_s` if not given, and report why."""
        if peer != self.me:
            self.peers.view(peer, now).banned_until = now + (BAN * self.options.silence_s if for_s is None else for_s)
            self.note("excluded", peer, reason)

    def remember(self) -> None:
        """Queue the promise, the held result and the highest term to be stored on disk."""
        self.effects.append(msg.Remember(msg.Memory(self.state.key, self.promise, self.held, self.highest_term)))

    def holds(self, digest: str) -> bool:
        """Return whether the result held here is that of the record with this digest."""
        return self.held is not None and self.held.record.digest == digest

    def hold(self, ballot: Ballot, record: Record) -> None:
        """Store a result under a ballot, durably, so that whoever collects next hears of it."""
        self.held = msg.Held(ballot, record)
        self.remember()

    def catch_up(self, peer: str, head: Head) -> None:
        """Ask the driver to fetch the state at a head from a peer, and note that this is under way."""
        self.catching_up = peer
        self.effects.append(msg.CatchUp(peer, head))

    def drop_term(self, now: float) -> None:
        """Stop leading for a while: others have promised more than this coordinator asked for.

        The pause doubles with every term dropped since the last commit, up to 16 times the shortest.
        """
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
        """Leave the attempt that this island takes part in, and cancel its all-reduce if one is running."""
        if self.current is not None and self.current.reducing:
            self.effects.append(msg.Cancel(self.current.begin.ballot))
        self.current = None
