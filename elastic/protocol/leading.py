"""What a coordinator keeps of its term, and how it chooses. Pure functions over that, the state, and who is alive."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.messages import Begin, Failed, Held, Promise, Ready
from diloco.elastic.protocol.ranges import size
from diloco.elastic.protocol.record import Contribution, Grant, Offer, Proposal, Record, Settings, holder_name
from diloco.elastic.protocol.state import RunState

WEIGHT_CAP = 2  # times the round's median
OUTSIZE = 100  # times the median norm of a round's offers: refused

Decide = Callable[
    [RunState, int, tuple[Contribution, ...]], tuple[Settings, int]
]  # (.., fragment, ..) -> and the clock


@dataclass
class Term:
    """One term of this coordinator. `begin` is the attempt under way; without one, it collects."""

    number: int
    attempt: int = 0
    answers: dict[str, Promise | None] = field(default_factory=dict)  # None: it has another head
    asked: dict[str, float] = field(default_factory=dict)  # alive without an answer: since when
    ready: dict[str, Ready] = field(default_factory=dict)
    ready_at: dict[str, float] = field(default_factory=dict)
    adopted: Record | None = None
    fetching: tuple[str, Record] | None = None  # what is to be adopted or committed, and who has it
    fetches: int = 0
    begin: Begin | None = None
    begun_at: float = 0.0
    done: dict[str, str] = field(default_factory=dict)
    failures: list[tuple[str, Failed]] = field(default_factory=list)
    settle_at: float = 0.0
    resend_at: float = 0.0
    resends: int = 0

    def promised(self) -> dict[str, Promise]:
        return {peer: answer for peer, answer in self.answers.items() if answer is not None}

    def highest(self, me: str) -> tuple[str, Held] | None:
        """Who holds the result of the highest ballot. Attempts of this term do not count: only its coordinator could
        have committed them."""
        held = [(peer, answer.held) for peer, answer in self.promised().items() if answer.held is not None]
        held = [(peer, one) for peer, one in held if one.ballot[:2] != (self.number, me)]
        return max(held, key=lambda pair: (pair[1].ballot, pair[0])) if held else None

    def offers(self, fragment: int) -> dict[str, Offer]:
        return {
            peer: offer for peer, ready in self.ready.items() for offer in ready.offers if offer.fragment == fragment
        }


def deadline(commit_at: float, ready_at: Iterable[float], live: int, straggler: float) -> float | None:
    """`straggler` times the time from the fragment's last commit until half of the live members were ready."""
    times, half = sorted(ready_at), -(-live // 2)
    if len(times) < half or not times:
        return None
    return commit_at + straggler * max(0.0, times[half - 1] - commit_at)


def weigh(offers: dict[str, Offer]) -> dict[str, int]:
    cap = WEIGHT_CAP * median([offer.tokens for offer in offers.values()])
    return {peer: max(1, min(offer.tokens, int(cap))) for peer, offer in offers.items()}


def outsize(offers: dict[str, Offer]) -> list[str]:
    """Those whose progress is far larger than the others': an island that has diverged would take the rest along."""
    usual = median([offer.norm for offer in offers.values()]) if len(offers) > 2 else 0.0
    return [peer for peer, offer in sorted(offers.items()) if usual and offer.norm > OUTSIZE * usual]


def together(pairs: Iterable[frozenset[str]], members: Iterable[str], turn: int) -> list[str]:
    """As many as can all reach each other; whose turn it is goes first, so that nobody is left out for ever."""
    order, kept = sorted(members), dict[str, None]()
    apart = [tuple(pair) for pair in pairs]
    for index in range(len(order)):
        peer = order[(turn + index) % len(order)]
        if not any(peer in pair and kept.keys() & pair for pair in apart):
            kept[peer] = None
    return list(kept)


def propose(
    state: RunState,
    fragment: int,
    offers: dict[str, Offer],
    alive: dict[str, int],
    wants: dict[str, int],
    decide: Decide,
    amendment: Amendment | None = None,
) -> Proposal:
    """A fresh value. `alive` has the incarnation of all who stay, `wants` the samples each would like to hold."""
    order = [peer for peer in state.roster if peer in alive] + sorted(set(offers) - set(state.roster))
    weights = weigh(offers) if offers else {}
    contributions = tuple(Contribution(peer, offers[peer], weights[peer]) for peer in order if peer in offers)
    settings, step = decide(state, fragment, contributions)
    holders = {holder_name(peer, incarnation) for peer, incarnation in alive.items()}
    releases = tuple(holder for holder, _ in state.ledger.leases if holder not in holders)
    return Proposal(
        state.key,
        fragment if offers else -1,
        contributions,
        tuple(order),
        releases,
        _grants(state, contributions, releases, alive, wants),
        settings,
        step,
        amendment,
    )


def _grants(
    state: RunState,
    contributions: tuple[Contribution, ...],
    releases: tuple[str, ...],
    alive: dict[str, int],
    wants: dict[str, int],
) -> tuple[Grant, ...]:
    """Fill everybody's lease up to what it wants, after what this round consumes and returns."""
    ledger = state.ledger
    for contribution in contributions:
        holder = holder_name(contribution.island, contribution.offer.incarnation)
        ledger = ledger.consume(holder, contribution.offer.samples)
    for holder in releases:
        ledger = ledger.release(holder)
    before, grants = ledger, []
    for peer in sorted(wants):
        holder = holder_name(peer, alive[peer])
        lack = wants[peer] - size(before.lease_of(holder))
        if lack > 0:
            ledger, samples = ledger.grant(holder, lack)
            grants += [Grant(holder, samples)] if samples else []
    return tuple(grants)


def quorum(roster: tuple[str, ...], present: Iterable[str]) -> bool:
    """A majority, or exactly half with the first member."""
    there = set(present) & set(roster)
    return 2 * len(there) > len(roster) or (2 * len(there) == len(roster) and roster[0] in there)


def culprits(failures: list[tuple[str, Failed]]) -> tuple[str, str] | None:
    """Of several reports, the pair that could not reach each other: one that accuse each other, or the first."""
    accused = [(reporter, failed.blamed) for reporter, failed in failures if failed.blamed not in ("", reporter)]
    for reporter, blamed in sorted(accused):
        if (blamed, reporter) in accused:
            return reporter, blamed
    return accused[0] if accused else None
