"""Records that follow a state, with as many contributions as a test needs."""

from dataclasses import replace

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.record import EMPTY, Contribution, Head, Offer, Proposal, Record, Settings
from diloco.elastic.protocol.state import RunState

GENESIS = RunState(Head(0, 0, "0" * 64), ("A", "B"), Ledger(epoch=100))


def record(state: RunState, *parts: Contribution, **changes) -> Record:
    fragment = parts[0].offer.fragment if parts else -1
    proposal = Proposal(state.key, fragment, parts, state.roster, (), (), Settings(), state.step, answered=state.roster)
    return Record(replace(proposal, **changes), EMPTY)


def contribution(island: str, lo: int, hi: int, *, samples=(), fragment: int = 0, incarnation: int = 1) -> Contribution:
    return Contribution(island, Offer(fragment, lo, hi, 10, samples, incarnation=incarnation), weight=10)
