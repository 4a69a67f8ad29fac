"""What an island knows while it takes part in rounds, and how it sends. Shared by the parts of a `Node`."""

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import dropwhile, islice, pairwise
from statistics import median

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.options import Options
from diloco.elastic.protocol.peers import Peers
from diloco.elastic.protocol.record import NO_BALLOT, Amendment, Ballot, Head, Key, Latch, Offer, Proposal, Record
from diloco.elastic.protocol.rules import Rules
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.writes import Writes

LONGEST_BACKOFF = 16  # times the shortest
BAN = 20  # times silence_s
LAST_NORMS = 64  # contributions
LATCH_FROM = 3  # members of a roster
KEPT_VOWS = 64  # for heads to which a latch may lead back
LONGEST_WRITE = 8  # times silence_s: whose disk takes longer is not waited for


@dataclass
class Term:
    """Hold one term of this coordinator. `begin` is the attempt under way; without one, it collects."""

    number: int
    coordinator: str
    started_at: float = 0.0
    attempt: int = 0
    answers: dict[str, msg.Promise | None] = field(default_factory=dict)  # None: it has another head
    elsewhere: dict[str, str] = field(default_factory=dict)  # who follows another coordinator, and whom
    asked: dict[str, float] = field(default_factory=dict)  # alive without an answer: since when
    ready: dict[str, msg.Ready] = field(default_factory=dict)
    ready_at: dict[str, float] = field(default_factory=dict)
    adopted: Record | None = None
    at_hand: str = ""  # the digest of a record whose result was fetched
    fetching: tuple[str, Record] | None = None  # what is to be adopted or committed, and who has it
    fetches: int = 0
    begin: msg.Begin | None = None
    begun_at: float = 0.0
    begun: set[str] = field(default_factory=set)  # who takes part
    done: dict[str, str] = field(default_factory=dict)
    enough_at: float | None = None  # when a quorum had stored the result
    store: msg.Begin | None = None  # for those who are to store it without having contributed
    asked_to_store: set[str] = field(default_factory=set)  # once each: one that could not is left out
    failures: list[tuple[str, msg.Failed]] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)  # members that will not get the result, though others may
    settle_at: float = 0.0
    halted_at: float | None = None  # when members were asked what they have received
    kept: dict[str, tuple[msg.Received, ...]] = field(default_factory=dict)  # what they have said
    prepared: msg.Begin | None = None  # the next attempt, with a lost member's contribution
    salvaged: bool = False  # that was tried: once in a term
    resend_at: float = 0.0
    resends: int = 0
    unheard: set[str] = field(default_factory=set)  # of many: left out until they answer
    called_at: float | None = None  # when the members of the next attempt were asked whether they are there

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
    since: float
    reducing: bool = False
    done: msg.Done | None = None  # once its result is held
    failed: msg.Failed | None = None  # once it has come to nothing here
    committed: tuple[str, msg.Commit, float] | None = None  # who said so and when, before its result was here

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
    stored: Head  # the last one that is durable
    start_until: float  # the first round waits for all that are to begin until then
    rejoin_until: float  # one that returns looks for its roster until then
    promise: Ballot = NO_BALLOT
    held: msg.Held | None = None
    promised_at: float = 0.0  # to another coordinator, or in another term
    vows: dict[Head, msg.Vow] = field(default_factory=dict)  # for other heads, until a durable one lies beyond
    highest_term: int = 0  # seen so far
    term: Term | None = None  # while this island leads
    drops: int = 0  # of its terms, since the last commit
    current: CurrentAttempt | None = None
    tried: msg.Begin | None = None  # the last all-reduce that was begun here: its pages are kept until the head moves
    catching_up: str | None = None  # with whom
    asked_for: Head | None = None  # the head that it had said it has
    state_digest: str = ""  # of the vectors, where it is known
    diverged: bool = False  # they differ from the others'
    bytes_per_s: int = 0  # of its link; 0: not known
    leaving: bool = False
    amendments: dict[int, Amendment] = field(default_factory=dict)  # the owner's: another branch may lack them
    sequence: int = 0  # of the last heartbeat
    follows: str = ""  # to whom alone it promises
    latch: Latch | None = None  # the owner's, as soon as it is seen
    lineage: dict[str, bool] = field(default_factory=dict)  # the last records here: whether each had a quorum
    going_back: str = ""  # to this record of its own log
    out_of_reach: str = ""  # to this one it cannot
    latchable: set[Head] = field(default_factory=set)  # heads here with vows, after which a record had no quorum
    caught_up_at: float = 0.0  # when it will have caught up, as its driver thinks
    norms: dict[int, deque[float]] = field(default_factory=dict)  # of each fragment's last contributions
    last_contributors: frozenset[str] = frozenset()  # of the last round that had any
    updated_at: deque[float] = field(default_factory=lambda: deque(maxlen=9))  # the last rounds, whoever led them
    ready_at: float | None = None  # when this island had its offers for the present round
    moved_at: float = 0.0  # when bytes of an exchange, or the head, moved last, as far as is known here
    moved: bool = False  # since the last heartbeat
    exchange_s: float = 0.0  # what one usually takes
    now: float = 0.0  # at the last input
    writes: Writes = field(default_factory=Writes)
    effects: list[msg.Effect] = field(default_factory=list)
    to_self: list[msg.Message] = field(default_factory=list)

    @property
    def due(self) -> int:
        """Return the fragment of the next round with contributions; fragments take turns."""
        return self.state.updates % self.options.fragments

    @property
    def seen_round_s(self) -> float | None:
        """Return how long rounds took lately, as this island has seen them; None if it has seen fewer than two."""
        return (
            median(later - earlier for earlier, later in pairwise(self.updated_at))
            if len(self.updated_at) > 1
            else None
        )

    def same_key(self, key: Key) -> bool:
        """Return whether a message's key is that of the round which follows this island's head."""
        return key == self.state.key

    @property
    def is_fetching(self) -> bool:
        """Return whether this island gets a result from another one, to commit or to adopt it."""
        if self.term is not None and self.term.fetching is not None:
            return True
        current = self.current
        return current is not None and bool(current.begin.adopted) and current.done is None and current.failed is None

    @property
    def needs_quorum(self) -> bool:
        """Return whether every record needs a quorum of its parent's roster."""
        return self.options.partition == "quorum" or bool(self.state.latch) or self.latch is not None

    @property
    def is_latched(self) -> bool:
        """Return whether this island's chain contains the latched record, and nothing without a quorum after it."""
        if self.state.latch or self.options.partition == "quorum" or not self.rules.latch_voids_records:
            return True
        if self.latch is None:
            return False
        return self.state.head.digest in (self.latch.head.digest, self.last_valid)

    @property
    def last_valid(self) -> str | None:
        """Return the last record in this island's log that is in a history; None if the latched one is not known here.

        That is the latched one, or the last of those after it that all had a quorum.
        """
        if self.latch is None or self.latch.head.digest not in self.lineage:
            return None
        valid = self.latch.head.digest
        after = dropwhile(lambda record: record != valid, self.lineage)
        for record in islice(after, 1, None):
            if not self.lineage[record]:
                break
            valid = record
        return valid

    def trust_in_latch(self) -> None:
        """Take a peer's word that all records from the latched one to this island's head had a quorum."""
        if self.latch is not None and not self.is_latched:
            self.lineage = {self.latch.head.digest: True, self.state.head.digest: True}

    @property
    def rank(self) -> int:
        """Return by what branches are compared before their heads: those that obey the owner come first."""
        return self.state.rank(latched=self.is_latched)

    def outranks(self, rank: int, head: Head) -> bool:
        """Return whether another island's branch is greater than this one's."""
        return (rank, head) > (self.rank, self.state.head)

    def obey(self, latch: Latch) -> None:
        """Store the owner's latch and require a quorum from now on, even if this island's branch loses by it."""
        if self.latch is None and not self.state.latch and latch.is_by(self.state.owner):
            self.latch = latch
            self.remember()

    def heartbeat(
        self, hears: tuple[int, ...] | None = None, linked: tuple[int, ...] = (), behind_s: float = 0.0
    ) -> msg.Heartbeat:
        """Return a sign of life: this island's durable head, with what it has promised and knows there.

        `hears` and `linked` are places of the roster at its head, durable or not; None: it does not say.
        """
        self.sequence += 1
        beat = msg.Heartbeat(
            self.stored, NO_BALLOT, self.incarnation, self.sequence, moving=self.moved, follows=self.follows,
            behind_s=behind_s, write_s=self.writes.slowest_s(self.now), latch=None if self.state.latch else self.latch,
            amendment=self.next_amendment,
        )  # fmt: skip
        if hears is not None:
            beat = replace(beat, roster_of=self.state.head.digest, hears=hears, linked=linked)
        if not self.is_stored and self.rules.only_durable_is_told:
            return beat
        running = self.term is not None and self.term.begin is not None
        return replace(
            beat, head=self.state.head, promise=self.promise, leading=self.term is not None, running=running,
            state_digest=self.state_digest, rank=self.rank,
        )  # fmt: skip

    @property
    def is_stored(self) -> bool:
        """Return whether this island's head is durable."""
        return self.stored == self.state.head

    def promise_for(self, term: int) -> msg.Promise:
        """Return the promise for a term, with the result held and the owner's next change of settings."""
        return msg.Promise(
            self.state.key, term, self.incarnation, self.want, self.held, self.next_amendment, self.options.witness,
            "" if self.me in self.state.invites else self.options.admission,
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """Tell whether the run's clock is at its end."""
        return self.options.steps is not None and self.state.step >= self.options.steps

    def prolongs(self, amendment: Amendment) -> bool:
        """Tell whether the run's clock would not be at its end with this change, which can be followed."""
        steps = self.options.amended(
            self.options, replace(self.state, amendments=(*self.state.amendments, amendment))
        ).steps
        return steps is None or self.state.step < steps

    @property
    def next_amendment(self) -> Amendment | None:
        """Return the owner's next change of settings, where this island has it."""
        return self.amendments.get(len(self.state.amendments) + 1)

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
        """Queue what was promised and is held, for every head that may come back, to be stored on disk."""
        vows = *self.vows.values(), msg.Vow(self.state.head, self.promise, self.held)
        self.effects.append(msg.Remember(msg.Memory(tuple(vows), self.highest_term, self.latch)))
        self.writes.ask(self.now)

    def write_s(self, peer: str) -> float:
        """Return what a write takes on the disk of a peer, as it says, or on this island's; at most so much counts."""
        if peer == self.me:
            seconds = self.writes.slowest_s(self.now)
        else:
            view = self.peers.views.get(peer)
            seconds = 0.0 if view is None or view.in_vain else view.write_s
        return min(max(0.0, seconds), LONGEST_WRITE * self.options.silence_s)

    def answer_s(self, peer: str) -> float:
        """Return for how many seconds a peer may live but not answer: question and answer are written before."""
        return self.options.answer_s + 2 * (self.write_s(self.me) + self.write_s(peer))

    @property
    def may_go_back(self) -> bool:
        """Return whether a latch may still come, or has, that makes records void which are here already."""
        settled = bool(self.state.latch) and self.is_stored
        return self.options.partition == "auto" and not settled and self.rules.void_records_are_undone

    def move_to(self, state: RunState, *, decided: bool) -> None:
        """Replace the state: the vow for its head, if there is one, holds again, and the present one is kept.

        A vow is dropped when a durable head lies beyond it: no crash brings its head back then. A latch may, unless
        the record that followed it had a quorum (`decided`).
        """
        if self.rules.promises_outlive_states and (self.promise != NO_BALLOT or self.held is not None):
            self.vows[self.state.head] = msg.Vow(self.state.head, self.promise, self.held)
            if not decided and self.may_go_back:  # whatever its roster: that of the latched record was larger
                self.latchable.add(self.state.head)
        self.state = state
        vow = self.vows.pop(state.head, msg.Vow(state.head, NO_BALLOT))
        self.promise, self.held = vow.promise, vow.held

    def note_norms(self, proposal: Proposal) -> None:
        """Keep the norms of a round's contributions in mind: an offer that is far larger is not begun with."""
        if proposal.contributions:
            norms = self.norms.setdefault(proposal.fragment, deque(maxlen=LAST_NORMS))
            norms.extend(contribution.offer.norm for contribution in proposal.contributions)

    def forget_vows(self) -> None:
        """Drop the vows for heads that a durable one lies beyond, and to which no latch can lead back."""
        kept = sorted(self.latchable & self.vows.keys()) if self.may_go_back else []
        # the owner may have signed at the first of them, when it was cut off, or at one of the last
        self.latchable = {*kept[: KEPT_VOWS // 2], *kept[-KEPT_VOWS // 2 :]}
        self.vows = {head: vow for head, vow in self.vows.items() if head >= self.stored or head in self.latchable}

    def holds(self, digest: str) -> bool:
        """Return whether the result held here is that of the record with this digest."""
        return self.held is not None and self.held.record.digest == digest

    def has_result(self, payload: str) -> bool:
        """Return whether the result held here has these bytes, whatever record it is of."""
        return self.held is not None and self.held.record.payload == payload

    def hold(self, ballot: Ballot, record: Record) -> None:
        """Store a result under a ballot, durably, so that whoever collects next hears of it."""
        self.held = msg.Held(ballot, record)
        self.remember()

    def forget_result(self) -> None:
        """Drop a result that the others say is wrong, durably: nobody shall adopt it."""
        self.held = None
        self.remember()

    def catch_up(self, peer: str, head: Head) -> None:
        """Ask the driver to fetch the state at a head from a peer, and note that this is under way."""
        self.catching_up, self.asked_for = peer, head
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
