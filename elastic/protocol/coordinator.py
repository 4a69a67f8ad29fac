"""An island as coordinator: it collects promises, adopts or proposes, and commits when all members hold the result.

Any island can be it: the first of the roster that is not suspected. Nothing it knows is needed by the next one.
"""

from collections.abc import Collection, Iterable

from diloco.elastic.protocol import leading
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.leading import Term
from diloco.elastic.protocol.member import Member
from diloco.elastic.protocol.messages import (
    Begin,
    Collect,
    Commit,
    Done,
    Failed,
    FetchResult,
    Heartbeat,
    Held,
    Nack,
    Promise,
    Ready,
)
from diloco.elastic.protocol.ranges import is_normal, size
from diloco.elastic.protocol.record import Ballot, Key, Offer, Record, holder_name
from diloco.elastic.protocol.seat import Apart

SELDOM = 8
MAX_FETCHES = 3  # of a greater head, before a round goes on without it
MAX_ROUNDS_APART = 8  # two islands that could not reach each other are kept apart for 2, then 4, then 8 rounds


class Coordinator(Member):
    def _follow_or_lead(self, now: float) -> None:
        if self.term is None and self._may_lead(now):
            self._start_term(now)
        if self.term is not None:
            self._advance(self.term, now)

    def _may_lead(self, now: float) -> bool:
        if now < self._lead_at or self.leaving or self.doubtful or self._catching_up is not None:
            return False
        if self.coordinator(now) != self.me:
            return False
        busy = any(
            view.leading and view.head == self.state.head and view.promise >= self.promise and self.is_alive(peer, now)
            for peer, view in self.peers.views.items()
        )
        return not busy or not self.rules.yield_to_higher_promises

    def _start_term(self, now: float) -> None:
        self._highest_term += 1
        self.term = Term(self._highest_term, resend_at=now)
        self._on_collect(self.me, Collect(self.state.head, self.term.number), now)  # durable before anything is sent

    def _place(self, sender: str, beat: Heartbeat) -> None:
        """One with another head has answered by that. One that has come to ours is asked anew."""
        term = self.term
        if term is None:
            return
        if not self._same_key(Key(beat.head.round + 1, beat.head.digest)):
            term.answers[sender] = None
        elif term.answers.get(sender, self) is None:
            del term.answers[sender]
            self._say(sender, Collect(self.state.head, term.number))

    def _on_answer(self, sender: str, answer: Promise | Ready | Done | Failed, now: float) -> None:
        term = self.term
        if not self._same_key(answer.key):
            self._count_misfit(sender, now)  # late, or of another branch
            return
        if term is None:
            return
        match answer:
            case Promise() if answer.term == term.number:
                self._on_promise(term, sender, answer, now)
            case Ready() if answer.term == term.number:
                self._on_ready(term, sender, answer, now)
            case Done() if term.begin is not None and answer.ballot == term.begin.ballot:
                self._on_done(term, sender, answer.payload)
            case Failed() if term.begin is not None and answer.ballot == term.begin.ballot:
                term.failures.append((sender, answer))
                if answer.amendment and term.begin.proposal.amendment is not None:
                    self._object(term.promised(), sender, term.begin.proposal.amendment, answer.reason)
                term.settle_at = term.settle_at or now + self.options.settle_s
                if answer.blamed == sender:  # it cannot give what it offered
                    term.ready.pop(sender, None)
            case _:
                self._count_misfit(sender, now)

    def _on_promise(self, term: Term, sender: str, promise: Promise, now: float) -> None:
        if promise.amendment is not None and not self.state.accepts(promise.amendment):
            self._ban(sender, "brings a change of settings that is not the owner's next one", now)
            return
        before = term.answers.get(sender)
        if before is not None and before.incarnation != promise.incarnation:
            term.ready.pop(sender, None)  # that life is over
        term.answers[sender] = promise

    def _on_ready(self, term: Term, sender: str, ready: Ready, now: float) -> None:
        for offer in ready.offers:
            if self.rules.marks_decide and not self.state.fits(sender, offer):
                if self.rules.key_names_the_parent:
                    self._ban(sender, f"offers progress from {offer.lo} on, which is not its mark", now)
                return
            if not is_normal(offer.samples) or max(size(offer.samples), offer.steps) > offer.tokens:
                self._ban(sender, "offers samples or steps that cannot be right", now)
                return
        term.ready[sender] = ready
        if any(offer.fragment == self.due for offer in ready.offers):
            term.ready_at.setdefault(sender, now)

    def _on_done(self, term: Term, sender: str, payload: str) -> None:
        if term.begin is not None and sender in term.begin.members:
            term.done[sender] = payload

    def _on_nack(self, sender: str, nack: Nack, now: float) -> None:
        if self.term is None or not self._same_key(nack.key):
            return
        self._highest_term = max(self._highest_term, nack.promise.term)
        if nack.promise > self._own_ballot(self.term):
            self._drop_term(now)

    def _advance(self, term: Term, now: float) -> None:
        if now >= term.resend_at:
            self._resend(term, now)
        self._judge(term, now)
        if term.begin is None:
            self._collect(term, now)
        elif not self._member_lost(term, now):
            self._commit_if_done(term, now)

    def _resend(self, term: Term, now: float) -> None:
        term.resend_at, term.resends = now + self.options.resend_s, term.resends + 1
        ready = term.offers(self.due)
        members = set(term.begin.members if term.begin is not None else ()) - term.done.keys()
        for peer in self.peers.views:
            if term.begin is not None and peer in members:
                if self._is_due(term, term.begin.ballot, peer):
                    self._say(peer, term.begin)
            elif term.answers.get(peer) is None or (peer not in ready and self._is_due(term, self.promise, peer)):
                self._say(peer, Collect(self.state.head, term.number))

    def _is_due(self, term: Term, ballot: Ballot, peer: str) -> bool:
        """Among many, those whose heartbeats say that they have heard it are seldom told again: it may be large."""
        heard = self.peers.views[peer].promise >= ballot
        return self._are_few() or not heard or term.resends % SELDOM == 0

    def _judge(self, term: Term, now: float) -> None:
        """Who lives but does not answer, or does not finish what cannot take long, is left behind."""
        lively = (peer for peer in self.alive(now) - term.answers.keys() if self.peers.heard_lately(peer, now))
        term.asked = {peer: term.asked.get(peer, now) for peer in sorted(lively)}
        for peer in term.asked:
            if now - term.asked[peer] > self.options.answer_s:
                self._ban(peer, "gives signs of life but no promise", now, for_s=self.options.answer_s)
        begin = term.begin
        if begin is not None and not begin.proposal.contributions and now - term.begun_at > self.options.answer_s:
            for peer in sorted(set(begin.members) - term.done.keys() - {self.me}):
                self._ban(peer, "does not confirm what takes no time", now, for_s=self.options.answer_s)

    def _collect(self, term: Term, now: float) -> None:
        alive = self.alive(now) | {self.me}
        if term.fetching is not None and term.fetching[0] in alive:
            return
        term.fetching = None
        if any(self._ahead(peer) for peer in alive):
            return  # its head is to be moved to before anything is decided
        for lost in term.answers.keys() - alive:
            del term.answers[lost]
        if self.me not in term.answers or (self.rules.wait_for_everybody and alive - term.answers.keys()):
            return
        if self.options.partition == "pause" and not leading.quorum(self.state.roster, term.promised()):
            return
        if term.adopted is not None and self.rules.adoption_survives_retries:
            self._begin_adopted(term, term.adopted, self.me, now)
        elif term.adopted is None and (found := term.highest(self.me)) is not None:
            self._adopt(term, *found, now)
        else:
            self._propose(term, now)

    def _ahead(self, peer: str) -> bool:
        """And its state can be had: one that is heard but cannot be reached must not hold everybody up."""
        view = self.peers.views.get(peer)
        return (
            view is not None and view.fetches_failed < MAX_FETCHES and (view.head or self.state.head) > self.state.head
        )

    def _adopt(self, term: Term, holder: str, held: Held, now: float) -> None:
        if self.held is not None and self.held.record.digest == held.record.digest:
            self._begin_adopted(term, held.record, self.me, now)
        else:
            term.fetching = holder, held.record
            self._out.append(FetchResult(holder, held.record))

    def _begin_adopted(self, term: Term, record: Record, holder: str, now: float) -> None:
        term.adopted, term.fetching = record, None
        if not self.rules.adopting_is_not_committing:
            self.held = Held(self._own_ballot(term), record)
            self._commit(term, record, now)
            return
        if self.held is None or self.held.record.digest != record.digest:
            self.held = Held(self._own_ballot(term), record)
            self._remember()
        members = tuple(sorted(term.promised()))
        self._begin(term, Begin(
            self.state.key, self._own_ballot(term), record.proposal, members, (), record.payload, holder
        ), now)  # fmt: skip

    def _propose(self, term: Term, now: float) -> None:
        fragment, promised = self.due, term.promised()
        ready = {peer: offer for peer, offer in term.offers(fragment).items() if peer in promised}
        offers = self._without_stuck_pairs(ready)
        for peer in leading.outsize(offers):
            self._ban(peer, f"its contribution is more than {leading.OUTSIZE} times as large as the others'", now)
            del offers[peer]
        if (amendment := self._amendment(promised)) is not None:
            offers = {}  # whoever has promised says whether it can follow, not only who contributes
        elif not self._is_time(term, offers, ready, now):
            if not self._starving(term):
                return
            offers = {}
        alive = {peer: view.incarnation for peer, view in self.peers.views.items() if self.is_alive(peer, now)}
        alive |= {peer: promise.incarnation for peer, promise in promised.items()}
        wants = {peer: promise.want for peer, promise in promised.items() if promise.want}
        self._tell_lost(set(self.state.roster) - alive.keys())
        proposal = leading.propose(self.state, fragment, offers, alive, wants, self.options.decide, amendment)
        members = proposal.islands or tuple(sorted(promised))
        rates = tuple(term.ready[peer].bytes_per_s for peer in members) if offers else ()
        self._begin(term, Begin(self.state.key, self._own_ballot(term), proposal, members, rates), now)

    def _amendment(self, promised: dict[str, Promise]) -> Amendment | None:
        """The owner's next one, if anybody has it. Not when the clock is at its end: others have seen the run end."""
        if self.options.steps is not None and self.state.step >= self.options.steps:
            return None
        brought = {promise.amendment for promise in promised.values() if promise.amendment is not None}
        for amendment in sorted(brought, key=lambda amendment: amendment.signature):
            if self._is_followed(amendment, promised):
                return amendment
        return None

    def _is_followed(self, amendment: Amendment, promised: dict[str, Promise]) -> bool:
        """It waits while anybody cannot, rather than to end that island; an island that comes back is asked again."""
        lives = ((peer, promise.incarnation) for peer, promise in promised.items())
        if any((*life, amendment.signature) in self._objections for life in lives):
            return False
        if reason := self.options.objection(self.state, amendment):
            self._object(promised, self.me, amendment, reason)
        return not reason

    def _object(self, promised: dict[str, Promise], peer: str, amendment: Amendment, reason: str) -> None:
        if peer not in promised:
            return
        objection = peer, promised[peer].incarnation, amendment.signature
        if objection not in self._objections:
            self._objections.add(objection)
            self._note("refused", peer, f"it waits: {reason}")

    def _without_stuck_pairs(self, offers: dict[str, Offer]) -> dict[str, Offer]:
        """Of those who cannot all reach each other, some who can, and are enough. If no such are, all try again."""
        turn = self.state.head.round
        pairs = [pair for pair, apart in self._apart.items() if turn < apart.until and pair <= offers.keys()]
        if not pairs or not self.rules.leave_out_stuck_pairs:
            return offers
        choices = (leading.together(pairs, offers, turn + shift) for shift in range(len(offers)))
        chosen = next((choice for choice in choices if self._enough(choice)), offers)
        return {peer: offer for peer, offer in offers.items() if peer in chosen}

    def _enough(self, members: Collection[str]) -> bool:
        if self.options.partition == "pause" and not leading.quorum(self.state.roster, members):
            return False
        return len(members) >= max(1, self.options.min_islands)

    def _is_time(self, term: Term, offers: dict[str, Offer], ready: Collection[str], now: float) -> bool:
        if not self._enough(offers):
            return False
        promised = term.promised()
        live = [peer for peer in self.state.roster if peer in promised and self._has_samples(peer, promised[peer])]
        if all(peer in offers or peer in ready for peer in live):
            return True
        # those with late progress were ready at once
        training = [peer for peer in live if peer not in offers or not offers[peer].late]
        ready_at = [term.ready_at[peer] for peer in training if peer in term.ready_at]
        due = leading.deadline(self._commit_at[self.due], ready_at, len(training), self.options.straggler)
        return due is not None and now >= due

    def _has_samples(self, peer: str, promise: Promise) -> bool:
        """At the end of the data, one that holds none is not waited for."""
        return not promise.want or size(self.state.ledger.lease_of(holder_name(peer, promise.incarnation))) > 0

    def _starving(self, term: Term) -> bool:
        """Somebody has no samples, and cannot begin to train: admit it now, not at the next sync point."""
        ledger = self.state.ledger
        if ledger.limit is not None and ledger.next >= ledger.limit and not ledger.free:
            return False
        promised = term.promised()
        if self.options.partition == "pause" and not leading.quorum(self.state.roster, promised):
            return False
        return any(
            promise.want and not size(ledger.lease_of(holder_name(peer, promise.incarnation)))
            for peer, promise in promised.items()
        )

    def _begin(self, term: Term, begin: Begin, now: float) -> None:
        term.begin, term.begun_at, term.settle_at = begin, now, 0.0
        term.done.clear()
        term.failures.clear()
        term.resend_at = now + self.options.resend_s
        for member in begin.members:
            self._say(member, begin)

    def _member_lost(self, term: Term, now: float) -> bool:
        """Ends the attempt if somebody died, or if it has failed and those who could have died were missed."""
        assert term.begin is not None
        lost = sorted(set(term.begin.members) - self.alive(now) - {self.me})
        if not lost and not (term.settle_at and now >= term.settle_at):
            return False
        refused = [(failed.blamed, failed.reason) for _, failed in term.failures if failed.refused]
        for blamed, reason in refused:
            self._ban(blamed, f"its contribution was refused: {reason}", now)
        if not lost and not refused and (pair := leading.culprits(term.failures)) is not None:
            self._note("cut off", pair[0], f"{pair[0]} and {pair[1]} cannot reach each other")
            self._keep_apart(frozenset(pair))
        self._tell_lost(lost)
        self._again(term, now)
        return True

    def _keep_apart(self, pair: frozenset[str]) -> None:
        rounds = min(2 * self._apart[pair].rounds, MAX_ROUNDS_APART) if pair in self._apart else 2
        self._apart[pair] = Apart(self.state.head.round + rounds, rounds)

    def _tell_lost(self, peers: Iterable[str]) -> None:
        """Not of those who said goodbye, and of each once."""
        for peer in sorted(peers):
            view = self.peers.views[peer]
            if not view.left:
                view.left = True
                self._note("lost", peer, f"round {self.state.key.round} goes on without it")

    def _again(self, term: Term, now: float) -> None:
        """Another attempt of the same term; those who are gone have no part in it."""
        term.begin, term.fetching, term.settle_at = None, None, 0.0
        term.attempt += 1
        self._collect(term, now)

    def _commit_if_done(self, term: Term, now: float) -> None:
        begin = term.begin
        assert begin is not None
        if set(begin.members) - term.done.keys():
            return
        payloads = sorted(term.done.values())
        right = term.done.get(self.me) or max(payloads, key=payloads.count)
        wrong = [peer for peer, payload in term.done.items() if payload != right]
        for peer in wrong:
            self._ban(peer, "holds another result than the others", now)
        if wrong:
            self._again(term, now)
        else:
            self._commit(term, Record(begin.proposal, right), now)

    def _commit(self, term: Term, record: Record, now: float) -> None:
        if self.held is None or self.held.record.digest != record.digest:
            self._fetch_first(term, record)
            return
        together = set(record.proposal.islands)
        self._apart = {pair: apart for pair, apart in self._apart.items() if not pair <= together}
        self._append(record, now)
        self._say_all(Commit(record))

    def _fetch_first(self, term: Term, record: Record) -> None:
        """A coordinator that has not contributed holds the result before it commits it: else only those would know of
        the commit who may be gone the next moment."""
        assert term.begin is not None
        if term.fetching is None:
            holder = term.begin.members[term.fetches % len(term.begin.members)]
            term.fetching, term.fetches = (holder, record), term.fetches + 1
            self._out.append(FetchResult(holder, record))
