"""Proposals: when a coordinator that has everybody's promise begins a round, and with whom.

First come pure functions over offers, the state, and who is alive; then the `Proposer`, which uses them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import permutations
from statistics import median, median_low
from types import MappingProxyType
from typing import NamedTuple

from diloco.elastic.protocol.holding import Holding
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.messages import Begin, Failed, Promise
from diloco.elastic.protocol.options import Decide
from diloco.elastic.protocol.pacing import Pacing
from diloco.elastic.protocol.protocol_state import ProtocolState, Term
from diloco.elastic.protocol.ranges import size
from diloco.elastic.protocol.record import Amendment, Contribution, Grant, Offer, Proposal, Record, holder_name
from diloco.elastic.protocol.state import RunState
from diloco.errors import RecordInvalid

ABSENT_RECORDS = 3  # in a row without an answer: then a member leaves the roster
WEIGHT_CAP = 2  # times the round's median
OUTSIZE = 100  # times the median norm of a round's offers: refused
GREEDY = 100  # times the median of what islands want to hold: the rest of the data is for others
MANY_LACK_SAMPLES = 8  # of many islands, the part that must lack samples before a record of its own leases them some
MAX_ROUNDS_APART = 8  # two islands that could not reach each other are kept apart for 2, then 4, then 8 rounds
LONG_WAIT = 2  # times the usual deadline, where nobody who trains is ready: late progress goes on without
STRAGGLER_EXCHANGES = 0.1  # of one, that stragglers get besides: who misses it must fetch what it gives


def deadline(commit_at: float, ready_at: Iterable[float], live: int, straggler: float) -> float | None:
    """Return when to begin without the rest: after `straggler` times what half of the live members have needed.

    None until half of them are ready.
    """
    times, half = sorted(ready_at), -(-live // 2)
    if len(times) < half or not times:
        return None
    return commit_at + straggler * max(0.0, times[half - 1] - commit_at)


def weigh(offers: dict[str, Offer]) -> dict[str, int]:
    """Return each offer's weight in the mean: its tokens, but at least 1 and at most twice the round's median."""
    cap = WEIGHT_CAP * median([offer.tokens for offer in offers.values()])
    return {peer: max(1, min(offer.tokens, int(cap))) for peer, offer in offers.items()}


def outsize(offers: dict[str, Offer], last: Collection[float] = (), me: str = "") -> list[str]:
    """Return the peers whose progress is far larger than the others' (100 times the median norm).

    One that has diverged would take the rest along. One or two are compared with `last`, the norms of the last rounds,
    unless this island's own progress is as large by now: then these say nothing any more.
    """
    usual = median([offer.norm for offer in offers.values()] if len(offers) > 2 else last or [0.0])
    found = [peer for peer, offer in sorted(offers.items()) if usual and offer.norm > OUTSIZE * usual]
    return [] if me in found and len(offers) <= 2 else found


def fair(wants: dict[str, int]) -> dict[str, int]:
    """Return the samples that each may hold: what it wants, but not far more than the others want."""
    wants = {peer: want for peer, want in wants.items() if want > 0}
    most = GREEDY * median_low(wants.values()) if wants else 0
    return {peer: min(want, most) for peer, want in wants.items()}


def together(
    pairs: Iterable[frozenset[str]],
    members: Iterable[str],
    turn: int,
    accused: Mapping[frozenset[str], str] = MappingProxyType({}),
) -> list[str]:
    """Return many members that can all reach each other; `pairs` are those that cannot.

    The member whose turn it is comes first, so that nobody is left out for ever. But one that is apart from all others
    comes last, and so does one that refuses more than half of their contributions, or of which they refuse it: nobody
    is alone in a round because it accused all others. Of two, the one that accuses comes last.
    """
    order, kept = sorted(members), dict[str, None]()
    turn %= max(1, len(order))
    inside = (pair for pair in pairs if pair <= set(order))
    apart = [(one, other, accused.get(pair, "")) for pair in inside for one, other in permutations(pair)]
    others = {peer: {other for one, other, _ in apart if one == peer} for peer in order}
    refused = {peer: {other for one, other, accuser in apart if one == peer and accuser} for peer in order}

    def comes_last(peer: str) -> tuple[bool, bool]:
        last = len(others[peer]) >= len(order) - 1 or 2 * len(refused[peer]) >= len(order)
        return last, last and peer in accused.values()

    for peer in sorted(order[turn:] + order[:turn], key=comes_last):
        if not kept.keys() & others[peer]:
            kept[peer] = None
    return list(kept)


def propose(
    state: RunState, fragment: int, offers: dict[str, Offer], alive: dict[str, int], wants: dict[str, int],
    decide: Decide, amendment: Amendment | None = None, *, roster: tuple[str, ...] | None = None,
    witnesses: Collection[str] | None = None,
) -> Proposal:  # fmt: skip
    """Make a fresh proposal: contributions, the next roster, leases of samples, and the round's settings.

    `alive` has the incarnation of all who live, `wants` the samples each would like to hold. Of the roster stay those
    in `roster`, by default those who live. `witnesses` are those who stay or come in as such.
    """
    witnesses = set(state.witnesses if witnesses is None else witnesses)
    evicted = state.evicted | (frozenset() if amendment is None else amendment.evicts)
    alive = {peer: incarnation for peer, incarnation in alive.items() if peer not in evicted}
    stay = [peer for peer in state.roster if peer in alive] if roster is None else list(roster)
    order = [*stay, *sorted((set(offers) | witnesses) - set(state.roster))]
    order = [peer for peer in order if peer not in evicted]
    weights = weigh(offers) if offers else {}
    contributions = tuple(Contribution(peer, offers[peer], weights[peer]) for peer in order if peer in offers)
    settings, step = decide(state, fragment, contributions)
    holders = {holder_name(peer, incarnation) for peer, incarnation in alive.items()}
    releases = tuple(holder for holder, _ in state.ledger.leases if holder not in holders)
    wanted = {holder_name(peer, alive[peer]): wants[peer] for peer in sorted(wants) if peer in alive}
    return Proposal(
        state.key, fragment if offers else -1, contributions, tuple(order), releases,
        _grants(state.settled(contributions, releases), wanted), settings, step, amendment,
        witnesses=tuple(peer for peer in order if peer in witnesses),
    )  # fmt: skip


def forced(state: RunState, record: Record, amendment: Amendment) -> Record:
    """Return a result that was held as the record which forces the roster: its contributions and bytes stay."""
    kept, proposal = state.kept(amendment), record.proposal
    witnesses = tuple(peer for peer in proposal.witnesses if peer in kept)
    return Record(replace(proposal, amendment=amendment, roster=kept, witnesses=witnesses), record.payload)


def without_the_absent(
    state: RunState, answered: Collection[str], gone: Collection[str], min_voters: int
) -> tuple[str, ...]:
    """Return who stays in the roster where a quorum decides.

    Whoever said goodbye leaves. One that gave no answer in three terms in a row does, too, but silence alone never
    makes the roster smaller than `min_voters`: the last one left would be the whole run.
    """
    stay = [peer for peer in state.roster if peer not in gone]
    counts = dict(state.absent)
    silent = [peer for peer in reversed(stay) if peer not in answered and counts.get(peer, 0) + 1 >= ABSENT_RECORDS]
    out = set(silent[: max(0, len(stay) - min_voters)])
    return tuple(peer for peer in stay if peer not in out)


def _grants(ledger: Ledger, wanted: dict[str, int]) -> tuple[Grant, ...]:
    """Fill every holder's lease up to what it wants."""
    before, grants = ledger, []
    for holder, want in wanted.items():
        lack = want - size(before.lease_of(holder))
        if lack > 0:
            ledger, samples = ledger.grant(holder, lack)
            grants += [Grant(holder, samples)] if samples else []
    return tuple(grants)


def culprits(failures: list[tuple[str, Failed]]) -> tuple[str, str] | None:
    """Return the pair that could not reach each other: two that accuse each other, or else the first reported.

    None if nobody blames another member.
    """
    accused = [(reporter, failed.blamed) for reporter, failed in failures if failed.blamed not in ("", reporter)]
    for reporter, blamed in sorted(accused):
        if (blamed, reporter) in accused:
            return reporter, blamed
    return accused[0] if accused else None


class Separation(NamedTuple):
    """Keep two islands that could not reach each other out of one ballot, until a round."""

    until: int  # round
    rounds: int
    accuser: str = ""  # that refuses what the other one contributes


class Proposer:
    """Decide when this coordinator begins an attempt, with which offers, and what it proposes."""

    def __init__(self, own: ProtocolState, liveness: Liveness) -> None:
        self.own, self.liveness = own, liveness
        self._objections: set[tuple[str, int, str]] = set()  # islands, in this life of theirs, to amendments
        self._separations: dict[frozenset[str], Separation] = {}
        self.holding, self.pacing = Holding(own), Pacing(own)

    def next_attempt(self, term: Term, now: float) -> Begin | None:
        """Return the attempt to begin now, or None if it is not time for one."""
        own, fragment, promised = self.own, self.own.due, self._welcome(term.promised())
        offered = term.offers(fragment).items()
        able = {peer for peer, promise in promised.items() if not promise.witness} - term.unheard
        ready = {peer: offer for peer, offer in offered if peer in able}
        rates = {peer: term.ready[peer].bytes_per_s for peer in ready}
        offers = self._without_separated_pairs(self.pacing.in_turn(ready, rates, self.holding.usual_s))
        for peer in outsize(offers, own.norms.get(fragment, ()), own.me):
            own.ban(peer, f"its contribution is more than {OUTSIZE} times as large as the others'", now)
            del offers[peer]
        if (amendment := self._amendment(promised)) is not None:
            offers = {}  # whoever has promised says whether it can follow, not only who contributes
        else:
            waits = not self._is_time(term, offers, ready, now) or self.holding.holds(
                ready.keys() | self.pacing.out_of_turn(), now
            )
            if (waits or self._separated(offers)) and self._does_anybody_lack_samples(promised, now):
                offers = {}  # there are more to choose from when these have trained
            elif waits:
                return None
        views = own.peers.views.items()
        alive = {peer: view.incarnation for peer, view in views if self.liveness.is_alive(peer, now)}
        alive |= {peer: promise.incarnation for peer, promise in promised.items()}
        wants = fair({peer: promise.want for peer, promise in promised.items() if not promise.witness})
        self.note_lost(set(own.state.roster) - alive.keys())
        witnesses, kept = self._witnesses(promised), own.state.kept(amendment)
        answered = (term.answers.keys() | term.elsewhere.keys()) & own.state.places.keys()
        roster = self._roster(answered) if own.needs_quorum and own.rules.roster_has_a_floor else None
        if kept:
            roster, witnesses = kept, witnesses & set(kept)
        proposal = propose(
            own.state, fragment, offers, alive, wants, own.options.decide, amendment, roster=roster, witnesses=witnesses
        )
        in_order = tuple(peer for peer in own.state.roster if peer in answered)
        latch = None if own.state.latch else own.latch
        new = [peer for peer in proposal.roster if own.state.admitted and peer not in own.state.invites]
        admissions = tuple((peer, promised[peer].admission) for peer in new)
        proposal = replace(proposal, answered=in_order, latch=latch, admissions=admissions)
        members = proposal.islands or tuple(sorted(promised))
        of_links = tuple(rates[peer] for peer in members) if offers else ()
        return Begin(own.state.key, term.ballot, proposal, members, of_links, first=self._first() if offers else ())

    def _welcome(self, promised: dict[str, Promise]) -> dict[str, Promise]:
        """Return the promises without those of newcomers that one invite cannot all let in."""
        state, welcome = self.own.state, dict[str, Promise]()
        if not state.admitted:
            return promised
        for peer, promise in sorted(promised.items()):
            try:
                state = state.with_member(peer, promise.admission, witness=promise.witness)
            except RecordInvalid:
                continue
            welcome[peer] = promise
        return welcome

    def _first(self) -> tuple[tuple[str, int], ...]:
        """Return who took part in the first attempt at this round: its members may have kept pages, by its spans."""
        tried = self.own.tried
        if tried is None or tried.key != self.own.state.key or len(tried.members) != len(tried.bytes_per_s):
            return ()
        return tried.first or tuple(zip(tried.members, tried.bytes_per_s, strict=True))

    def _roster(self, answered: Collection[str]) -> tuple[str, ...]:
        """Return who of the roster stays, where a quorum decides."""
        own = self.own
        gone = {peer for peer, view in own.peers.views.items() if view.said_goodbye}
        return without_the_absent(own.state, answered, gone, own.options.min_voters)

    def _witnesses(self, promised: dict[str, Promise]) -> set[str]:
        """Return who is a witness: of those who have promised, who says so; of others, who was one."""
        before = set(self.own.state.witnesses) - promised.keys()
        return before | {peer for peer, promise in promised.items() if promise.witness}

    def force(self, promised: dict[str, Promise]) -> Amendment | None:
        """Return the amendment by which the owner forces the roster of this round, if a member brings one."""
        brought = (promise.amendment for promise in promised.values())
        return next((amendment for amendment in brought if self.own.state.kept(amendment)), None)

    def has_quorum(self, members: dict[str, Promise], now: float) -> bool:
        """Return whether these members may decide: with `merge` any may, but for those who have just come back."""
        if self.own.needs_quorum:
            return self.own.state.is_decided(self.force(members), members)
        there = self.own.state.places.keys() & set(members)
        return now >= self.own.rejoin_until or 2 * len(there) > len(self.own.state.roster)

    def _are_enough(self, members: Collection[str]) -> bool:
        return len(members) >= max(1, self.own.options.min_islands)

    def _is_time(self, term: Term, offers: dict[str, Offer], ready: Collection[str], now: float) -> bool:
        own, promised = self.own, term.promised()
        founding = own.options.start_islands > 1 and not own.state.updates
        if not self._are_enough(offers) or (founding and self._waits_to_start(offers, now)):
            return False
        able = {peer for peer, promise in promised.items() if not promise.witness} - term.unheard
        members = sorted(able) if founding else (peer for peer in own.state.roster if peer in able)
        # at the end of the data, one that holds none is not waited for
        live = [peer for peer in members if not self._lacks_samples(peer, promised[peer])]
        live = [peer for peer in live if not self.pacing.is_out_of_turn(peer)]
        if all(peer in offers or peer in ready for peer in live):
            return True
        # those with late progress were ready at once
        training = [peer for peer in live if peer not in offers or not offers[peer].late]
        ready_at = [term.ready_at[peer] for peer in training if peer in term.ready_at]
        due = deadline(own.commit_at[own.due], ready_at, len(training), own.options.straggler)
        if due is None and (usual_s := self.holding.usual_s or own.seen_round_s):  # who trains may never be ready
            due = max(own.commit_at) + LONG_WAIT * own.options.straggler * usual_s
        return due is not None and now >= due + STRAGGLER_EXCHANGES * own.exchange_s

    def _waits_to_start(self, offers: Collection[str], now: float) -> bool:
        """Return whether the run's first update waits: for all who are to begin, then, as long again, for most of those
        who are here. Others may have answered one that this island cannot reach, and nobody is to begin alone."""
        own = self.own
        if now < own.start_until:
            return len(offers) < own.options.start_islands
        views = own.peers.views
        here = [peer for peer in self.liveness.alive(now) if peer in views and views[peer].head == own.state.head]
        return now < own.start_until + own.options.start_s and 2 * len(offers) <= len(set(here) | {own.me})

    def _lacks_samples(self, peer: str, promise: Promise) -> bool:
        holder = holder_name(peer, promise.incarnation)
        return bool(promise.want) and not size(self.own.state.ledger.lease_of(holder))

    def _does_anybody_lack_samples(self, promised: dict[str, Promise], now: float) -> bool:
        """Return whether a member cannot begin to train for lack of samples, or a witness has just come.

        It is given some now, not at the next sync point.
        """
        if any(promise.witness and peer not in self.own.state.places for peer, promise in promised.items()):
            return self.has_quorum(promised, now)
        ledger = self.own.state.ledger
        if ledger.limit is not None and ledger.next >= ledger.limit and not (ledger.free or ledger.lost):
            return False
        starving = sum(self._lacks_samples(*each) for each in promised.items())
        many = len(promised) // MANY_LACK_SAMPLES if not self.liveness.are_few() else 0  # one waits for the next round
        return starving > many and self.has_quorum(promised, now)

    def _amendment(self, promised: dict[str, Promise]) -> Amendment | None:
        """Return the owner's next change of settings, if a member brings one and all can follow it.

        At the end of the clock only one that prolongs the run: others have seen it end.
        """
        brought = {promise.amendment for promise in promised.values() if promise.amendment is not None}
        key = self.own.state.key
        for amendment in sorted(brought, key=lambda each: (not each.kept(key), each.signature)):
            if self._is_followed(amendment, promised) and (not self.own.is_over or self.own.prolongs(amendment)):
                return amendment
        return None

    def _is_followed(self, amendment: Amendment, promised: dict[str, Promise]) -> bool:
        """Return whether no member objects to a change: it waits rather than end an island.

        An island that comes back is asked again.
        """
        lives = ((peer, promise.incarnation) for peer, promise in promised.items())
        if any((*life, amendment.signature) in self._objections for life in lives):
            return False
        if reason := self.own.options.objection(self.own.state, amendment):
            self.add_objection(promised, self.own.me, amendment, reason)
        return not reason

    def add_objection(self, promised: dict[str, Promise], peer: str, amendment: Amendment, reason: str) -> None:
        """Note that a peer's present incarnation cannot follow a change of settings, and report why, once."""
        if peer not in promised:
            return
        objection = peer, promised[peer].incarnation, amendment.signature
        if objection not in self._objections:
            self._objections.add(objection)
            self.own.note("refused", peer, f"the change waits: {reason}")

    def _without_separated_pairs(self, offers: dict[str, Offer]) -> dict[str, Offer]:
        """Return the offers of members that can all reach each other and are enough.

        If there are none, the separations that are oldest are forgotten: those pairs may be well by now.
        """
        turn, pairs = self.own.state.head.round, self._separated(offers)
        if not self.own.rules.leave_out_stuck_pairs:
            return offers
        recent = (pairs[forgotten:] for forgotten in range(len(pairs)))
        accused = {pair: accuser for pair in pairs if (accuser := self._separations[pair].accuser)}
        choices = (together(apart, offers, turn + shift, accused) for apart in recent for shift in range(len(offers)))
        chosen = next((choice for choice in choices if self._are_enough(choice)), offers)
        return {peer: offer for peer, offer in offers.items() if peer in chosen}

    def _separated(self, offers: dict[str, Offer]) -> list[frozenset[str]]:
        """Return the pairs of these members that could not reach each other, oldest first."""
        turn = self.own.state.head.round
        return [pair for pair, apart in self._separations.items() if turn < apart.until and pair <= offers.keys()]

    def separate(self, one: str, other: str, *, refused: str = "") -> None:
        """Keep two islands that cannot reach each other apart for 2 rounds, the next time for 4, then for 8.

        `refused` is why the first will not take what the other one contributes: which of them is right is not known.
        """
        if refused:
            self.own.note("refused", other, f"{one} refuses its contribution: {refused}")
        else:
            self.own.note("cut off", one, f"{one} and {other} cannot reach each other")
        pair = frozenset((one, other))
        before = self._separations.pop(pair, None)  # the newest comes last
        rounds = min(2 * before.rounds, MAX_ROUNDS_APART) if before is not None else 2
        self._separations[pair] = Separation(self.own.state.head.round + rounds, rounds, one if refused else "")

    def reunite(self, islands: set[str]) -> None:
        """Forget the separations among islands that have just been in one round."""
        self._separations = {pair: apart for pair, apart in self._separations.items() if not pair <= islands}

    def note_lost(self, peers: Iterable[str]) -> None:
        """Report that peers are gone, each once, and not those that said goodbye."""
        for peer in sorted(peers):
            view = self.own.peers.views.get(peer)  # None: a member of a roster that came from others, never heard of
            if view is not None and not view.left:
                view.left = True
                self.own.note("lost", peer, f"round {self.own.state.key.round} goes on without it")
