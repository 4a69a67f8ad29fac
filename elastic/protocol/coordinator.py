"""Leading rounds: a coordinator collects promises, adopts or proposes, and commits once enough islands hold the result.

Any island can be the coordinator; `leading.py` says who is. The next one needs nothing that it knew.
"""

from dataclasses import replace

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.leading import Leading
from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.member import Member
from diloco.elastic.protocol.proposer import STRAGGLER_EXCHANGES, Proposer, culprits, forced
from diloco.elastic.protocol.protocol_state import LATCH_FROM, ProtocolState, Term
from diloco.elastic.protocol.ranges import is_normal
from diloco.elastic.protocol.record import NO_PHASES, Ballot, Key, Phases, Record, voters
from diloco.elastic.protocol.salvage import Salvage

RESEND = 4  # the part of silence_s after which a question is asked again
RESEND_EVERY = 8  # times, to those among many who have heard it
SETTLE = 20  # the part of silence_s to wait after a failed attempt, until those who died have been missed
RECENT_HEARTBEATS = 1.25  # whoever was heard within so many is there
MAX_REASON = 200  # characters of what others say that people are told
MAX_FETCHES = 3  # of a greater head, before a round goes on without it


class Coordinator:
    """Lead rounds while the others follow this island: collect promises, begin attempts, commit."""

    def __init__(
        self, own: ProtocolState, liveness: Liveness, leading: Leading, member: Member, proposer: Proposer
    ) -> None:
        self.own, self.liveness, self.leading, self.member, self.proposer = own, liveness, leading, member, proposer
        self.salvage = Salvage(own, liveness)

    def lead(self, now: float) -> None:
        """Start a term if this island is to lead, and take the next step of the term under way."""
        self._latch_if_due()
        self.leading.look(now)
        self.own.follows = self.leading.coordinator(now)
        if self.own.term is None and self._may_lead(now):
            self.own.highest_term += 1
            self.own.term = Term(self.own.highest_term, self.own.me, started_at=now, resend_at=now)
            collect = msg.Collect(self.own.state.head, self.own.term.number)
            self.member.on_collect(self.own.me, collect, now)  # durable before anything is sent
        if (term := self.own.term) is None:
            return
        if self._must_give_up(term, now):
            self.own.term = None
            return
        if now >= term.resend_at:
            self._resend(term, now)
        self._leave_out_mute(term, now)
        if term.begin is None:
            self._collect(term, now)
        elif not self._member_lost(term, term.begin, now):
            self._commit_if_done(term, term.begin, now)

    def _latch_if_due(self) -> None:
        """Demand a quorum from here on, as the owner, as soon as the roster has three members."""
        own = self.own
        if own.options.sign_latch is None or own.needs_quorum or own.options.partition != "auto":
            return
        if len(own.state.roster) >= LATCH_FROM and own.is_stored and not own.leaving:
            own.obey(own.options.sign_latch(own.state.head))
            what = "a majority of the islands has to take part in every round"
            own.note("latched", own.me, f"after round {own.state.head.round}, {what}")

    def _must_give_up(self, term: Term, now: float) -> bool:
        """Return whether another island should lead by now, or no byte has moved for so long that anybody may."""
        if not self.own.rules.follow_the_linked:
            return False
        if self.leading.is_stuck(now):
            return self.leading.was_stuck_since(term.started_at, now)
        return term.begin is None and self.own.follows != self.own.me

    def _may_lead(self, now: float) -> bool:
        own, liveness = self.own, self.liveness
        if now < own.lead_at or own.leaving or own.diverged or own.catching_up is not None:
            return False
        if self.member.is_soon_there(now):
            return False  # this round is committed
        if not self.leading.may_lead(now):
            return False
        if own.rules.follow_the_linked and liveness.are_few():
            return True
        leading = [peer for peer, view in own.peers.views.items() if view.leading and view.head == own.state.head]
        busy = any(own.peers.views[peer].promise >= own.promise and liveness.is_alive(peer, now) for peer in leading)
        return not busy or not own.rules.yield_to_higher_promises

    # what others say

    def on_heartbeat(self, sender: str, beat: msg.Heartbeat, now: float) -> None:
        """Count another head as an answer to *collect*; ask a peer that has come to our head once more."""
        term = self.own.term
        if term is None:
            return
        answer = term.answers.get(sender)
        if answer is not None and answer.incarnation < beat.incarnation:  # that life, and what it offered, is over
            term.answers[sender] = None
            term.ready.pop(sender, None)
        if self._is_just_behind(sender, now):
            return
        if not self.own.same_key(Key(beat.head.round + 1, beat.head.digest)):
            answer = term.answers.get(sender)  # a promise tells more than a head that the disk is behind with
            ahead = self.own.outranks(beat.rank, beat.head)
            if answer is None or answer.incarnation != beat.incarnation or ahead:
                term.answers[sender] = None
        elif sender in term.answers and term.answers[sender] is None:
            del term.answers[sender]
            self.own.send(sender, msg.Collect(self.own.state.head, term.number))

    def _is_just_behind(self, peer: str, now: float) -> bool:
        """Return whether a peer has another head only because it has not heard of the last commit, or written it.

        One that took part in it may still miss the last bytes of the result. One that is out of turn, for its link is
        slow, says that it fetches the result.
        """
        own, view = self.own, self.own.peers.views[peer]
        if view.behind_s and self.proposer.pacing.is_out_of_turn(peer):
            return False
        rest_s = STRAGGLER_EXCHANGES * own.exchange_s if peer in own.last_contributors else 0.0
        since = view.behind_since
        return since is not None and now - since <= self._settled_s + rest_s + 2 * own.write_s(peer)

    @property
    def _settled_s(self) -> float:
        """Return within how many seconds everybody that is there has heard of a commit, and of a new term."""
        return 2 * self.own.options.heartbeat_s

    def on_answer(self, sender: str, answer: msg.Answer, now: float) -> None:
        """Take in a member's answer; one of another round, term or ballot counts against its sender."""
        term = self.own.term
        if not self.own.same_key(answer.key):
            self.member.count_misfit(sender, now)  # late, or of another branch
            return
        if term is None or sender in self.own.state.evicted:
            return
        term.unheard.discard(sender)
        if sender != self.own.me:
            self.own.peers.views[sender].in_vain = False
        match answer:
            case msg.Promise() if answer.term == term.number:
                self._on_promise(term, sender, answer, now)
            case msg.Follows() if answer.term == term.number:
                if term.answers.get(sender) is None:
                    term.elsewhere[sender] = answer.leader
            case msg.Ready() if answer.term == term.number:
                self._on_ready(term, sender, answer, now)
            case msg.Begun() if term.begin is not None and answer.ballot == term.begin.ballot:
                term.begun.add(sender)
            case msg.Done() if term.begin is not None and answer.ballot == term.begin.ballot:
                if sender in (*term.begin.members, *term.promised()):
                    term.done[sender] = answer.payload
            case msg.Failed() if term.begin is not None and answer.ballot == term.begin.ballot:
                self._on_failed(term, term.begin, sender, answer, now)
            case _:
                self.member.count_misfit(sender, now)

    def _on_promise(self, term: Term, sender: str, promise: msg.Promise, now: float) -> None:
        if promise.amendment is not None and not self.own.state.accepts(promise.amendment):
            self.own.ban(sender, "brings a change of settings that is not the owner's next one", now)
            return
        if reason := self.own.state.objection(sender, promise.admission, witness=promise.witness):
            self.own.ban(sender, f"cannot be a member: {reason}", now)
            return
        before = term.answers.get(sender)
        if before is not None and before.incarnation != promise.incarnation:
            term.ready.pop(sender, None)  # that life is over
        term.answers[sender] = promise
        term.elsewhere.pop(sender, None)

    def _on_ready(self, term: Term, sender: str, ready: msg.Ready, now: float) -> None:
        for offer in ready.offers:
            if self.own.rules.marks_decide and not self.own.state.fits(sender, offer):
                self.own.ban(sender, f"offers progress from {offer.lo} on, which is not its mark", now)
                return
            known = is_normal(offer.samples) and self.own.state.ledger.reaches(offer.samples)
            if not known or not offer.is_possible:
                self.own.ban(sender, "offers samples or steps that cannot be right", now)
                return
        term.ready[sender] = ready
        if any(offer.fragment == self.own.due for offer in ready.offers):
            term.ready_at.setdefault(sender, now)

    def _on_failed(self, term: Term, begin: msg.Begin, sender: str, failed: msg.Failed, now: float) -> None:
        if failed.local and self.own.needs_quorum:
            term.excused.add(sender)
            return
        if self._can_do_without(term, begin, sender, now):
            return
        if failed.kept:
            term.kept[sender] = failed.kept
        takes_part = {*begin.members, *begin.proposal.islands}
        if begin.bytes_per_s and failed.blamed and failed.blamed not in takes_part:
            self.own.ban(sender, f"blames {failed.blamed}, which takes no part", now)
            return
        amendment = begin.proposal.amendment
        if failed.amendment and amendment is not None:
            if sender in amendment.evicts:
                return  # it is not asked
            self.proposer.add_objection(term.promised(), sender, amendment, failed.reason)
        if sender not in (reporter for reporter, _ in term.failures):  # one accusation of each
            term.failures.append((sender, failed))
        term.settle_at = term.settle_at or now + self.own.options.silence_s / SETTLE
        if failed.blamed == sender:  # it cannot give what it offered
            term.ready.pop(sender, None)

    def _can_do_without(self, term: Term, begin: msg.Begin, sender: str, now: float) -> bool:
        """Leave out one that was asked to store a result and cannot get it, if the others that live are a quorum."""
        if term.store is None or sender in begin.members or sender not in term.store.members:
            return False
        others = tuple(peer for peer in term.store.members if peer != sender)
        there = self.liveness.alive(now) | term.done.keys()
        present = {*begin.members, *there.intersection(others), self.own.me}
        if not self.own.state.is_decided(begin.proposal.amendment, present):
            return False
        term.store = replace(term.store, members=others)
        return True

    def on_nack(self, nack: msg.Nack, now: float) -> None:
        """Drop the term if a member has promised a higher ballot; the next term is numbered above that."""
        if self.own.term is None or not self.own.same_key(nack.key):
            return
        self.own.highest_term = max(self.own.highest_term, nack.promise.term)
        if nack.promise > self.own.term.ballot:
            self.own.drop_term(now)

    # a term

    def _resend(self, term: Term, now: float) -> None:
        term.resend_at, term.resends = now + self.own.options.silence_s / RESEND, term.resends + 1
        ready = term.offers(self.own.due)
        members = set(term.begin.members if term.begin is not None else ()) - term.done.keys()
        for peer in self.own.peers.views:
            if term.begin is not None and peer in members:
                if self._is_due(term, term.begin.ballot, peer):
                    self.own.send(peer, term.begin)
            elif term.store is not None and peer in term.store.members and peer not in term.done:
                self.own.send(peer, term.store)
            elif term.answers.get(peer) is None or (peer not in ready and self._is_due(term, self.own.promise, peer)):
                self.own.send(peer, msg.Collect(self.own.state.head, term.number))

    def _is_due(self, term: Term, ballot: Ballot, peer: str) -> bool:
        """Return whether to send a peer its message, which may be long, once more.

        Among many peers, that is seldom for one whose heartbeats show that it has heard.
        """
        heard = self.own.peers.views[peer].promise >= ballot
        return self.liveness.are_few() or not heard or term.resends % RESEND_EVERY == 0

    def _leave_out_mute(self, term: Term, now: float) -> None:
        """Ban peers that give signs of life but no promise, or do not confirm what cannot take long."""
        answer_s = self.own.answer_s
        silent = self._waited_for(now) - term.answers.keys() - term.elsewhere.keys() - {self.own.me}
        lively = (peer for peer in silent if self.own.peers.heard_lately(peer, now))
        term.asked = {peer: term.asked.get(peer, now) for peer in sorted(lively)}
        for peer in term.asked:
            if now - term.asked[peer] > answer_s(peer):
                self._leave_out(peer, "gives signs of life but no promise", now)
        begin = term.begin
        if begin is not None and not begin.proposal.contributions:
            for peer in sorted(set(begin.members) - term.done.keys() - {self.own.me}):
                if now - term.begun_at > answer_s(peer):
                    self._leave_out(peer, "does not confirm what takes no time", now)

    def _leave_out(self, peer: str, reason: str, now: float) -> None:
        self.own.ban(peer, reason, now, for_s=self.own.options.answer_s)
        self.own.peers.views[peer].in_vain = True

    def _waited_for(self, now: float) -> set[str]:
        """Return who must answer before anything begins.

        All who live; where a quorum decides, of the roster only, and nobody that does not hear this island. Of many,
        those who vote; the others are given time to answer when a term begins.
        """
        alive = self.liveness.alive(now)
        if not self.own.needs_quorum:
            return alive | {self.own.me}
        members = alive & self.own.state.places.keys()
        term, electorate = self.own.term, voters(self.own.state.roster)
        if len(electorate) < len(members) and term is not None and now - term.started_at > self._settled_s:
            members &= set(electorate)
        if self.own.rules.follow_the_linked and self.liveness.are_few():
            members = {peer for peer in members if self.leading.is_linked(peer, now)}
        return members | {self.own.me}

    def _collect(self, term: Term, now: float) -> None:
        """Begin an attempt once everybody who matters has answered."""
        alive = self.liveness.alive(now) | {self.own.me}
        if term.fetching is not None and term.fetching[0] in alive:
            return
        term.fetching = None
        if any(self._is_ahead(peer) for peer in alive):
            return  # its head is to be moved to before anything is decided
        for lost in term.answers.keys() - alive:
            del term.answers[lost]
        answered = term.answers.keys() | (term.elsewhere.keys() if self.own.needs_quorum else set())
        missing = self._waited_for(now) - answered if self.own.rules.wait_for_everybody else ()
        if self.own.me not in term.answers or missing:
            return
        if not self.proposer.has_quorum(term.promised(), now) or (self.own.needs_quorum and not self.own.is_latched):
            return
        if term.adopted is not None and self.own.rules.adoption_survives_retries:
            self._begin_adopted(term, term.adopted, now)
        elif term.adopted is None and (found := term.highest_held()) is not None:
            holder, record = found[0], found[1].record
            if (force := self.proposer.force(term.promised())) is not None:
                record = forced(self.own.state, record, force)
            if self.own.has_result(record.payload) or term.at_hand == record.digest:
                self._begin_adopted(term, record, now)
            else:
                self._fetch(term, holder, record)
        else:
            begin = self.salvage.next_attempt(term, now) or self.proposer.next_attempt(term, now)
            if begin is not None and self._are_there(term, begin, now):
                self._begin(term, begin, now)

    def _are_there(self, term: Term, begin: msg.Begin, now: float) -> bool:
        """Return whether all members of an attempt were heard of late; of many, those who were not are asked first.

        Among many there are always some who died a moment ago, and each would end the attempt. Whoever gives no answer
        within a heartbeat is left out until it does.
        """
        if self.liveness.are_few() or not begin.bytes_per_s:
            return True
        views, heartbeat_s = self.own.peers.views, self.own.options.heartbeat_s
        since = (now if term.called_at is None else term.called_at) - RECENT_HEARTBEATS * heartbeat_s
        silent = [peer for peer in begin.members if peer != self.own.me and views[peer].heard_at < since]
        if silent and term.called_at is None:
            term.called_at = now
            for peer in silent:
                self.own.send(peer, msg.Collect(self.own.state.head, term.number))
        if silent and term.called_at is not None and now - term.called_at < heartbeat_s:
            return False
        term.called_at = None
        term.unheard.update(silent)
        return not silent

    def _is_ahead(self, peer: str) -> bool:
        """Return whether a peer's head is greater than ours and can be fetched.

        One that is heard but cannot be reached must not block everybody.
        """
        return self.member.seems_ahead(peer) and self.own.peers.views[peer].fetches_failed < MAX_FETCHES

    def _begin_adopted(self, term: Term, record: Record, now: float) -> None:
        term.adopted, term.fetching = record, None
        if not self.own.rules.adopting_is_not_committing:
            self.own.held = msg.Held(term.ballot, record)
            self._finish(record, (self.own.me,), now)
            return
        if not self.own.holds(record.digest):
            self.own.hold(term.ballot, record)
        members = tuple(sorted(term.promised()))
        begin = msg.Begin(self.own.state.key, term.ballot, record.proposal, members, (), record.payload, self.own.me)
        self._begin(term, begin, now)

    def _begin(self, term: Term, begin: msg.Begin, now: float) -> None:
        term.begin, term.begun_at, term.settle_at = begin, now, 0.0
        if begin.bytes_per_s:
            self.own.tried = begin
        term.store, term.enough_at = None, None
        term.asked_to_store.clear()
        term.begun.clear()
        term.done.clear()
        term.failures.clear()
        term.excused.clear()
        term.kept.clear()
        term.halted_at = term.prepared = None
        term.resend_at = now + self.own.options.silence_s / RESEND
        for member in begin.members:
            self.own.send(member, begin)

    def _member_lost(self, term: Term, begin: msg.Begin, now: float) -> bool:
        """End the attempt if a member died that owes something, or if it has failed; return whether it has ended.

        After a failure it waits a little, so that members that died meanwhile are noticed.
        """
        lost = sorted(set(begin.members) - self.liveness.alive(now) - {self.own.me})
        failed = (bool(term.settle_at) and now >= term.settle_at) or self._is_hopeless(term, begin, now)
        if begin.bytes_per_s and not self.liveness.are_few() and self.own.needs_quorum:
            lost = [peer for peer in lost if peer not in term.begun]  # of the others, those nearby miss bytes, or not
        objected = begin.proposal.amendment is not None and any(failed.amendment for _, failed in term.failures)
        if self.own.needs_quorum and term.done and not objected:
            if self.own.me in term.done and self.own.state.is_decided(begin.proposal.amendment, term.done):
                return False  # it will be committed, whoever else misses something
            holders = term.done.keys() & (self.liveness.alive(now) | {self.own.me})
            if begin.bytes_per_s and holders and not failed:
                lost = []  # somebody has the whole result: the others say whether they miss bytes
        deaf = set() if lost or failed else self._deaf(term, begin, now)
        if not lost and not failed and not deaf:
            return False
        if self.salvage.awaits_reports(term, begin, lost, now):
            return True
        for peer in deaf:
            term.answers.pop(peer, None)  # until it answers anew
        refused = [(one, said) for one, said in term.failures if said.refused and said.blamed not in ("", one)]
        for reporter, said in refused:
            if reporter == self.own.me:
                self.own.ban(said.blamed, f"its contribution was refused: {said.reason}", now)
            else:  # it may be wrong, or lie
                self.proposer.separate(reporter, said.blamed, refused=said.reason[:MAX_REASON])
        halted = term.halted_at is not None  # who has given up has hung up on others
        if not lost and not refused and not halted and (pair := culprits(term.failures)) is not None:
            self.proposer.separate(*pair)
        self.proposer.note_lost(lost)
        if not refused:
            self.salvage.prepare(term, begin, lost, now)
        self._again(term, now)
        return True

    def _is_hopeless(self, term: Term, begin: msg.Begin, now: float) -> bool:
        """Return whether everybody that could has said how the attempt went, and too few have the result."""
        if not term.excused or set(begin.members) - term.done.keys() - term.excused - self._gone(begin, now):
            return False
        return not self.own.state.is_decided(begin.proposal.amendment, term.done.keys() | {self.own.me})

    def _deaf(self, term: Term, begin: msg.Begin, now: float) -> set[str]:
        """Return the members that have not confirmed the attempt in time: as long as telling all of them may take."""
        if not self.own.rules.follow_the_linked:
            return set()
        telling_s = self.own.options.answer_s * len(begin.members) / max(1, self.own.options.flat_up_to)
        silent = set(begin.members) - term.begun - term.done.keys() - {self.own.me}
        return {peer for peer in silent if now - term.begun_at > telling_s + self.own.answer_s(peer)}

    def _again(self, term: Term, now: float) -> None:
        """Make another attempt in the same term, without those that are gone."""
        term.begin, term.fetching, term.settle_at = None, None, 0.0
        term.attempt += 1
        self._collect(term, now)

    def _commit_if_done(self, term: Term, begin: msg.Begin, now: float) -> None:
        missing = set(begin.members) - term.done.keys()
        if not term.done or (missing and not self.own.needs_quorum):
            return
        if (right := self._right_result(term, begin, now)) is None:
            return
        wrong = [peer for peer, payload in term.done.items() if payload != right]
        for peer in wrong:
            if peer == self.own.me:
                self.own.forget_result()
                term.ready.pop(peer, None)  # the others go on without its contribution
                self.own.note("refused", peer, "holds another result than the others")
            else:
                self.own.ban(peer, "holds another result than the others", now)
        if wrong:
            self._again(term, now)
        elif self._is_enough(term, begin, right, now):
            self._commit(term, Record(begin.proposal, right), now)

    def _right_result(self, term: Term, begin: msg.Begin, now: float) -> str | None:
        """Return the result that most members hold, else this island's own; None while others may still tell."""
        payloads = sorted(term.done.values())
        most = max(payloads, key=payloads.count)
        if payloads.count(most) == len(payloads) or 2 * payloads.count(most) > len(begin.members):
            return most
        if set(begin.members) - term.done.keys() - self._gone(begin, now):
            return None
        return term.done.get(self.own.me) or most

    def _is_enough(self, term: Term, begin: msg.Begin, payload: str, now: float) -> bool:
        """Return whether the result is stored widely enough to be committed.

        With a quorum, the rest of the members get `silence_s` more; where members are no quorum, others store it, too.
        """
        if not self.own.needs_quorum:
            return True
        missing = set(begin.members) - term.done.keys() - term.excused
        if not self.own.state.is_decided(begin.proposal.amendment, term.done.keys() | {self.own.me}):
            if not missing - self._gone(begin, now):
                self._have_it_stored(term, begin, payload)
            return False
        if term.enough_at is None:
            term.enough_at = now
        current, patience_s = self.own.current, self.own.options.silence_s
        if current is not None and current.reducing and current.begin.ballot == begin.ballot:
            patience_s = max(patience_s, self.own.exchange_s / 2)  # others still need its bytes
        return not missing - self._gone(begin, now) or now - term.enough_at > patience_s

    def _gone(self, begin: msg.Begin, now: float) -> set[str]:
        return set(begin.members) - self.liveness.alive(now) - {self.own.me}

    def _have_it_stored(self, term: Term, begin: msg.Begin, payload: str) -> None:
        """Ask those who have promised and do not contribute to store the result: it needs a quorum.

        They get it from this island, which reaches all of them, once it has it itself. Who promises later is asked
        then: those who were asked first may be gone.
        """
        others = term.promised().keys() - set(begin.members) - {self.own.me}
        if self.own.me not in term.done:
            if not self.own.holds(Record(begin.proposal, payload).digest):
                self._fetch_to_commit(term, Record(begin.proposal, payload))
        elif new := sorted(others - term.asked_to_store):
            term.asked_to_store.update(new)
            before = () if term.store is None else term.store.members
            members = tuple(sorted((*before, *new)))
            term.store = replace(begin, members=members, bytes_per_s=(), adopted=payload, holder=self.own.me)
            for peer in new:
                self.own.send(peer, term.store)

    def _commit(self, term: Term, record: Record, now: float) -> None:
        """Append the record and send it to all, once the result is held here.

        A coordinator that has not contributed fetches the result first: otherwise only members that may be gone the
        next moment would know of the commit.
        """
        if self.own.holds(record.digest):
            if self.own.needs_quorum and self.own.me not in term.done:
                return  # its own *done* is on its way to the disk
            self._finish(record, tuple(sorted(term.done.keys() | {self.own.me})), now)
        else:
            self._fetch_to_commit(term, record)

    def _fetch_to_commit(self, term: Term, record: Record) -> None:
        """Fetch a result that this island has not helped to make, from one that holds it."""
        if term.fetching is None:
            holders = sorted(term.done.keys() - {self.own.me})
            holder = holders[term.fetches % len(holders)]
            term.fetches += 1
            self._fetch(term, holder, record)

    def _finish(self, record: Record, stored_by: tuple[str, ...], now: float) -> None:
        """Append a record, and announce it to all."""
        self.proposer.reunite(set(record.proposal.present))
        phases = NO_PHASES
        if (islands := record.proposal.islands) and (term := self.own.term) is not None and term.begin is not None:
            self.proposer.holding.committed(islands, now)
            rates = dict(zip(term.begin.members, term.begin.bytes_per_s, strict=False))
            self.proposer.pacing.committed(islands, rates, now - term.begun_at)
            began, before = term.begun_at, max(self.own.commit_at)
            phases = Phases(max(0, round(1000 * (began - before))), round(1000 * (now - began)))
        self.member.append(record, now, stored_by, phases, told=True)
        self.own.send_all(msg.Commit(record.proposal.key, self.own.state.head, stored_by, phases))

    def _fetch(self, term: Term, holder: str, record: Record) -> None:
        term.fetching = holder, record
        self.own.effects.append(msg.FetchResult(holder, record))

    def fetched(self, record: Record, now: float) -> None:
        """Take in that a result has arrived: begin to adopt it, or hold it so that it can be committed."""
        term = self.own.term
        if term is None or term.fetching is None or term.fetching[1].digest != record.digest:
            return
        term.fetching = None
        if term.begin is None:
            term.at_hand = record.digest  # and wait again: others may have decided meanwhile
        else:
            self.own.hold(term.begin.ballot, record)
            self.member.say_done(self.own.me, msg.Done(self.own.state.key, term.begin.ballot, record.payload))

    def fetch_failed(self, holder: str, record: Record, now: float) -> None:
        """Take in that a result could not be fetched.

        One to be adopted is asked for again if its holder is alive; one to be committed is fetched from the next
        member.
        """
        term = self.own.term
        if term is None or term.fetching != (holder, record):
            return
        term.fetching = None
        if term.begin is None:
            term.answers.pop(holder, None)  # and ask again, if it is alive
            term.resend_at = now
