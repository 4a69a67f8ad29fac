"""What an island knows while it takes part in rounds, and how it speaks. Nothing here decides anything."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.leading import Decide, Term
from diloco.elastic.protocol.messages import (
    Begin,
    Cancel,
    Effect,
    Failed,
    Heartbeat,
    Memory,
    Message,
    Note,
    Promise,
    Remember,
    Send,
)
from diloco.elastic.protocol.peers import Peers
from diloco.elastic.protocol.record import NO_BALLOT, Ballot, Key, Offer, Record
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.elastic.protocol.state import RunState

LONGEST_BACKOFF = 16  # times the shortest


def as_founded(options: "Options", state: RunState) -> "Options":
    return options


def follow_all(state: RunState, amendment: Amendment) -> str:
    return ""


@dataclass(frozen=True)
class Options:
    decide: Decide
    silence_s: float = 5.0
    straggler: float = 1.5
    min_islands: int = 1
    partition: str = "merge"
    fragments: int = 1
    want: int = 0  # samples to hold
    flat_up_to: int = 64  # so many islands all tell each other that they live; of more, only the first of the roster do
    steps: int | None = None  # where the run's clock ends
    amended: Callable[["Options", RunState], "Options"] = as_founded  # as the state's amendments want them
    objection: Callable[[RunState, Amendment], str] = follow_all  # why this island could not follow it; "": it can

    @property
    def heartbeat_s(self) -> float:
        return self.silence_s / 5

    @property
    def resend_s(self) -> float:
        return self.silence_s / 4

    @property
    def answer_s(self) -> float:
        """Who gives signs of life but no answer for so long does not take part."""
        return 2 * self.silence_s

    @property
    def settle_s(self) -> float:
        """After a failed attempt: until those who died have been missed."""
        return self.silence_s / 20

    @property
    def ban_s(self) -> float:
        return 20 * self.silence_s


class Apart(NamedTuple):
    """How long two islands that could not reach each other are not put into one ballot."""

    until: int  # round
    rounds: int


@dataclass
class Following:
    """The attempt that this island takes part in."""

    begin: Begin
    sender: str
    reducing: bool
    record: Record | None = None  # once it is held
    failed: Failed | None = None  # once it has come to nothing here


class Seat:
    def __init__(
        self,
        me: str,
        state: RunState,
        options: Options,
        *,
        now: float,
        incarnation: int = 0,
        memory: Memory | None = None,
        rules: Rules = ALL,
        peers: Peers | None = None,
    ) -> None:
        self.me, self.state, self.rules = me, state, rules
        self.options = options.amended(options, state) if state.amendments else options
        self.incarnation = incarnation
        self.want = options.want
        self.bytes_per_s = 0
        self.state_digest = ""
        self.peers = peers or Peers(options.silence_s)
        remembered = memory if memory is not None and memory.key == state.key else None
        self.promise = remembered.promise if remembered else NO_BALLOT
        self.held = remembered.held if remembered else None
        self.term: Term | None = None
        self.following: Following | None = None
        self.pending: dict[int, Offer] = {}  # by fragment: to be contained
        self.frozen: dict[int, Offer] = {}  # what was said to be ready for this key stays
        self.amendments = {a.number: a for a in state.amendments}  # the owner's: another branch may lack them
        self._objections: set[tuple[str, int, str]] = set()  # islands, in this life of theirs, to amendments
        self.leaving = self.doubtful = False
        self._loud = True  # it tells everybody that it lives
        self._highest_term = memory.term if memory else 0
        self._catching_up: str | None = None
        self._apart: dict[frozenset[str], Apart] = {}
        self.peers.know(set(state.roster) - {me}, now)  # until they are silent for too long, they count as alive
        self._commit_at = [now] * options.fragments  # of each fragment's last update
        self._awake_at = self._heartbeat_at = self._lead_at = now
        self._drops = 0
        self._out: list[Effect] = []
        self._to_self: list[Message] = []

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.state.head, self.promise, self.term is not None, self.incarnation, self.state_digest)

    def own_promise(self, term: int) -> Promise:
        amendment = self.amendments.get(len(self.state.amendments) + 1)
        return Promise(self.state.key, term, self.incarnation, self.want, self.held, amendment)

    def alive(self, now: float) -> set[str]:
        return self.peers.alive(now, self.state.roster)

    def is_alive(self, peer: str, now: float) -> bool:
        return self.peers.is_alive(peer, now, self.state.roster)

    def coordinator(self, now: float) -> str:
        """First of the roster that is not suspected; where none is left, the lowest of all."""
        for peer in self.state.roster:
            if self._could_lead(peer, now):
                return peer
        orphaned = self.options.partition == "merge" and self.rules.anybody_may_lead
        others = (self.me, *self.peers.views) if orphaned else ()
        return min((peer for peer in others if self._could_lead(peer, now)), default="")

    def _could_lead(self, peer: str, now: float) -> bool:
        """One that has not come to our head for a while cannot lead what follows it."""
        if peer == self.me:
            return not self.leaving
        if not self.is_alive(peer, now):
            return False
        since = self.peers.views[peer].behind_since
        return since is None or now - since <= 2 * self.options.heartbeat_s

    @property
    def due(self) -> int:
        """The fragment of the next round."""
        return self.state.updates % self.options.fragments

    def _own_ballot(self, term: Term) -> Ballot:
        return Ballot(term.number, self.me, term.attempt)

    def _drop_term(self, now: float) -> None:
        """Others have promised more than this coordinator asked for."""
        if not self.rules.yield_to_higher_promises:
            return
        if not self.rules.new_term_after_sleep and self.term is not None and self.term.begin is not None:
            self._highest_term += 1
            self.term.number, self.term.begin = self._highest_term, None  # what others hold by now is not asked for
            return
        self.term = None
        self._drops += 1
        spread = hashlib.sha256(f"{self.me}/{self._highest_term}".encode()).digest()[0] / 256
        self._lead_at = now + self.options.heartbeat_s * (0.5 + spread) * min(2**self._drops, LONGEST_BACKOFF)

    def _stop_following(self) -> None:
        if self.following is not None and self.following.reducing:
            self._out.append(Cancel(self.following.begin.ballot))
        self.following = None

    def _same_key(self, key: Key) -> bool:
        return key == self.state.key if self.rules.key_names_the_parent else key.round == self.state.key.round

    def _ban(self, peer: str, reason: str, now: float, for_s: float | None = None) -> None:
        if peer == self.me:
            return
        self.peers.view(peer, now).banned_until = now + (self.options.ban_s if for_s is None else for_s)
        self._note("excluded", peer, reason)

    def _note(self, kind: str, peer: str, text: str) -> None:
        self._out.append(Note(kind, peer, text))

    def _remember(self) -> None:
        self._out.append(Remember(Memory(self.state.key, self.promise, self.held, self._highest_term)))

    def _say(self, peer: str, message: Message) -> None:
        if peer == self.me:
            self._to_self.append(message)
        elif not self.leaving:
            self._out.append(Send(peer, message))

    def _say_all(self, message: Message) -> None:
        for peer in self.peers.views:
            self._say(peer, message)
