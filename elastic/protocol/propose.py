"""How a coordinator chooses: pure functions over offers, the state, and who is alive."""

from collections.abc import Iterable
from statistics import median

from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Failed
from diloco.elastic.protocol.options import Decide
from diloco.elastic.protocol.ranges import size
from diloco.elastic.protocol.record import Contribution, Grant, Offer, Proposal, holder_name
from diloco.elastic.protocol.state import RunState

WEIGHT_CAP = 2  # times the round's median
OUTSIZE = 100  # times the median norm of a round's offers: refused


def deadline(commit_at: float, ready_at: Iterable[float], live: int, straggler: float) -> float | None:
    """Return when to go on without the rest: after `straggler` times what half of the live members have needed."""
    times, half = sorted(ready_at), -(-live // 2)
    if len(times) < half or not times:
        return None
    return commit_at + straggler * max(0.0, times[half - 1] - commit_at)


def weigh(offers: dict[str, Offer]) -> dict[str, int]:
    cap = WEIGHT_CAP * median([offer.tokens for offer in offers.values()])
    return {peer: max(1, min(offer.tokens, int(cap))) for peer, offer in offers.items()}


def outsize(offers: dict[str, Offer]) -> list[str]:
    """Return those whose progress is far larger than the others': one that has diverged would take the rest along."""
    usual = median([offer.norm for offer in offers.values()]) if len(offers) > 2 else 0.0
    return [peer for peer, offer in sorted(offers.items()) if usual and offer.norm > OUTSIZE * usual]


def together(pairs: Iterable[frozenset[str]], members: Iterable[str], turn: int) -> list[str]:
    """Return many that can all reach each other. Whose turn it is goes first, so that nobody is left out for ever."""
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
    """Make a fresh proposal.

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
    """Say whether a majority is present, or exactly half with the first member."""
    there = set(present) & set(roster)
    return 2 * len(there) > len(roster) or (2 * len(there) == len(roster) and roster[0] in there)


def culprits(failures: list[tuple[str, Failed]]) -> tuple[str, str] | None:
    """Return the pair that could not reach each other: two that accuse each other, or the first that were reported."""
    accused = [(reporter, failed.blamed) for reporter, failed in failures if failed.blamed not in ("", reporter)]
    for reporter, blamed in sorted(accused):
        if (blamed, reporter) in accused:
            return reporter, blamed
    return accused[0] if accused else None
