"""What every member checks of a *begin* before it takes part: all that follows from the state both have.

What only the coordinator knows is taken from it: who answered, said goodbye or wants samples, and others' offers.
"""

from dataclasses import astuple
from itertools import pairwise

from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.options import Decide
from diloco.elastic.protocol.proposer import ABSENT_RECORDS, weigh
from diloco.elastic.protocol.record import Proposal, Settings, holder_name
from diloco.elastic.protocol.state import RunState

SAME_SCALAR = 1e-12  # relative: libm differs between platforms


def what_is_wrong(state: RunState, begin: Begin, decide: Decide, due: int) -> str:
    """Return what in a *begin* does not follow from the state and the offers it contains; "" if all does."""
    proposal = begin.proposal
    parts = proposal.contributions
    if len(set(proposal.islands)) < len(parts) or proposal.fragment != (due if parts else -1):
        return "contributions that cannot be right"
    if parts and weigh({part.island: part.offer for part in parts}) != {part.island: part.weight for part in parts}:
        return "weights that do not follow from the offers"
    settings, step = decide(state, due, parts)
    if proposal.step != step:
        return f"step {proposal.step} of the run's clock, where {step} is next"
    if not _are_same(proposal.settings, settings):
        return "settings that are not the run's"
    if not _is_in_order(proposal.releases, tuple(holder for holder, _ in state.ledger.leases)):
        return "releases of leases that nobody has"
    if not _is_in_order(proposal.answered, state.roster):
        return "answers of islands that are no members"
    return "" if state.kept(proposal.amendment) else _what_is_wrong_with_roster(state, proposal)


def _are_same(one: Settings, other: Settings) -> bool:
    """Return whether two rounds' settings are the same, but for the last bits of scalars."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    return all(
        abs(a - b) <= SAME_SCALAR * max(abs(a), abs(b)) if isinstance(a, float) and isinstance(b, float) else a == b
        for a, b in pairs
    )


def _is_in_order(some: tuple[str, ...], members: tuple[str, ...]) -> bool:
    """Return whether these are members, each once, in their order."""
    places = {member: place for place, member in enumerate(members)}
    return all(one in places for one in some) and all(places[a] < places[b] for a, b in pairwise(some))


def _what_is_wrong_with_roster(state: RunState, proposal: Proposal) -> str:
    """Return what is wrong with a roster that nobody has forced: those who stay come first, then who is new."""
    stay = tuple(peer for peer in proposal.roster if peer in state.places)
    new = tuple(sorted({*proposal.islands, *proposal.witnesses} - state.places.keys()))
    if proposal.roster != (*stay, *new) or not _is_in_order(stay, state.roster):
        return "a roster that does not follow from the last one"
    if not _is_in_order(proposal.islands, proposal.roster) or not _is_in_order(proposal.witnesses, proposal.roster):
        return "contributors or witnesses that are not in its roster"
    return ""


def what_is_wrong_for(me: str, incarnation: int, state: RunState, begin: Begin) -> str:
    """Return what in a fresh *begin* a member knows better, because it is about itself; "" if nothing is.

    Whoever is sent one has answered in its term. A result that is adopted was proposed in an earlier one.
    """
    proposal = begin.proposal
    evicts = proposal.amendment.evicts if proposal.amendment is not None else frozenset[str]()
    if state.kept(proposal.amendment) or me not in state.places or me in evicts:
        return ""
    if me not in proposal.roster:
        return f"a roster without {me}, which has answered"
    if me not in proposal.answered:
        return f"{me} as silent, which has answered"
    if holder_name(me, incarnation) in proposal.releases:
        return f"the release of what {me} holds"
    return ""


def dropped_at_once(state: RunState, proposal: Proposal) -> set[str]:
    """Return the members that a roster lets go although they were not absent for long: they must have said goodbye."""
    absent, kept = dict(state.absent), state.kept(proposal.amendment)
    evicts = proposal.amendment.evicts if proposal.amendment is not None else frozenset[str]()
    gone = set(state.roster) - set(proposal.roster) - evicts if not kept else set[str]()
    return {peer for peer in gone if peer in proposal.answered or absent.get(peer, 0) + 1 < ABSENT_RECORDS}
