"""What all islands agree on besides vectors: who, how far, and whose progress is contained. A fold over the log."""

from dataclasses import dataclass, replace

from diloco.elastic.ledger import Ledger
from diloco.elastic.ranges import Ranges, size
from diloco.elastic.record import Head, Key, Offer, Record, holder_name
from diloco.errors import RecordInvalid

Mark = tuple[str, int, int]  # island, incarnation, fragment


@dataclass(frozen=True)
class RunState:
    head: Head
    roster: tuple[str, ...]
    ledger: Ledger
    marks: tuple[tuple[Mark, int], ...] = ()  # the highest progress contained, sorted
    step: int = 0  # the run's clock
    updates: int = 0  # records that changed parameters

    @property
    def key(self) -> Key:
        """What is to be decided next."""
        return Key(self.head.round + 1, self.head.digest)

    def mark(self, island: str, incarnation: int, fragment: int) -> int:
        return dict(self.marks).get((island, incarnation, fragment), 0)

    def fits(self, island: str, offer: Offer) -> bool:
        return offer.lo == self.mark(island, offer.incarnation, offer.fragment) and offer.lo < offer.hi

    def after(self, record: Record) -> "RunState":
        proposal = record.proposal
        if proposal.key != self.key:
            raise RecordInvalid(f"the record of round {proposal.key.round} does not follow round {self.head.round}")
        marks, ledger = dict(self.marks), self.ledger
        for contribution in proposal.contributions:
            offer = contribution.offer
            if offer.fragment != proposal.fragment:
                raise RecordInvalid(f"{contribution.island}: fragment {offer.fragment} in a round of another")
            if not self.fits(contribution.island, offer):
                raise RecordInvalid(f"{contribution.island}: progress from {offer.lo} on, which is not its mark")
            marks[contribution.island, offer.incarnation, offer.fragment] = offer.hi
            ledger = ledger.consume(holder_name(contribution.island, offer.incarnation), offer.samples)
        for holder in proposal.releases:
            ledger = ledger.release(holder)
        for grant in proposal.grants:
            ledger = _granted(ledger, grant.holder, grant.samples)
        return replace(
            self,
            head=Head(self.head.tokens + proposal.tokens, proposal.key.round, record.digest),
            roster=proposal.roster,
            ledger=ledger,
            marks=tuple(sorted(marks.items())),
            step=proposal.step,
            updates=self.updates + bool(proposal.contributions),
        )


def _granted(ledger: Ledger, holder: str, samples: Ranges) -> Ledger:
    """The ledger decides which positions come next; a grant of others is refused."""
    ledger, granted = ledger.grant(holder, size(samples))
    if granted != samples:
        raise RecordInvalid(f"{holder} is granted samples that are not next in line")
    return ledger
