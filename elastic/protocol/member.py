"""Taking part in rounds: a member promises, takes part in attempts, holds a result, and appends what was committed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.checking import dropped_at_once, what_is_wrong, what_is_wrong_for
from diloco.elastic.protocol.leading import Leading
from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.proposer import outsize
from diloco.elastic.protocol.protocol_state import CurrentAttempt, ProtocolState
from diloco.elastic.protocol.record import (
    EMPTY,
    NO_BALLOT,
    NO_PHASES,
    Amendment,
    Ballot,
    Head,
    Key,
    Offer,
    Phases,
    Record,
)
from diloco.elastic.protocol.salvage import MAX_PIECES
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.undoing import Undoing
from diloco.errors import RecordInvalid

MAX_MISFITS = 100  # within silence_s: whoever is merely late, or resends, sends a few
LINEAGE = 1024  # records
MAX_FIRST = 1024  # members of a first attempt


class Member:
    """Answer coordinators: promise, offer progress, take part in attempts, hold and append results."""

    def __init__(self, own: ProtocolState, liveness: Liveness, leading: Leading) -> None:
        self.own, self.liveness, self.leading = own, liveness, leading
        self.undoing = Undoing(own, partial(self._move, switched=True))
        self.pending: dict[int, Offer] = {}  # by fragment: to be contained
        self._frozen: dict[int, Offer] = {}  # what was said to be ready for this key stays

    def on_heartbeat(self, sender: str, beat: msg.Heartbeat, now: float) -> bool:
        """Take in a peer's head and promise: catch up with a greater head, yield to a higher promise.

        Returns False for one that a later one has overtaken: it changes nothing.
        """
        view = self.own.peers.view(sender, now)
        if (beat.incarnation, beat.sequence) < (view.incarnation, view.sequence):
            return False
        view.incarnation, view.sequence, view.state_digest = beat.incarnation, beat.sequence, beat.state_digest
        view.head, view.promise, view.leading, view.follows = beat.head, beat.promise, beat.leading, beat.follows
        view.behind_s, view.write_s, view.rank, view.running = beat.behind_s, beat.write_s, beat.rank, beat.running
        if beat.latch is not None:
            self.own.obey(beat.latch)
        if beat.amendment is not None:
            self._bring_along(beat.amendment)
        if beat.roster_of == self.own.state.head.digest:
            roster, view.linked_at = self.own.state.roster, beat.roster_of
            view.hears = frozenset(roster[place] for place in beat.hears if 0 <= place < len(roster))
            view.linked = frozenset(roster[place] for place in beat.linked if 0 <= place < len(roster))
        if beat.moving and beat.head == self.own.state.head:
            self.own.moved_at = max(self.own.moved_at, now)
            if self._leads(beat.promise):
                self.own.moved = True  # others may not hear the sender
        behind = view.head < self.own.state.head
        if view.behind_since is not None and not behind:
            view.caught_up_in_s = now - view.behind_since
        view.behind_since = (now if view.behind_since is None else view.behind_since) if behind else None
        self.liveness.hear(sender, beat, now)
        if beat.head == self.own.state.head:
            self._believe(beat.rank)
        self.undoing.start_if_void()
        self._meet(sender, beat.head, now, rank=beat.rank)
        if beat.head == self.own.state.head:
            if beat.rank > self.own.rank:
                self.own.trust_in_latch()  # who appends by hearsay does not know whose *done* there was
            self.own.highest_term = max(self.own.highest_term, beat.promise.term)
            self._compare_digests()
            if self.own.term is not None and beat.promise > self.own.term.ballot:
                self.own.drop_term(now)
        return True

    def _bring_along(self, amendment: Amendment) -> None:
        """Take up the owner's change of settings from a peer: one that is behind cannot bring it to a round itself."""
        own, number = self.own, amendment.number
        if number <= len(own.state.amendments) or number in own.amendments or not amendment.is_by(own.state.owner):
            return
        if own.state.accepts(amendment) and own.options.objection(own.state, amendment):
            return
        own.amendments[number] = amendment
        self.promise_again()

    def _leads(self, ballot: Ballot) -> bool:
        """Return whether this island leads the attempt that somebody has promised this ballot for."""
        term = self.own.term
        return term is not None and term.begin is not None and term.begin.ballot == ballot

    def _meet(self, sender: str, head: Head, now: float, *, rank: int) -> None:
        """Catch up with a head that is greater, or the same one where this island's vectors are damaged."""
        same = head == self.own.state.head
        wanted = self.own.diverged if same else self.own.outranks(rank, head) and not self.is_soon_there(now)
        if self.own.going_back and not rank:
            return  # what the other one has is void, too, or will lose
        if not wanted or self.own.catching_up is not None or now < self.own.peers.view(sender, now).fetch_at:
            return
        if self.own.held is not None and self.own.holds(head.digest):
            # whoever has this head knows that it was committed, and by whom it is stored
            proposal = self.own.held.record.proposal
            electorate = self.own.state.kept(proposal.amendment) or self.own.state.roster
            stored_by = electorate if rank else proposal.islands
            self.append(self.own.held.record, now, stored_by)
        else:
            self.own.catch_up(sender, head)

    def _compare_digests(self) -> None:
        """Compare the digests of vectors on the same chain, and fetch the others' if ours are damaged.

        They are if a majority has other bits; of two islands, the first of the roster is believed.
        """
        roster = self.own.state.roster
        if self.own.diverged or not self.own.state_digest:
            return
        views = self.own.peers.views.items()
        said = {peer: view.state_digest for peer, view in views if view.head == self.own.state.head}
        digest, count = Counter(filter(None, said.values())).most_common(1)[0] if any(said.values()) else ("", 0)
        second_of_two = len(roster) == 2 and roster[1] == self.own.me  # of two, the first is believed
        if digest in ("", self.own.state_digest) or (2 * count <= self.liveness.voters() and not second_of_two):
            return
        self.own.diverged = True
        self.own.note("diverged", self.own.me, "its vectors differ from the others': it fetches theirs")
        self.own.catch_up(min(peer for peer in said if said[peer] == digest), self.own.state.head)

    def on_collect(self, sender: str, collect: msg.Collect, now: float) -> None:
        """Answer a coordinator that starts a term: with a promise and what is ready, or with a refusal.

        The refusal is a nack after a higher promise, and a heartbeat where this island has another head.
        """
        self._meet(sender, collect.head, now, rank=self._rank_of(sender))
        if sender != self.own.me:
            self._shows(sender, collect.head, now)
        ballot = Ballot(collect.term, sender, 0)
        if not self.own.same_key(Key(collect.head.round + 1, collect.head.digest)):
            self._refuse(sender, self.own.heartbeat(), now)
        elif ballot < self.own.promise and ballot[:2] != self.own.promise[:2]:
            self.own.send(sender, msg.Nack(self.own.state.key, self.own.promise))
        elif ballot[:2] != self.own.promise[:2] and not self.leading.may_promise(sender, now):
            self.own.send(sender, msg.Follows(self.own.state.key, collect.term, self.leading.coordinator(now)))
        else:
            self._promise(max(ballot, self.own.promise), now)
            self.own.send(sender, self.own.promise_for(collect.term))
            self.say_ready(now)

    def _rank_of(self, peer: str) -> int:
        """Return the rank that a peer's chain has, as it has said; this island counts, too."""
        return self.own.rank if peer == self.own.me else self.own.peers.views[peer].rank

    def _shows(self, sender: str, head: Head, now: float) -> None:
        """Take in a durable head that a peer shows by another message than a heartbeat."""
        view = self.own.peers.view(sender, now)
        if view.head is None or head > view.head:
            view.head, view.promise = head, NO_BALLOT

    def _refuse(self, sender: str, answer: msg.Message, now: float) -> None:
        self.count_misfit(sender, now)
        self.own.send(sender, answer)

    def count_misfit(self, sender: str, now: float) -> None:
        """Count a message of another round, and ban a peer that sends many: one late message is no fault."""
        if sender == self.own.me:
            return  # its own *done*, back from the disk when the round was over
        view = self.own.peers.view(sender, now)
        if now - view.misfits_since > self.own.options.silence_s:
            view.misfits, view.misfits_since = 0, now
        view.misfits += 1
        if view.misfits > MAX_MISFITS:
            self.own.ban(sender, "keeps sending ballots and answers of other rounds", now)

    def _promise(self, ballot: Ballot, now: float) -> None:
        """Promise a ballot durably: from here on nothing below it is finished or served."""
        if ballot == self.own.promise:
            return
        if ballot[:2] != self.own.promise[:2]:
            self.own.promised_at = now
        self.own.promise = ballot
        self.own.highest_term = max(self.own.highest_term, ballot.term)
        self.own.remember()
        if (current := self.own.current) is not None and current.begin.ballot < ballot:
            if current.sender != ballot.coordinator:  # that it hangs up is no sign of a cut
                self.own.send(current.sender, msg.Nack(self.own.state.key, ballot))
            self.own.stop_attempt()
        if self.own.term is not None and self.own.term.ballot[:2] < ballot[:2]:
            self.own.drop_term(now)

    def promise_again(self) -> None:
        """Send the promise again because its content has changed, as if the coordinator had asked anew."""
        if coordinator := self.own.promise.coordinator:
            self.own.send(coordinator, self.own.promise_for(self.own.promise.term))

    def say_ready(self, now: float) -> None:
        """Send this island's offers to the coordinator it has promised; they stay the same for this round."""
        for fragment, offer in self.pending.items():
            if self.own.state.fits(self.own.me, offer) or not self.own.rules.marks_decide:
                self._frozen.setdefault(fragment, offer)
        if self.own.due in self._frozen and self.own.ready_at is None:
            self.own.ready_at = now
        if self.own.promise.coordinator and self._frozen and not self.own.diverged:
            offers = tuple(self._frozen.values())
            ready = msg.Ready(self.own.state.key, self.own.promise.term, offers, self.own.bytes_per_s)
            self.own.send(self.own.promise.coordinator, ready)

    def on_begin(self, sender: str, begin: msg.Begin, now: float) -> None:
        """Take part in an attempt, or refuse it. A *begin* that comes again gets the same answer again."""
        current = self.own.current
        if not self.own.same_key(begin.key):
            self._refuse(sender, self.own.heartbeat(), now)
        elif begin.ballot < self.own.promise:
            self._refuse(sender, msg.Nack(self.own.state.key, self.own.promise), now)
        elif current is not None and current.begin.ballot == begin.ballot:
            self.own.send(sender, current.done or current.failed or msg.Begun(begin.key, begin.ballot))
        elif reason := self._what_is_wrong(sender, begin):
            self.own.ban(sender, reason, now)
        elif refusal := self._refusal(begin):
            self.own.send(sender, refusal)
        elif begin.ballot[:2] != self.own.promise[:2] and not self.leading.may_promise(sender, now):
            self._refuse(sender, self.own.heartbeat(), now)  # to whom it would not have promised
        elif self._contradicts(sender, begin, now):
            self.count_misfit(sender, now)
        else:
            self._promise(begin.ballot, now)
            if sender != self.own.me:
                self.own.peers.view(sender, now).leading = True  # its heartbeat may be of before
            self.own.stop_attempt()
            self.own.current = CurrentAttempt(begin, sender, now)
            self.own.send(sender, msg.Begun(begin.key, begin.ballot))
            self._take_part(self.own.current)

    def _take_part(self, current: CurrentAttempt) -> None:
        begin = current.begin
        if begin.adopted:
            record = Record(begin.proposal, begin.adopted)
            if self.own.has_result(record.payload):
                self.hold(current, record)
            else:
                self.own.effects.append(msg.FetchResult(begin.holder, record))
        elif not begin.proposal.contributions:
            self.hold(current, Record(begin.proposal, EMPTY))
        else:
            current.reducing, self.own.tried = True, begin
            self.own.effects.append(msg.Reduce(begin))

    def _what_is_wrong(self, sender: str, begin: msg.Begin) -> str:
        proposal = begin.proposal
        if begin.ballot.coordinator != sender:
            return "it began somebody else's ballot"
        if not self.own.rules.marks_decide:
            return ""
        if proposal.key != begin.key or self.own.me not in begin.members:
            return "it began a ballot that cannot be right"
        if proposal.contributions and proposal.fragment != self.own.due:
            return f"it began fragment {proposal.fragment}, and {self.own.due} is due"
        if not begin.adopted and proposal.islands and proposal.present != begin.members:
            return "it began a ballot whose members are not its contributors"
        if proposal.hole is not None and not self.own.needs_quorum:
            return "it began a ballot with a hole, where no quorum decides"
        if max(len(begin.owners), len(proposal.hole.pages) if proposal.hole is not None else 0) > MAX_PIECES:
            return "it began a ballot with a hole of too many pieces"
        if len(begin.first) > MAX_FIRST or min((*begin.bytes_per_s, *(rate for _, rate in begin.first)), default=0) < 0:
            return "it began a ballot with spans that cannot be right"
        try:
            self.own.state.after(Record(proposal, EMPTY))
        except RecordInvalid as invalid:
            return f"it proposed what cannot follow: {invalid}"
        wrong = what_is_wrong(self.own.state, begin, self.own.options.decide, self.own.due)
        if not wrong and not begin.adopted:
            wrong = what_is_wrong_for(self.own.me, self.own.incarnation, self.own.state, begin)
        if not wrong and not begin.adopted and sender != self.own.me:
            offers = {part.island: part.offer for part in proposal.contributions}
            large = outsize(offers, self.own.norms.get(proposal.fragment, ()), self.own.me)
            wrong = f"a contribution of {large[0]} that is far larger than usual" if large else ""
        return f"it began a ballot with {wrong}" if wrong else ""

    def _contradicts(self, sender: str, begin: msg.Begin, now: float) -> bool:
        """Return whether this island knows better, for now: it hears a member that is said to be gone.

        Where a quorum decides only a goodbye makes the roster smaller at once. It may be on its way here.
        """
        own = self.own
        if not own.needs_quorum or not own.rules.roster_has_a_floor or sender == own.me or begin.adopted:
            return False
        gone = dropped_at_once(own.state, begin.proposal) & own.peers.views.keys()
        return any(own.peers.hears(peer, now) and not own.peers.views[peer].said_goodbye for peer in gone)

    def _refusal(self, begin: msg.Begin) -> msg.Failed | None:
        """Return why this island takes no part: it has not offered that, or could not follow the new settings.

        An adopted result may be decided already: an island that cannot follow that one ends with an error instead.
        """
        proposal, amendment = begin.proposal, begin.proposal.amendment
        if begin.adopted:
            return None
        offers = [part.offer for part in proposal.contributions if part.island == self.own.me]
        if any(self._frozen.get(offer.fragment) != offer for offer in offers):
            return msg.Failed(begin.key, begin.ballot, self.own.me, "that offer was of an earlier life")
        if amendment is not None and (reason := self.own.options.objection(self.own.state, amendment)):
            return msg.Failed(begin.key, begin.ballot, "", reason, amendment=True)
        return None

    def hold(self, current: CurrentAttempt, record: Record) -> None:
        """Store the result of an attempt and answer *done*, which is sent only when the result is durable."""
        begin = current.begin
        current.done = msg.Done(begin.key, begin.ballot, record.payload)
        self.own.held = msg.Held(begin.ballot, record)
        if self.own.rules.done_is_durable:
            self.own.remember()
        self.say_done(current.sender, current.done)

    def say_done(self, coordinator: str, done: msg.Done) -> None:
        """Send *done* once everything before is durable, to this island itself, too."""
        if coordinator == self.own.me and self.own.rules.only_durable_is_told:
            self.own.effects.append(msg.Send(coordinator, done))
        else:
            self.own.send(coordinator, done)

    def give_up(
        self, current: CurrentAttempt, blamed: str, reason: str, *, refused: bool = False, local: bool = False,
        kept: tuple[msg.Received, ...] = (),
    ) -> None:  # fmt: skip
        """Answer *failed* to the coordinator: the attempt did not succeed here, and `blamed` may be why."""
        current.reducing = False
        begin = current.begin
        current.failed = msg.Failed(begin.key, begin.ballot, blamed, reason, refused, local=local, kept=kept)
        self.own.send(current.sender, current.failed)

    def on_halt(self, sender: str, halt: msg.Halt) -> None:
        """Give the attempt up, and say what has been received; one that has ended is answered for again."""
        current = self.own.current
        if current is None or current.sender != sender or current.begin.ballot != halt.ballot:
            return
        if current.reducing:
            self.own.effects.append(msg.Cancel(halt.ballot))
        elif current.done is not None:
            self.say_done(sender, current.done)  # not before it is durable
        elif current.failed is not None:
            self.own.send(sender, current.failed)

    def on_commit(self, sender: str, commit: msg.Commit, now: float) -> None:
        """Append a committed record if its result is held here; otherwise catch up with its sender."""
        self._shows(sender, commit.head, now)
        if not self.own.same_key(commit.key):
            return  # its sender's heartbeat tells which branch it is on
        if self.own.held is not None and self.own.holds(commit.head.digest):
            told = self.own.current is not None and self.own.current.sender == sender
            self.append(self.own.held.record, now, commit.stored_by, commit.phases, told=told)
        elif (current := self.own.current) is not None and current.reducing and current.sender == sender:
            current.committed = current.committed or (sender, commit, now)
        else:
            self._meet(sender, commit.head, now, rank=self._rank_of(sender))

    def is_soon_there(self, now: float) -> bool:
        """Return whether this island's all-reduce is about to give it what was committed: to fetch it takes longer."""
        current = self.own.current
        if current is None or not current.reducing or current.committed is None:
            return False
        return now - current.committed[2] <= max(self.own.options.answer_s, self.own.exchange_s / 2)

    def end_of_committed(self, current: CurrentAttempt, record: Record | None, now: float) -> bool:
        """Append the result of an attempt that was committed before it was here; fetch it if it has failed here.

        Returns whether it was appended.
        """
        if current.committed is None:
            return False
        sender, commit, _ = current.committed
        if record is not None and self.own.state.head_after(record) == commit.head:
            self.own.held = msg.Held(current.begin.ballot, record)
            self.append(record, now, commit.stored_by, commit.phases, told=True)
            return True
        self._meet(sender, commit.head, now, rank=self._rank_of(sender))
        return False

    def append(
        self, record: Record, now: float, stored_by: tuple[str, ...] = (), phases: Phases = NO_PHASES, *,
        told: bool = False,
    ) -> None:  # fmt: skip
        """Move to the state after a committed record, and ask the driver to append it to the log.

        `told`: its coordinator has said, or is, whose *done* made it final.
        """
        try:
            state = self.own.state.after(record)
        except RecordInvalid:
            if self.own.rules.marks_decide:
                raise
            # only with that rule switched off: what would happen without it
            head, proposal = self.own.state.head_after(record), record.proposal
            state = replace(self.own.state, head=head, roster=proposal.roster, step=proposal.step)
        self.own.note_norms(record.proposal)
        if record.proposal.contributions:
            self.own.last_contributors = frozenset(record.proposal.present)
            self.own.updated_at.append(now)
        decided = self.own.state.is_decided(record.proposal.amendment, stored_by)
        if decided:  # whoever came back has found its roster: should that be lost now, it need not look for it first
            self.own.rejoin_until = min(self.own.rejoin_until, now)
        if told and not decided and self._is_fresh(record):
            self.own.held = None  # should a latch lead back to this parent, there is nothing to adopt
        self.own.effects.append(msg.Append(record, stored_by, phases))
        self._move(state, now, switched=False, followed_by={record.digest: decided})

    def _is_fresh(self, record: Record) -> bool:
        """Return whether a record was proposed in the attempt just ended: nobody can have decided it before.

        Where no quorum has decided it there, none ever will, and a latch may make it void.
        """
        own, current = self.own, self.own.current
        if not own.may_go_back or current is None or current.begin.adopted:
            return False
        return own.held == msg.Held(current.begin.ballot, record)

    def caught_up(
        self, state: RunState, now: float, *, whole: bool, followed_by: Mapping[str, bool] | None = None
    ) -> None:
        """Move to a state that was fetched, if its head is greater than this island's.

        With the whole state, the same head will do where this island's vectors are damaged. `followed_by` are the
        records that lead there from this head, where they were fetched: whether each had a quorum.
        """
        donor, self.own.catching_up = self.own.catching_up, None
        better = self.is_better(state, donor)
        if better or (self.own.diverged and whole and state.head >= self.own.state.head):
            if donor is not None:
                self.own.peers.view(donor, now).fetches_failed = 0
            self.own.diverged = self.own.diverged and not whole
            switched = state.head.round != self.own.state.head.round + 1
            self._move(state, now, switched=switched, followed_by=followed_by)
            self._believe(0 if donor is None else self._rank_of(donor))
        elif donor is not None and self.own.asked_for is not None and state.head < self.own.asked_for:
            self.catch_up_failed(donor, now)  # it claims more than it gives

    def seems_ahead(self, peer: str) -> bool:
        """Return whether a peer claims a head that is greater than this island's."""
        view = self.own.peers.views.get(peer)
        if view is None or view.head is None or view.head == self.own.state.head:
            return False
        return self.own.outranks(view.rank, view.head)

    def catch_up_failed(self, peer: str, now: float) -> None:
        """Fetch from this peer later, after a pause that doubles up to eight heartbeats.

        It still counts as alive: an island that is behind must not decide rounds of its own for that.
        """
        self.own.catching_up = None
        view = self.own.peers.view(peer, now)
        view.fetch_at = now + self.own.options.heartbeat_s * 2 ** min(view.fetches_failed, 3)
        view.fetches_failed += 1

    def is_better(self, state: RunState, donor: str | None) -> bool:
        """Return whether a state that a peer gives is of a greater branch than this island's."""
        view = self.own.peers.views.get(donor or "")
        said = view is not None and view.rank > 0
        rank = state.rank(latched=bool(state.latch) or self.own.options.partition == "quorum" or said)
        return state.head.digest != self.own.state.head.digest and self.own.outranks(rank, state.head)

    def _believe(self, rank: int) -> None:
        """Take over that this head is in the latched history, from one that has it and its records."""
        if rank and self.own.latch is not None and not self.own.is_latched:
            self.own.lineage = {self.own.latch.head.digest: True, self.own.state.head.digest: True}

    def _move(
        self, state: RunState, now: float, *, switched: bool, followed_by: Mapping[str, bool] | None = None
    ) -> None:
        """Move to another head, and forget everything about the round that followed the last one.

        `followed_by` are the records that lead there from the last head: whether each had a quorum. None: it was taken
        over, and what lies before it is judged by whoever gave it.
        """
        own = self.own
        own.amendments = {a.number: a for a in own.state.amendments} | own.amendments  # a new branch may lack them
        if state.amendments != own.state.amendments:
            own.options = own.options.amended(own.options, state)
            own.norms.clear()  # under other settings, others are usual
        own.stop_attempt()
        before = own.state.head.digest
        own.move_to(state, decided=bool(followed_by) and all(islice((followed_by or {}).values(), 1)))
        if followed_by is None:
            own.lineage = {state.head.digest: True}
        else:  # a latch may come that names one of them
            lineage = [*(own.lineage if before in own.lineage else {before: True}).items(), *followed_by.items()]
            own.lineage = dict(lineage[-LINEAGE:])
        own.term, own.ready_at, own.moved_at = None, None, now
        self._frozen.clear()
        own.state_digest, own.drops = "", 0
        if own.rules.marks_decide:
            self.pending = {f: offer for f, offer in self.pending.items() if state.fits(own.me, offer)}
        own.commit_at[(state.updates - 1) % own.options.fragments] = own.lead_at = now
        own.effects.append(msg.Moved(switched))
        own.remember()

    def on_stored(self, head: Head, now: float) -> None:
        """Take in that the log, or a snapshot, is durable up to a head; only then others are told of it."""
        own = self.own
        if head != own.state.head and head <= own.stored:
            return
        own.stored = head
        own.forget_vows()
        if head == own.state.head and self.liveness.are_few():
            self.liveness.beat(now)
