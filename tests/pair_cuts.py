"""Cuts between two islands of a roster, and what they cost."""

from diloco.elastic.protocol.rules import ALL, Rules
from diloco.simulate.virtual.chances import SILENCE_S, DisasterConfig
from diloco.simulate.virtual.cuts import Pair, Topology, updates_under

PAIR_CUTS = ("pair", "one way", "other way", "deaf")


def pair_cut(kind: str, one: str, other: str, names: tuple[str, ...]) -> frozenset[Pair]:
    """Return the links that are cut between two islands, or of all links to the first of them."""
    match kind:
        case "pair":
            return frozenset({(one, other), (other, one)})
        case "one way":
            return frozenset({(one, other)})
        case "other way":
            return frozenset({(other, one)})
    return frozenset((name, one) for name in names if name != one)


def share_with_first_pair_cut(islands: int, exchanges: float, kind: str, seed: int = 0, *, rules: Rules = ALL) -> float:
    """Return the updates with the roster's first two islands cut, as a share of those with its last two cut."""
    names, exchange_s = DisasterConfig(islands).names, exchanges * SILENCE_S
    ends = (names[0], names[1]), (names[-1], names[-2])
    first, last = (
        updates_under(Topology(seed, islands, pair_cut(kind, *pair, names), exchange_s), rules, rounds=12)[0]
        for pair in ends
    )
    return first / last
