"""What stays of a record for ever: its header, for people and for the file of the run's history."""

from collections.abc import Sequence

from diloco.checkpoint.log.history import ContributionHeader, RoundHeader
from diloco.elastic.protocol.record import Contribution, LoggedRecord


def header_of(logged: LoggedRecord, before: Sequence[str], total_tokens: int, size: int) -> RoundHeader:
    """Return the header of a committed record.

    `before` is the roster that decided it, empty if that is not known; `total_tokens` those of the run with it, and
    `size` the bytes of its result.
    """
    record, proposal = logged.record, logged.record.proposal
    answered, amendment = proposal.answered, proposal.amendment
    return RoundHeader(
        digest=record.digest,
        parent=proposal.key.parent,
        round=proposal.key.round,
        time_ms=logged.time_ms,
        step=proposal.step,
        fragment=proposal.fragment,
        tokens=proposal.tokens,
        total_tokens=total_tokens,
        size=size,
        contributions=tuple(map(_contribution, proposal.contributions)),
        islands=len(proposal.roster),
        joined=tuple(peer for peer in proposal.roster if before and peer not in before),
        left=tuple(peer for peer in before if peer not in proposal.roster),
        silent=tuple(peer for peer in before if answered and peer not in answered),
        amendment=0 if amendment is None else amendment.number,
        changes="" if amendment is None else amendment.changes,
        collect_ms=logged.phases.collect_ms,
        exchange_ms=logged.phases.exchange_ms,
    )


def _contribution(given: Contribution) -> ContributionHeader:
    offer = given.offer
    return ContributionHeader(
        given.island, offer.tokens, offer.steps, given.weight, offer.loss or None, offer.step_ms, offer.late
    )
