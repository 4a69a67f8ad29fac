"""An island as a member: it promises, takes part, holds a result, and appends what was committed."""

from collections import Counter
from dataclasses import replace

from diloco.elastic.protocol.beating import Beating
from diloco.elastic.protocol.messages import (
    Append,
    Begin,
    CatchUp,
    Collect,
    Done,
    Failed,
    FetchResult,
    Goodbye,
    Heartbeat,
    Held,
    Moved,
    Nack,
    Note,
    Ready,
    Reduce,
)
from diloco.elastic.protocol.record import EMPTY, NO_BALLOT, Ballot, Head, Key, Record
from diloco.elastic.protocol.seat import Following
from diloco.elastic.protocol.state import RunState
from diloco.errors import RecordInvalid

MAX_MISFITS = 100  # within silence_s: whoever is merely late, or resends, sends a few
MAX_TERMS_AHEAD = 1_000_000  # a term from nowhere would leave no number for the honest


class Member(Beating):
    def _on_heartbeat(self, sender: str, beat: Heartbeat, now: float) -> None:
        view = self.peers.view(sender, now)
        if view.head is not None and beat.incarnation == view.incarnation and beat.head < view.head:
            return  # very late: within a life, heads only grow
        view.head, view.promise, view.leading = beat.head, beat.promise, beat.leading
        view.incarnation, view.state_digest = beat.incarnation, beat.state_digest
        behind = beat.head < self.state.head
        view.behind_since = (now if view.behind_since is None else view.behind_since) if behind else None
        self._heed(sender, beat, now)
        self._meet(sender, beat.head, now)
        if beat.head == self.state.head:
            self._highest_term = max(self._highest_term, beat.promise.term)
            self._compare_states(now)
            if self.term is not None and beat.promise > self._own_ballot(self.term):
                self._drop_term(now)

    def _meet(self, sender: str, head: Head, now: float) -> None:
        """Another head than ours: the one who is behind catches up. So does one whose vectors are damaged."""
        wanted = head > self.state.head or (self.doubtful and head == self.state.head)
        if not wanted or self._catching_up is not None or now < self.peers.view(sender, now).fetch_at:
            return
        if self.held is not None and self.held.record.digest == head.digest:
            self._append(self.held.record, now)  # whoever has this head knows that it was committed
            return
        self._catching_up = sender
        self._out.append(CatchUp(sender, head))

    def _compare_states(self, now: float) -> None:
        """Same chain, other bits: whoever is alone with its vectors has damaged ones."""
        if self.doubtful or not self.state_digest:
            return
        said = {peer: view.state_digest for peer, view in self.peers.views.items() if view.head == self.state.head}
        digest, count = Counter(filter(None, said.values())).most_common(1)[0] if any(said.values()) else ("", 0)
        roster = self.state.roster
        second_of_two = len(roster) == 2 and roster[1] == self.me  # of two, the first is believed
        if digest in ("", self.state_digest) or (2 * count <= self._voters() and not second_of_two):
            return
        self.doubtful = True
        self._note("diverged", self.me, "its vectors differ from the others': it fetches theirs")
        peer = min(peer for peer in said if said[peer] == digest)
        self._catching_up = peer
        self._out.append(CatchUp(peer, self.state.head))

    def _on_collect(self, sender: str, collect: Collect, now: float) -> None:
        self._meet(sender, collect.head, now)
        if not self._same_key(Key(collect.head.round + 1, collect.head.digest)):
            self._count_misfit(sender, now)
            self._say(sender, self.heartbeat())
            return
        if collect.term > self._highest_term + MAX_TERMS_AHEAD:
            self._ban(sender, f"asks for term {collect.term}", now)
            return
        ballot = Ballot(collect.term, sender, 0)
        if ballot < self.promise and (collect.term, sender) != self.promise[:2]:
            self._say(sender, Nack(self.state.key, self.promise))
            return
        self._promise(max(ballot, self.promise), now)
        self._say(sender, self.own_promise(collect.term))
        self._say_ready()

    def _count_misfit(self, sender: str, now: float) -> None:
        """One late message is nobody's fault; a stream of them is."""
        view = self.peers.view(sender, now)
        if now - view.misfits_since > self.options.silence_s:
            view.misfits, view.misfits_since = 0, now
        view.misfits += 1
        if view.misfits > MAX_MISFITS:
            self._ban(sender, "keeps sending ballots and answers of other rounds", now)

    def _promise(self, ballot: Ballot, now: float) -> None:
        """Nothing below it is finished or served from here on."""
        if ballot == self.promise:
            return
        self.promise = ballot
        self._highest_term = max(self._highest_term, ballot.term)
        self._remember()
        if self.following is not None and self.following.begin.ballot < ballot:
            self._stop_following()
        if self.term is not None and self._own_ballot(self.term)[:2] < ballot[:2]:
            self._drop_term(now)

    def _say_ready(self) -> None:
        """To whomever this island has promised."""
        for fragment, offer in self.pending.items():
            if self.state.fits(self.me, offer) or not self.rules.marks_decide:
                self.frozen.setdefault(fragment, offer)
        if self.promise.coordinator and self.frozen and not self.doubtful:
            offers = tuple(self.frozen.values())
            ready = Ready(self.state.key, self.promise.term, offers, self.bytes_per_s)
            self._say(self.promise.coordinator, ready)

    def _on_begin(self, sender: str, begin: Begin, now: float) -> None:
        if not self._same_key(begin.key):
            self._count_misfit(sender, now)
            self._say(sender, self.heartbeat())
            return
        if begin.ballot < self.promise:
            self._count_misfit(sender, now)
            self._say(sender, Nack(self.state.key, self.promise))
            return
        following = self.following
        if following is not None and following.begin.ballot == begin.ballot:
            if following.record is not None:
                self._say(sender, Done(begin.key, begin.ballot, following.record.payload))
            elif following.failed is not None:
                self._say(sender, following.failed)
            return
        if reason := self._what_is_wrong(sender, begin):
            self._ban(sender, reason, now)
            return
        if not begin.adopted and not self._stands_by(begin):
            self._say(sender, Failed(begin.key, begin.ballot, self.me, "that offer was of an earlier life"))
            return
        if reason := self._objection(begin):
            self._say(sender, Failed(begin.key, begin.ballot, "", reason, amendment=True))
            return
        self._promise(begin.ballot, now)
        self._stop_following()
        self.following = Following(begin, sender, reducing=False)
        self._take_part(self.following)

    def _take_part(self, following: Following) -> None:
        begin = following.begin
        if begin.adopted:
            record = Record(begin.proposal, begin.adopted)
            if self.held is not None and self.held.record.digest == record.digest:
                self._hold(following, record)
            else:
                self._out.append(FetchResult(begin.holder, record))
        elif not begin.proposal.contributions:
            self._hold(following, Record(begin.proposal, EMPTY))
        else:
            following.reducing = True
            self._out.append(Reduce(begin))

    def _what_is_wrong(self, sender: str, begin: Begin) -> str:
        if begin.ballot.coordinator != sender:
            return "it began somebody else's ballot"
        if not (self.rules.marks_decide and self.rules.key_names_the_parent):
            return ""
        if begin.proposal.key != begin.key or self.me not in begin.members:
            return "it began a ballot that cannot be right"
        if begin.proposal.contributions and begin.proposal.fragment != self.due:
            return f"it began fragment {begin.proposal.fragment}, and {self.due} is due"
        if not begin.adopted and begin.proposal.islands and begin.proposal.islands != begin.members:
            return "it began a ballot whose members are not its contributors"
        try:
            self.state.after(Record(begin.proposal, EMPTY))
        except RecordInvalid as invalid:
            return f"it proposed what cannot follow: {invalid}"
        return ""

    def _stands_by(self, begin: Begin) -> bool:
        """What it says of this island is what this island has offered for this round."""
        own = [contribution.offer for contribution in begin.proposal.contributions if contribution.island == self.me]
        return all(self.frozen.get(offer.fragment) == offer for offer in own)

    def _objection(self, begin: Begin) -> str:
        """What is adopted may be decided already: who cannot follow that ends with an error instead."""
        amendment = begin.proposal.amendment
        return "" if amendment is None or begin.adopted else self.options.objection(self.state, amendment)

    def _hold(self, following: Following, record: Record) -> None:
        following.record = record
        self.held = Held(following.begin.ballot, record)
        if self.rules.done_is_durable:
            self._remember()
        self._say(following.sender, Done(following.begin.key, following.begin.ballot, record.payload))

    def _give_up(self, following: Following, blamed: str, reason: str, *, refused: bool = False) -> None:
        following.reducing = False
        following.failed = Failed(following.begin.key, following.begin.ballot, blamed, reason, refused)
        self._say(following.sender, following.failed)

    def _on_commit(self, sender: str, record: Record, now: float) -> None:
        if not self._same_key(record.proposal.key):
            return  # its sender's heartbeat tells which branch it is on
        if self.held is not None and self.held.record.digest == record.digest:
            self._append(self.held.record, now)
        elif self._catching_up is None:
            head = Head(self.state.head.tokens + record.proposal.tokens, record.proposal.key.round, record.digest)
            self._catching_up = sender
            self._out.append(CatchUp(sender, head))

    def _append(self, record: Record, now: float) -> None:
        try:
            state = self.state.after(record)
        except RecordInvalid:
            if self.rules.marks_decide and self.rules.key_names_the_parent:
                raise
            state = _unchecked(self.state, record)
        self._out.append(Append(record))
        self._new_head(state, now, switched=False)

    def _new_head(self, state: RunState, now: float, *, switched: bool) -> None:
        self.amendments = {a.number: a for a in self.state.amendments} | self.amendments  # a new branch may lack them
        if state.amendments != self.state.amendments:
            self.options = self.options.amended(self.options, state)
        self.state = state
        self._stop_following()
        self.promise, self.held, self.term = NO_BALLOT, None, None
        self.frozen.clear()
        self.state_digest, self._drops = "", 0
        if self.rules.marks_decide:
            self.pending = {f: offer for f, offer in self.pending.items() if self.state.fits(self.me, offer)}
        self._commit_at[(self.state.updates - 1) % self.options.fragments] = self._lead_at = now
        self.peers.expected.clear()  # it goes on: who is not there by now is missed like anybody
        self._out.append(Moved(switched))
        self._remember()

    def _on_goodbye(self, sender: str, goodbye: Goodbye, now: float) -> None:
        view = self.peers.view(sender, now)
        view.closed = view.left = True
        self._out.append(Note("left", sender, goodbye.reason[:200]))


def _unchecked(state: RunState, record: Record) -> RunState:
    """Only with rules switched off: what would happen without them."""
    head = Head(state.head.tokens + record.proposal.tokens, record.proposal.key.round, record.digest)
    return replace(state, head=head, roster=record.proposal.roster, step=record.proposal.step)
