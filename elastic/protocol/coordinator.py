"""Leading rounds: a coordinator collects promises, adopts or proposes, and commits once all members hold the result.

Any island can be the coordinator: it is the first of the roster that is not suspected. The next one needs nothing that
it knew.
"""

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.member import Member
from diloco.elastic.protocol.proposer import Proposer, culprits
from diloco.elastic.protocol.protocol_state import ProtocolState, Term
from diloco.elastic.protocol.ranges import is_normal, size
from diloco.elastic.protocol.record import Ballot, Key, Record

RESEND = 4  # the part of silence_s after which a question is asked again
RESEND_EVERY = 8  # times, to those among many who have heard it
SETTLE = 20  # the part of silence_s to wait after a failed attempt, until those who died have been missed
MAX_FETCHES = 3  # of a greater head, before a round goes on without it


class Coordinator:
    """Lead rounds while this island is first in line: collect promises, begin attempts, commit."""

    def __init__(self, own: ProtocolState, liveness: Liveness, member: Member, proposer: Proposer) -> None:
        self.own, self.liveness, self.member, self.proposer = own, liveness, member, proposer

    def lead(self, now: float) -> None:
        """Start a term if this island is first in line, and take the next step of the term under way."""
        if self.own.term is None and self._may_lead(now):
            self.own.highest_term += 1
            self.own.term = Term(self.own.highest_term, self.own.me, resend_at=now)
            collect = msg.Collect(self.own.state.head, self.own.term.number)
            self.member.on_collect(self.own.me, collect, now)  # durable before anything is sent
        if (term := self.own.term) is None:
            return
        if now >= term.resend_at:
            self._resend(term, now)
        self._leave_out_mute(term, now)
        if term.begin is None:
            self._collect(term, now)
        elif not self._member_lost(term, term.begin, now):
            self._commit_if_done(term, term.begin, now)

    def _may_lead(self, now: float) -> bool:
        own, liveness = self.own, self.liveness
        if now < own.lead_at or own.leaving or own.diverged or own.catching_up is not None:
            return False
        if liveness.coordinator(now) != own.me:
            return False
        leading = [peer for peer, view in own.peers.views.items() if view.leading and view.head == own.state.head]
        busy = any(own.peers.views[peer].promise >= own.promise and liveness.is_alive(peer, now) for peer in leading)
        return not busy or not own.rules.yield_to_higher_promises

    # what others say

    def on_heartbeat(self, sender: str, beat: msg.Heartbeat) -> None:
        """Count another head as an answer to *collect*; ask a peer that has come to our head once more."""
        term = self.own.term
        if term is None:
            return
        if not self.own.same_key(Key(beat.head.round + 1, beat.head.digest)):
            term.answers[sender] = None
        elif sender in term.answers and term.answers[sender] is None:
            del term.answers[sender]
            self.own.send(sender, msg.Collect(self.own.state.head, term.number))

    def on_answer(self, sender: str, answer: msg.Promise | msg.Ready | msg.Done | msg.Failed, now: float) -> None:
        """Take in a member's answer; one of another round, term or ballot counts against its sender."""
        term = self.own.term
        if not self.own.same_key(answer.key):
            self.member.count_misfit(sender, now)  # late, or of another branch
            return
        if term is None:
            return
        match answer:
            case msg.Promise() if answer.term == term.number:
                self._on_promise(term, sender, answer, now)
            case msg.Ready() if answer.term == term.number:
                self._on_ready(term, sender, answer, now)
            case msg.Done() if term.begin is not None and answer.ballot == term.begin.ballot:
                if sender in term.begin.members:
                    term.done[sender] = answer.payload
            case msg.Failed() if term.begin is not None and answer.ballot == term.begin.ballot:
                self._on_failed(term, term.begin, sender, answer, now)
            case _:
                self.member.count_misfit(sender, now)

    def _on_promise(self, term: Term, sender: str, promise: msg.Promise, now: float) -> None:
        if promise.amendment is not None and not self.own.state.accepts(promise.amendment):
            self.own.ban(sender, "brings a change of settings that is not the owner's next one", now)
            return
        before = term.answers.get(sender)
        if before is not None and before.incarnation != promise.incarnation:
            term.ready.pop(sender, None)  # that life is over
        term.answers[sender] = promise

    def _on_ready(self, term: Term, sender: str, ready: msg.Ready, now: float) -> None:
        for offer in ready.offers:
            if self.own.rules.marks_decide and not self.own.state.fits(sender, offer):
                if self.own.rules.key_names_the_parent:
                    self.own.ban(sender, f"offers progress from {offer.lo} on, which is not its mark", now)
                return
            if not is_normal(offer.samples) or max(size(offer.samples), offer.steps) > offer.tokens:
                self.own.ban(sender, "offers samples or steps that cannot be right", now)
                return
        term.ready[sender] = ready
        if any(offer.fragment == self.own.due for offer in ready.offers):
            term.ready_at.setdefault(sender, now)

    def _on_failed(self, term: Term, begin: msg.Begin, sender: str, failed: msg.Failed, now: float) -> None:
        term.failures.append((sender, failed))
        if failed.amendment and begin.proposal.amendment is not None:
            self.proposer.add_objection(term.promised(), sender, begin.proposal.amendment, failed.reason)
        term.settle_at = term.settle_at or now + self.own.options.silence_s / SETTLE
        if failed.blamed == sender:  # it cannot give what it offered
            term.ready.pop(sender, None)

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
        answer_s = self.own.options.answer_s
        lively = (p for p in self.liveness.alive(now) - term.answers.keys() if self.own.peers.heard_lately(p, now))
        term.asked = {peer: term.asked.get(peer, now) for peer in sorted(lively)}
        for peer in term.asked:
            if now - term.asked[peer] > answer_s:
                self.own.ban(peer, "gives signs of life but no promise", now, for_s=answer_s)
        begin = term.begin
        if begin is not None and not begin.proposal.contributions and now - term.begun_at > answer_s:
            for peer in sorted(set(begin.members) - term.done.keys() - {self.own.me}):
                self.own.ban(peer, "does not confirm what takes no time", now, for_s=answer_s)

    def _collect(self, term: Term, now: float) -> None:
        """Begin an attempt once every peer that is alive has answered."""
        alive = self.liveness.alive(now) | {self.own.me}
        if term.fetching is not None and term.fetching[0] in alive:
            return
        term.fetching = None
        if any(self._is_ahead(peer) for peer in alive):
            return  # its head is to be moved to before anything is decided
        for lost in term.answers.keys() - alive:
            del term.answers[lost]
        if self.own.me not in term.answers or (self.own.rules.wait_for_everybody and alive - term.answers.keys()):
            return
        if not self.proposer.has_quorum(term.promised()):
            return
        if term.adopted is not None and self.own.rules.adoption_survives_retries:
            self._begin_adopted(term, term.adopted, now)
        elif term.adopted is None and (found := term.highest_held()) is not None:
            holder, record = found[0], found[1].record
            if self.own.holds(record.digest):
                self._begin_adopted(term, record, now)
            else:
                self._fetch(term, holder, record)
        elif (begin := self.proposer.next_attempt(term, now)) is not None:
            self._begin(term, begin, now)

    def _is_ahead(self, peer: str) -> bool:
        """Return whether a peer's head is greater than ours and can be fetched.

        One that is heard but cannot be reached must not block everybody.
        """
        view, head = self.own.peers.views.get(peer), self.own.state.head
        return view is not None and view.fetches_failed < MAX_FETCHES and (view.head or head) > head

    def _begin_adopted(self, term: Term, record: Record, now: float) -> None:
        term.adopted, term.fetching = record, None
        if not self.own.rules.adopting_is_not_committing:
            self.own.held = msg.Held(term.ballot, record)
            self._commit(term, record, now)
            return
        if not self.own.holds(record.digest):
            self.own.hold(term.ballot, record)
        members = tuple(sorted(term.promised()))
        begin = msg.Begin(self.own.state.key, term.ballot, record.proposal, members, (), record.payload, self.own.me)
        self._begin(term, begin, now)

    def _begin(self, term: Term, begin: msg.Begin, now: float) -> None:
        term.begin, term.begun_at, term.settle_at = begin, now, 0.0
        term.done.clear()
        term.failures.clear()
        term.resend_at = now + self.own.options.silence_s / RESEND
        for member in begin.members:
            self.own.send(member, begin)

    def _member_lost(self, term: Term, begin: msg.Begin, now: float) -> bool:
        """End the attempt if a member died, or if it has failed; return whether it has ended.

        After a failure it waits a little, so that members that died meanwhile are noticed.
        """
        lost = sorted(set(begin.members) - self.liveness.alive(now) - {self.own.me})
        if not lost and not (term.settle_at and now >= term.settle_at):
            return False
        refused = [(failed.blamed, failed.reason) for _, failed in term.failures if failed.refused]
        for blamed, reason in refused:
            self.own.ban(blamed, f"its contribution was refused: {reason}", now)
        if not lost and not refused and (pair := culprits(term.failures)) is not None:
            self.proposer.separate(*pair)
        self.proposer.note_lost(lost)
        self._again(term, now)
        return True

    def _again(self, term: Term, now: float) -> None:
        """Make another attempt in the same term, without those that are gone."""
        term.begin, term.fetching, term.settle_at = None, None, 0.0
        term.attempt += 1
        self._collect(term, now)

    def _commit_if_done(self, term: Term, begin: msg.Begin, now: float) -> None:
        if set(begin.members) - term.done.keys():
            return
        payloads = sorted(term.done.values())
        right = term.done.get(self.own.me) or max(payloads, key=payloads.count)
        wrong = [peer for peer, payload in term.done.items() if payload != right]
        for peer in wrong:
            self.own.ban(peer, "holds another result than the others", now)
        if wrong:
            self._again(term, now)
        else:
            self._commit(term, Record(begin.proposal, right), now)

    def _commit(self, term: Term, record: Record, now: float) -> None:
        """Append the record and send it to all, once the result is held here.

        A coordinator that has not contributed fetches the result first: otherwise only members that may be gone the
        next moment would know of the commit.
        """
        if self.own.holds(record.digest):
            self.proposer.reunite(set(record.proposal.islands))
            self.member.append(record, now)
            self.own.send_all(msg.Commit(record))
        elif term.fetching is None:
            assert term.begin is not None
            holder = term.begin.members[term.fetches % len(term.begin.members)]
            term.fetches += 1
            self._fetch(term, holder, record)

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
            self._begin_adopted(term, record, now)
        else:
            self.own.hold(term.begin.ballot, record)

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
