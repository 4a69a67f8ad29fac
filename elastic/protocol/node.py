"""One island's part in the protocol (its rules: ARCHITECTURE.md). No sockets, clocks, threads or randomness inside.

Every input is a method that takes `now` and returns effects, to be carried out in order. `Seat` is what an island
knows, `Member` how it answers, `Coordinator` how it leads when it is first in line. What is decided is a `Record`; what
follows from records is a `RunState`.
"""

from collections.abc import Iterable

from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.coordinator import Coordinator
from diloco.elastic.protocol.messages import (
    Begin,
    Collect,
    Commit,
    Done,
    Effect,
    Failed,
    Goodbye,
    Heartbeat,
    Held,
    Message,
    Nack,
    Promise,
    Ready,
)
from diloco.elastic.protocol.record import Ballot, Offer, Record
from diloco.elastic.protocol.seat import Options
from diloco.elastic.protocol.state import RunState

__all__ = ["Node", "Options"]


class Node(Coordinator):
    def tick(self, now: float) -> list[Effect]:
        if self.leaving:
            return []
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self.options.heartbeat_s
            self._beat(now)
        effects = self._finish(now)
        self._awake_at = now
        return effects

    def receive(self, sender: str, message: Message, now: float) -> list[Effect]:
        if not self.peers.banned(sender, now) and not self.leaving:
            self.peers.hear(sender, now)
            self._handle(sender, message, now)
        return self._flush() if self._can_wait(message) else self._finish(now)

    def _can_wait(self, message: Message) -> bool:
        """A tick will do for heartbeats and, among many, for answers: each time, a coordinator looks at all of them."""
        answer = isinstance(message, Promise | Ready | Done | Failed)
        return isinstance(message, Heartbeat) or (answer and not self._are_few())

    def know(self, peers: Iterable[str], now: float) -> list[Effect]:
        self.peers.know(set(peers) - {self.me}, now)
        return self._finish(now)

    def closed(self, peer: str, now: float) -> list[Effect]:
        """Its connection broke and it cannot be reached again."""
        if (view := self.peers.views.get(peer)) is not None:
            view.closed = True
        return self._finish(now)

    def offer(self, offer: Offer, now: float) -> list[Effect]:
        """Progress to be contained in a round. It stays on offer until it is, or is withdrawn."""
        self.pending[offer.fragment] = offer
        self._say_ready()
        return self._finish(now)

    def withdraw(self, fragment: int) -> None:
        """More progress will be offered instead. What was said for the present round stands."""
        self.pending.pop(fragment, None)

    def ask(self, want: int, now: float) -> list[Effect]:
        """For so many samples to hold. Whom it has promised is told, as if it had been asked once more."""
        self.want = want
        self._promise_again()
        return self._finish(now)

    def amend(self, amendment: Amendment, now: float) -> list[Effect]:
        """A change of the run's settings that its owner has made: brought to rounds until one contains it."""
        self.bring(amendment)
        self._promise_again()
        return self._finish(now)

    def bring(self, amendment: Amendment) -> None:
        """With the next promise."""
        if not amendment.is_by(self.state.owner):
            self._note("refused", self.me, f"change {amendment.number} of settings: not signed by the run's owner")
        elif self.state.accepts(amendment) and (reason := self.options.objection(self.state, amendment)):
            self._note("refused", self.me, reason)
        else:
            self.amendments[amendment.number] = amendment

    def _promise_again(self) -> None:
        if self.promise.coordinator:
            self._say(self.promise.coordinator, self.own_promise(self.promise.term))

    def reduced(self, ballot: Ballot, payload: str, now: float) -> list[Effect]:
        following = self.following
        if following is not None and following.begin.ballot == ballot and ballot >= self.promise:
            following.reducing = False
            self._hold(following, Record(following.begin.proposal, payload))
        return self._finish(now)

    def reduce_failed(
        self, ballot: Ballot, blamed: str, reason: str, now: float, *, refused: bool = False
    ) -> list[Effect]:
        following = self.following
        if following is not None and following.begin.ballot == ballot:
            self._give_up(following, blamed, reason, refused=refused)
        return self._finish(now)

    def fetched(self, record: Record, now: float) -> list[Effect]:
        """The result's bytes are here."""
        following, term = self.following, self.term
        if following is not None and _is_of(following.begin, record):
            self._hold(following, record)
        elif term is not None and term.fetching is not None and term.fetching[1].digest == record.digest:
            term.fetching = None
            if term.begin is None:
                self._begin_adopted(term, record, self.me, now)
            else:
                self.held = Held(term.begin.ballot, record)
                self._remember()
        return self._finish(now)

    def fetch_failed(self, holder: str, record: Record, reason: str, now: float) -> list[Effect]:
        following, term = self.following, self.term
        if following is not None and _is_of(following.begin, record):
            self._give_up(following, holder, reason)
        elif term is not None and term.fetching == (holder, record):
            term.fetching = None
            if term.begin is None:
                term.answers.pop(holder, None)  # and ask again, if it is alive
                term.resend_at = now
        return self._finish(now)

    def caught_up(self, state: RunState, now: float, *, whole: bool = True) -> list[Effect]:
        """A state was fetched completely. Only a strictly greater head is moved to.

        `whole`: with all vectors, rather than by the records that were missing. Only that mends damaged vectors.
        """
        donor, self._catching_up = self._catching_up, None
        if state.head > self.state.head or (self.doubtful and whole and state.head >= self.state.head):
            if donor is not None:
                self.peers.view(donor, now).fetches_failed = 0
            self.doubtful = self.doubtful and not whole
            switched = state.head.round != self.state.head.round + 1
            self._new_head(state, now, switched=switched)
            self._beat(now)  # whoever collects can ask it now
        return self._finish(now)

    def catch_up_failed(self, peer: str, now: float) -> list[Effect]:
        """It stays alive in our eyes: who is behind must not go its own way because a fetch failed."""
        self._catching_up = None
        view = self.peers.view(peer, now)
        view.fetch_at = now + self.options.heartbeat_s * 2 ** min(view.fetches_failed, 3)
        view.fetches_failed += 1
        return self._finish(now)

    def ban(self, peer: str, reason: str, now: float) -> list[Effect]:
        self._ban(peer, reason, now)
        return self._finish(now)

    def vouch(self, digest: str, now: float) -> list[Effect]:
        """The digest of this island's vectors at its head, to be compared with the others'."""
        self.state_digest = digest
        return self._finish(now)

    def leave(self, now: float) -> list[Effect]:
        self._say_all(Goodbye("leaves"))
        self.leaving = True  # and nothing more is said
        return self._finish(now)

    def pause(self, now: float) -> list[Effect]:
        """To go without a word, and come back the same: from here on nothing is led, answered or finished."""
        self.leaving, self.term = True, None
        self._stop_following()
        return self._finish(now)

    def _handle(self, sender: str, message: Message, now: float) -> None:
        match message:
            case Heartbeat():
                self._on_heartbeat(sender, message, now)
                self._place(sender, message)
            case Collect():
                self._on_collect(sender, message, now)
            case Promise() | Ready() | Done() | Failed():
                self._on_answer(sender, message, now)
            case Nack():
                self._on_nack(sender, message, now)
            case Begin():
                self._on_begin(sender, message, now)
            case Commit():
                self._on_commit(sender, message.record, now)
            case Goodbye():
                self._on_goodbye(sender, message, now)

    def _notice_sleep(self, now: float) -> None:
        """Was this island stopped, or swapped out? Then what it has not heard, it could not hear."""
        if now - self._awake_at <= self.options.silence_s / 2:
            return
        self._awake_at = now
        self.peers.reset(now)
        if self.term is not None and self.rules.new_term_after_sleep:
            self.term = None
            self._lead_at = now + self.options.heartbeat_s

    def _finish(self, now: float) -> list[Effect]:
        self._notice_sleep(now)
        self._follow_or_lead(now)
        while self._to_self:
            self._handle(self.me, self._to_self.pop(0), now)
            self._follow_or_lead(now)
        return self._flush()

    def _flush(self) -> list[Effect]:
        out, self._out = self._out, []
        return out


def _is_of(begin: Begin, record: Record) -> bool:
    return bool(begin.adopted) and Record(begin.proposal, begin.adopted).digest == record.digest
