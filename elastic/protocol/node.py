"""One island's part in the protocol (its rules: ARCHITECTURE.md). No sockets, clocks, threads or randomness inside.

Every input is a method that takes `now`, where it needs the time, and returns effects, to be carried out in order.
`ProtocolState` is what an island knows, `Liveness` whom it thinks alive, `Member` how it answers, `Coordinator` how it
leads when the others follow it. What is decided is a `Record`; what follows from records is a `RunState`.
"""

from collections.abc import Iterable, Mapping

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.coordinator import Coordinator
from diloco.elastic.protocol.leading import Leading
from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.member import Member
from diloco.elastic.protocol.options import Options
from diloco.elastic.protocol.peers import Peers
from diloco.elastic.protocol.proposer import Proposer
from diloco.elastic.protocol.protocol_state import ProtocolState
from diloco.elastic.protocol.record import NO_BALLOT, Amendment, Ballot, Head, Offer, Record
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.waiting import Waiting

MAX_TERMS_AHEAD = 1_000_000  # a term from nowhere would leave no number for the honest

__all__ = ["Node", "Options"]


class Node:
    """Run one island's part in the protocol: inputs with a time go in, effects to carry out come back."""

    def __init__(
        self, me: str, state: RunState, options: Options, *, now: float, incarnation: int = 0,
        memory: msg.Memory | None = None, lineage: dict[str, bool] | None = None, rules: Rules = ALL,
        peers: Peers | None = None,
    ) -> None:  # fmt: skip
        self.me, self.incarnation, self.peers = me, incarnation, peers or Peers(options.silence_s)
        self.peers.know(set(state.roster) - {me}, now)  # until they are silent for too long, they count as alive
        memory = memory or msg.Memory()
        vows = {vow.head: vow for vow in memory.vows if vow.head == state.head or rules.promises_outlive_states}
        vow = vows.pop(state.head, msg.Vow(state.head, NO_BALLOT))
        returns = rules.who_returns_waits and state.head.round > 0
        self.own = own = ProtocolState(
            me, incarnation, rules, self.peers, state, options.amended(options, state) if state.amendments else options,
            options.want, commit_at=[now] * options.fragments,
            lead_at=now + options.silence_s * returns, rejoin_until=now + options.rejoin_s * returns,
            start_until=now + options.start_s * (not state.updates), latch=memory.latch, lineage=dict(lineage or {}),
            stored=state.head, promise=vow.promise, held=vow.held,
            vows=vows, latchable=set(vows), moved_at=now,
            highest_term=memory.term, amendments={amendment.number: amendment for amendment in state.amendments},
        )  # fmt: skip
        self.liveness = Liveness(own, now)
        self.leading = Leading(own, self.liveness)
        self.member = Member(own, self.liveness, self.leading)
        proposer = Proposer(own, self.liveness)
        self._coordinator = Coordinator(own, self.liveness, self.leading, self.member, proposer)
        self._waiting = Waiting(own, self.liveness)
        self._awake_at = now

    # inputs

    def tick(self, now: float) -> list[msg.Effect]:
        """Let time pass: send a heartbeat if one is due, notice a sleep, and take the next step as coordinator."""
        if self.own.leaving:
            return []
        self.own.now = now
        if self.own.is_fetching:  # until its driver gives up, when no byte comes
            self.moved(now)
        self.member.undoing.start_if_void()
        self.liveness.tick(now)
        self._waiting.tick(now)
        effects = self._finish(now)
        self._awake_at = now
        return effects

    def receive(self, sender: str, message: msg.Message, now: float) -> list[msg.Effect]:
        """Handle a message from a peer, unless that peer is banned or this island is leaving."""
        self.own.now = now
        out = sender in self.state.evicted
        if not out and not self.peers.banned(sender, now) and not self.own.leaving:
            if sender != self.me:  # whose *done* comes back from its disk
                self.peers.hear(sender, now)
            self._handle(sender, message, now)
        # a tick will do for heartbeats and, among many, for answers: each time, a coordinator looks at all of them
        answer = isinstance(message, msg.Answer)
        can_wait = isinstance(message, msg.Heartbeat) or (answer and not self.liveness.are_few())
        return self._take_effects() if can_wait else self._finish(now)

    def number_beats_after(self, sequence: int, now: float) -> list[msg.Effect]:
        """Number heartbeats above those that this incarnation sent before a pause: the others ignore lower ones."""
        self.own.sequence = max(self.own.sequence, sequence)
        return self._finish(now)

    def know(self, peers: Iterable[str], now: float) -> list[msg.Effect]:
        """Add peers to speak to. A new one counts as alive until it has been silent for too long."""
        self.peers.know(set(peers) - {self.me}, now)
        return self._finish(now)

    def closed(self, peer: str, now: float) -> list[msg.Effect]:
        """Take in that a peer's connection broke and that it cannot be reached again."""
        view = self.peers.views.get(peer)
        if view is not None and (view.heard or not self.own.rules.who_returns_waits):
            view.closed = True  # an address of long ago tells nothing
        return self._finish(now)

    def stored(self, head: Head, now: float) -> list[msg.Effect]:
        """Take in that the log, or a snapshot, is durable up to this head."""
        self.member.on_stored(head, now)
        return self._finish(now)

    def remembered(self, now: float) -> list[msg.Effect]:
        """Take in that the oldest memory that was to be stored is durable."""
        self.own.writes.end(now)
        return []

    def expect_to_catch_up(self, seconds: float, now: float) -> list[msg.Effect]:
        """Take in the driver's estimate of how long catching up will take."""
        self.own.caught_up_at = now + seconds
        return []

    def moved(self, now: float) -> list[msg.Effect]:
        """Take in that bytes of an exchange have moved."""
        self.own.moved_at, self.own.moved = now, True
        return []

    def offer(self, offer: Offer, now: float) -> list[msg.Effect]:
        """Offer progress to be contained in a round. It stays on offer until it is, or is withdrawn."""
        self.pending[offer.fragment] = offer
        self.member.say_ready(now)
        return self._finish(now)

    def withdraw(self, fragment: int) -> list[msg.Effect]:
        """Take an offer back, because more progress will be offered instead.

        What was said for the present round stands.
        """
        self.pending.pop(fragment, None)
        return []

    def request_samples(self, want: int, now: float) -> list[msg.Effect]:
        """Ask for a lease of `want` samples in all, in a promise that is sent again."""
        self.own.want = want
        self.member.promise_again()
        return self._finish(now)

    def amend(self, amendment: Amendment, now: float) -> list[msg.Effect]:
        """Bring a change of settings that the run's owner has made to rounds, until one contains it."""
        self.bring(amendment)
        self.member.promise_again()
        return self._finish(now)

    def bring(self, amendment: Amendment) -> None:
        """Carry a change of settings along with the next promise.

        It is refused, with a note, if it is not the owner's or cannot be followed here.
        """
        if not amendment.is_by(self.state.owner):
            self.own.note("refused", self.me, f"change {amendment.number} of settings: not signed by the run's owner")
        elif self.state.accepts(amendment) and (reason := self.own.options.objection(self.state, amendment)):
            self.own.note("refused", self.me, reason)
        else:
            self.own.amendments[amendment.number] = amendment

    def reduced(self, ballot: Ballot, payload: str, now: float) -> list[msg.Effect]:
        """Hold the result of an all-reduce and answer *done*, unless a higher ballot was promised meanwhile."""
        current = self.own.current
        if current is not None and current.begin.ballot == ballot and ballot >= self.own.promise:
            current.reducing = False
            self.own.exchange_s = max(now - current.since, self.own.exchange_s / 2)
            record = Record(current.begin.proposal, payload)
            if not self.member.end_of_committed(current, record, now):
                self.member.hold(current, record)
        return self._finish(now)

    def reduce_failed(
        self, ballot: Ballot, blamed: str, reason: str, now: float, *, refused: bool = False, local: bool = False,
        kept: tuple[msg.Received, ...] = (),
    ) -> list[msg.Effect]:  # fmt: skip
        """Answer *failed* for an all-reduce.

        `refused`: what the blamed peer contributed is bad. `local`: others may well have the result. `kept` is what
        has come of each member.
        """
        current = self.own.current
        if current is not None and current.begin.ballot == ballot:
            self.member.give_up(current, blamed, reason, refused=refused, local=local, kept=kept)
            self.member.end_of_committed(current, None, now)
        return self._finish(now)

    def fetched(self, record: Record, now: float) -> list[msg.Effect]:
        """Take in that a result's bytes have arrived, as a member that adopts it or as coordinator."""
        current = self.own.current
        if current is not None and current.adopts(record):
            self.member.hold(current, record)
        else:
            self._coordinator.fetched(record, now)
        return self._finish(now)

    def fetch_failed(self, holder: str, record: Record, reason: str, now: float) -> list[msg.Effect]:
        """Take in that a result's bytes could not be fetched: a member answers *failed*, a coordinator retries."""
        current = self.own.current
        if current is not None and current.adopts(record):
            self.member.give_up(current, holder, reason)
        else:
            self._coordinator.fetch_failed(holder, record, now)
        return self._finish(now)

    def would_move_to(self, state: RunState) -> bool:
        """Return whether a state that was fetched is of a greater branch than this island's."""
        return self.member.is_better(state, self.own.catching_up)

    def caught_up(
        self, state: RunState, now: float, *, whole: bool = True, followed_by: Mapping[str, bool] | None = None
    ) -> list[msg.Effect]:
        """Move to a state that was fetched completely, if its head is strictly greater.

        `whole`: with all vectors, rather than by the records that were missing. Only that mends damaged vectors, and
        for these the same head will do. `followed_by` are those records: whether each had a quorum.
        """
        self.member.caught_up(state, now, whole=whole, followed_by=followed_by)
        return self._finish(now)

    def catch_up_failed(self, peer: str, now: float) -> list[msg.Effect]:
        """Take in that nothing could be fetched from a peer: it is asked again after a pause."""
        self.member.catch_up_failed(peer, now)
        return self._finish(now)

    def went_back(self, state: RunState, now: float) -> list[msg.Effect]:
        """Move to an earlier state of this island's own log: what came after it is in no history."""
        self.member.undoing.went_back(state, now)
        return self._finish(now)

    def cannot_go_back(self, digest: str, now: float) -> list[msg.Effect]:
        """Take in that this island's disk does not reach back to this record."""
        self.member.undoing.cannot_go_back(digest)
        return self._finish(now)

    def ban(self, peer: str, reason: str, now: float) -> list[msg.Effect]:
        """Exclude a peer for 20 times `silence_s`, because it sent garbage or was not admitted."""
        self.own.ban(peer, reason, now)
        return self._finish(now)

    def report_digest(self, digest: str, now: float) -> list[msg.Effect]:
        """Take in the digest of this island's vectors at its head, to be compared with the others'."""
        self.own.state_digest = digest
        return self._finish(now)

    def leave(self, now: float) -> list[msg.Effect]:
        """Send goodbye to all peers. After that, this island sends and answers nothing."""
        self.own.send_all(msg.Goodbye("leaves"))
        self.own.leaving = True  # and nothing more is said
        return self._finish(now)

    def pause(self, now: float) -> list[msg.Effect]:
        """Stop without a message, to return as the same incarnation: nothing more is led, answered or finished."""
        self.own.leaving, self.own.term = True, None
        self.own.stop_attempt()
        return self._finish(now)

    def _handle(self, sender: str, message: msg.Message, now: float) -> None:
        term, number = _term_of(message)
        if term > self.own.highest_term + number + MAX_TERMS_AHEAD:
            self.own.ban(sender, f"names term {term}", now)
            return
        match message:
            case msg.Heartbeat():
                if self.member.on_heartbeat(sender, message, now):
                    self._coordinator.on_heartbeat(sender, message, now)
            case msg.Collect():
                self.member.on_collect(sender, message, now)
            case msg.Promise() | msg.Follows() | msg.Ready() | msg.Begun() | msg.Done() | msg.Failed():
                self._coordinator.on_answer(sender, message, now)
            case msg.Nack():
                self._coordinator.on_nack(message, now)
            case msg.Begin():
                self.member.on_begin(sender, message, now)
            case msg.Halt():
                self.member.on_halt(sender, message)
            case msg.Commit():
                self.member.on_commit(sender, message, now)
            case msg.Goodbye():
                view = self.peers.view(sender, now)
                view.closed = view.left = view.said_goodbye = True
                self.own.note("left", sender, message.reason[:200])

    def _finish(self, now: float) -> list[msg.Effect]:
        self._notice_sleep(now)
        self._coordinator.lead(now)
        while self.own.to_self:
            self._handle(self.me, self.own.to_self.pop(0), now)
            self._coordinator.lead(now)
        if self.me in self.state.evicted and not self.own.leaving:
            self.own.note("evicted", self.me, "the run's owner has taken this island out: it stops")
            self.own.leaving, self.own.term = True, None
            self.own.stop_attempt()
        return self._take_effects()

    def _notice_sleep(self, now: float) -> None:
        """Begin anew if this island was stopped or swapped out: it could not hear what it has not heard.

        Everybody's silence is forgotten, and a term under way is dropped.
        """
        if now - self._awake_at <= self.own.options.silence_s / 2:
            return
        self._awake_at = now
        self.peers.reset(now)
        if self.own.term is not None and self.own.rules.new_term_after_sleep:
            self.own.term = None
            self.own.lead_at = now + self.own.options.heartbeat_s

    def _take_effects(self) -> list[msg.Effect]:
        effects, self.own.effects = self.own.effects, []
        return effects

    # what others ask for most

    @property
    def state(self) -> RunState:
        """Return what all islands agree on at this island's head."""
        return self.own.state

    @property
    def pending(self) -> dict[int, Offer]:
        """Return this island's offers that are to be contained in a round, by fragment."""
        return self.member.pending

    @property
    def due(self) -> int:
        """Return the fragment whose turn it is in the next round with contributions."""
        return self.own.due


def _term_of(message: msg.Message) -> tuple[int, int]:
    """Return the term that a message names, from which the next ones are counted, and its round; zeros if it has none.

    Rounds count because a newcomer has seen no term yet: a run has few terms more than rounds.
    """
    match message:
        case msg.Heartbeat():
            return message.promise.term, message.head.round
        case msg.Collect():
            return message.term, message.head.round
        case msg.Begin():
            return message.ballot.term, message.key.round
        case msg.Nack():
            return message.promise.term, message.key.round
    return 0, 0
