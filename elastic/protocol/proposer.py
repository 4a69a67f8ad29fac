"""Proposals: when a coordinator that has everybody's promise begins a round, and with whom.

First come pure functions over offers, the state, and who is alive; then the `Proposer`, which uses them.
"""

from collections.abc import Collection, Iterable
from statistics import median
from typing import NamedTuple

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.messages import Begin, Failed, Promise
from diloco.elastic.protocol.options import Decide
from diloco.elastic.protocol.protocol_state import ProtocolState, Term
from diloco.elastic.protocol.ranges import size
from diloco.elastic.protocol.record import Amendment, Contribution, Grant, Offer, Proposal, holder_name
from diloco.elastic.protocol.state import RunState

WEIGHT_CAP = 2  # times the round's median
OUTSIZE = 100  # times the median norm of a round's offers: refused
MAX_ROUNDS_APART = 8  # two islands that could not reach each other are kept apart for 2, then 4, then 8 rounds


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


def outsize(offers: dict[str, Offer]) -> list[str]:
    """Return the peers whose progress is far larger than the others' (100 times the median norm).

    One that has diverged would take the rest along. Nobody is outsize among one or two.
    """
    usual = median([offer.norm for offer in offers.values()]) if len(offers) > 2 else 0.0
    return [peer for peer, offer in sorted(offers.items()) if usual and offer.norm > OUTSIZE * usual]


def together(pairs: Iterable[frozenset[str]], members: Iterable[str], turn: int) -> list[str]:
    """Return many members that can all reach each other; `pairs` are those that cannot.

    The member whose turn it is comes first, so that nobody is left out for ever.
    """
    order, kept = sorted(members), dict[str, None]()
    apart = [tuple(pair) for pair in pairs]
    for index in range(len(order)):
        peer = order[(turn + index) % len(order)]
        if not any(peer in pair and kept.keys() & pair for pair in apart):
            kept[peer] = None
    return list(kept)


def propose(
    state: RunState, fragment: int, offers: dict[str, Offer], alive: dict[str, int], wants: dict[str, int],
    decide: Decide, amendment: Amendment | None = None,
) -> Proposal:  # fmt: skip
    """Make a fresh proposal: contributions, the next roster, leases of samples, and the round's settings.

    `alive` has the incarnation of all who stay, `wants` the samples each would like to hold.
    """
    order = [peer for peer in state.roster if peer in alive] + sorted(set(offers) - set(state.roster))
    weights = weigh(offers) if offers else {}
    contributions = tuple(Contribution(peer, offers[peer], weights[peer]) for peer in order if peer in offers)
    settings, step = decide(state, fragment, contributions)
    holders = {holder_name(peer, incarnation) for peer, incarnation in alive.items()}
    releases = tuple(holder for holder, _ in state.ledger.leases if holder not in holders)
    wanted = {holder_name(peer, alive[peer]): wants[peer] for peer in sorted(wants)}
    return Proposal(
        state.key, fragment if offers else -1, contributions, tuple(order), releases,
        _grants(state.settled(contributions, releases), wanted), settings, step, amendment,
    )  # fmt: skip


def _grants(ledger: Ledger, wanted: dict[str, int]) -> tuple[Grant, ...]:
    """Fill every holder's lease up to what it wants."""
    before, grants = ledger, []
    for holder, want in wanted.items():
        lack = want - size(before.lease_of(holder))
        if lack > 0:
            ledger, samples = ledger.grant(holder, lack)
            grants += [Grant(holder, samples)] if samples else []
    return tuple(grants)


def quorum(roster: tuple[str, ...], present: Iterable[str]) -> bool:
    """Return whether a majority of the roster is present, or exactly half of it with its first member."""
    there = set(present) & set(roster)
    return 2 * len(there) > len(roster) or (2 * len(there) == len(roster) and roster[0] in there)


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


class Proposer:
    """Decide when this coordinator begins an attempt, with which offers, and what it proposes."""

    def __init__(self, own: ProtocolState, liveness: Liveness) -> None:
        self.own, self.liveness = own, liveness
        self._objections: set[tuple[str, int, str]] = set()  # islands, in this life of theirs, to amendments
        self._separations: dict[frozenset[str], Separation] = {}

    def next_attempt(self, term: Term, now: float) -> Begin | None:
        """Return the attempt to begin now, or None if it is not time for one."""
        own, fragment, promised = self.own, self.own.due, term.promised()
        ready = {peer: offer for peer, offer in term.offers(fragment).items() if peer in promised}
        offers = self._without_stuck_pairs(ready)
        for peer in outsize(offers):
            own.ban(peer, f"its contribution is more than {OUTSIZE} times as large as the others'", now)
            del offers[peer]
        if (amendment := self._amendment(promised)) is not None:
            offers = {}  # whoever has promised says whether it can follow, not only who contributes
        elif not self._is_time(term, offers, ready, now):
            if not self._is_anybody_starving(promised):
                return None
            offers = {}
        views = own.peers.views.items()
        alive = {peer: view.incarnation for peer, view in views if self.liveness.is_alive(peer, now)}
        alive |= {peer: promise.incarnation for peer, promise in promised.items()}
        wants = {peer: promise.want for peer, promise in promised.items() if promise.want}
        self.note_lost(set(own.state.roster) - alive.keys())
        proposal = propose(own.state, fragment, offers, alive, wants, own.options.decide, amendment)
        members = proposal.islands or tuple(sorted(promised))
        rates = tuple(term.ready[peer].bytes_per_s for peer in members) if offers else ()
        return Begin(own.state.key, term.ballot, proposal, members, rates)

    def has_quorum(self, members: Iterable[str]) -> bool:
        """Return whether these members may decide; with `partition: merge` any may."""
        return self.own.options.partition != "pause" or quorum(self.own.state.roster, members)

    def _are_enough(self, members: Collection[str]) -> bool:
        return self.has_quorum(members) and len(members) >= max(1, self.own.options.min_islands)

    def _is_time(self, term: Term, offers: dict[str, Offer], ready: Collection[str], now: float) -> bool:
        own, promised = self.own, term.promised()
        if not self._are_enough(offers):
            return False
        live = [
            peer for peer in own.state.roster if peer in promised and not self._is_starving(peer, promised[peer])
        ]  # at the end of the data, one that holds none is not waited for
        if all(peer in offers or peer in ready for peer in live):
            return True
        # those with late progress were ready at once
        training = [peer for peer in live if peer not in offers or not offers[peer].late]
        ready_at = [term.ready_at[peer] for peer in training if peer in term.ready_at]
        due = deadline(own.commit_at[own.due], ready_at, len(training), own.options.straggler)
        return due is not None and now >= due

    def _is_starving(self, peer: str, promise: Promise) -> bool:
        holder = holder_name(peer, promise.incarnation)
        return bool(promise.want) and not size(self.own.state.ledger.lease_of(holder))

    def _is_anybody_starving(self, promised: dict[str, Promise]) -> bool:
        """Return whether a member cannot begin to train for lack of samples.

        It is given some now, not at the next sync point.
        """
        ledger = self.own.state.ledger
        if ledger.limit is not None and ledger.next >= ledger.limit and not ledger.free:
            return False
        return self.has_quorum(promised) and any(self._is_starving(*each) for each in promised.items())

    def _amendment(self, promised: dict[str, Promise]) -> Amendment | None:
        """Return the owner's next change of settings, if a member brings one and all can follow it.

        At the end of the clock there is none: others have seen the run end.
        """
        steps = self.own.options.steps
        if steps is not None and self.own.state.step >= steps:
            return None
        brought = {promise.amendment for promise in promised.values() if promise.amendment is not None}
        for amendment in sorted(brought, key=lambda amendment: amendment.signature):
            if self._is_followed(amendment, promised):
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
            self.own.note("refused", peer, f"it waits: {reason}")

    def _without_stuck_pairs(self, offers: dict[str, Offer]) -> dict[str, Offer]:
        """Return the offers of members that can all reach each other and are enough.

        If there are no such members, all try again.
        """
        turn = self.own.state.head.round
        pairs = [pair for pair, apart in self._separations.items() if turn < apart.until and pair <= offers.keys()]
        if not pairs or not self.own.rules.leave_out_stuck_pairs:
            return offers
        choices = (together(pairs, offers, turn + shift) for shift in range(len(offers)))
        chosen = next((choice for choice in choices if self._are_enough(choice)), offers)
        return {peer: offer for peer, offer in offers.items() if peer in chosen}

    def separate(self, one: str, other: str) -> None:
        """Keep two islands that cannot reach each other apart for 2 rounds, the next time for 4, then for 8."""
        self.own.note("cut off", one, f"{one} and {other} cannot reach each other")
        pair = frozenset((one, other))
        rounds = min(2 * self._separations[pair].rounds, MAX_ROUNDS_APART) if pair in self._separations else 2
        self._separations[pair] = Separation(self.own.state.head.round + rounds, rounds)

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
