"""What all islands agree on besides vectors: who takes part, how far the run is, and whose progress is contained.

It is a fold over the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.ranges import Ranges, is_normal, size
from diloco.elastic.protocol.record import (
    Amendment,
    Contribution,
    Head,
    Key,
    Offer,
    Proposal,
    Record,
    holder_name,
    quorum,
)
from diloco.errors import RecordInvalid

Mark = tuple[str, int, int]  # island, incarnation, fragment
KeptHole = tuple[Mark, int, Ranges]  # whose contribution, where that begins, and on which pages it does not count


class Version(NamedTuple):
    """Identify the last update of a fragment."""

    digest: str
    step: int  # the run's clock after it


@dataclass(frozen=True)
class RunState:
    """Hold what all islands at one head agree on besides vectors; records alone change it."""

    head: Head
    roster: tuple[str, ...]
    ledger: Ledger
    marks: tuple[tuple[Mark, int], ...] = ()  # the highest progress contained, sorted
    step: int = 0  # the run's clock
    updates: int = 0  # records that changed parameters
    versions: tuple[tuple[int, Version], ...] = ()  # of fragments that were updated, sorted
    owner: str = ""  # the public key of whoever may amend the run's settings; "": nobody may
    amendments: tuple[Amendment, ...] = ()
    absent: tuple[tuple[str, int], ...] = ()  # members: records in a row in whose terms they gave no answer
    witnesses: tuple[str, ...] = ()  # members that store and vote, and contribute nothing
    latch: str = ""  # the digest of the record from which on every record needs a quorum; "": of none
    forces: int = 0  # records that the owner's signature decided in place of a quorum
    holes: tuple[KeptHole, ...] = ()  # until the same life's next contribution, which covers it

    @property
    def key(self) -> Key:
        """Return what is to be decided next: the record that follows this head."""
        return Key(self.head.round + 1, self.head.digest)

    def rank(self, *, latched: bool) -> int:
        """Return by what chains are compared before heads: 0, 1 from the latch on, and one more for each force."""
        return (1 + self.forces) if latched else 0

    @property
    def precedence(self) -> tuple[int, Head]:
        """Return what is greatest at the end of the chain that the run goes on from."""
        return self.rank(latched=bool(self.latch)), self.head

    def mark(self, island: str, incarnation: int, fragment: int) -> int:
        """Return the highest cut of an island's progress that this state contains; 0 if it contains none."""
        return self._contained.get((island, incarnation, fragment), 0)

    def hole(self, island: str, incarnation: int, fragment: int) -> tuple[int, Ranges]:
        """Return on which pages an island's last contribution does not count, and where that contribution begins."""
        mark = island, incarnation, fragment
        return next(((lo, pages) for of, lo, pages in self.holes if of == mark), (0, ()))

    @cached_property
    def _contained(self) -> dict[Mark, int]:
        return dict(self.marks)

    @cached_property
    def places(self) -> dict[str, int]:
        """Return each member's index in the roster."""
        return {member: place for place, member in enumerate(self.roster)}

    @cached_property
    def evicted(self) -> frozenset[str]:
        """Return the islands that the run's owner has taken out for good."""
        return frozenset(peer for amendment in self.amendments for peer in amendment.evicts)

    def version(self, fragment: int) -> Version:
        """Return the last update of a fragment; its digest is empty before the first."""
        return dict(self.versions).get(fragment, Version("", 0))

    def fits(self, island: str, offer: Offer) -> bool:
        """Return whether an offer begins exactly at the island's mark, is not empty, and not of a life that is over."""
        begins = offer.lo == self.mark(island, offer.incarnation, offer.fragment) and offer.lo < offer.hi
        return begins and offer.incarnation >= self._lives.get(island, 0)

    @cached_property
    def _lives(self) -> dict[str, int]:
        """Return the latest incarnation of each island whose progress is contained."""
        return {island: incarnation for (island, incarnation, _), _ in self.marks}  # sorted: the last one wins

    def accepts(self, amendment: Amendment) -> bool:
        """Return whether an amendment is the owner's next one."""
        return amendment.number == len(self.amendments) + 1 and amendment.is_by(self.owner)

    def kept(self, amendment: Amendment | None) -> tuple[str, ...]:
        """Return whom alone an amendment keeps in the roster, deciding the next record; empty if it forces nothing."""
        return () if amendment is None else amendment.kept(self.key)

    def is_decided(self, amendment: Amendment | None, present: Iterable[str]) -> bool:
        """Return whether these islands can decide the next record, with this amendment in it: they are a quorum.

        Where the owner forces a roster, all whom it keeps must be there, and nobody else need be.
        """
        kept = self.kept(amendment)
        return set(kept) <= set(present) if kept else quorum(self.roster, present)

    def is_of(self, owner: str) -> bool:
        """Return whether this is a run of `owner` that nobody else has amended.

        For a state that records lead to this always holds; for one that a peer gives it may not.
        """
        numbered = all(number == each.number for number, each in enumerate(self.amendments, start=1))
        return self.owner == owner and numbered and all(each.is_by(owner) for each in self.amendments)

    def head_after(self, record: Record) -> Head:
        """Return the head that the log would have with this record appended."""
        return Head(self.head.tokens + record.proposal.tokens, record.proposal.key.round, record.digest)

    def after(self, record: Record) -> "RunState":
        """Return the state that follows from a record; raise RecordInvalid if the record cannot follow this state.

        Its parent must be this head, every contribution must begin at its island's mark, and what it leases and amends
        must be next in line.
        """
        proposal = record.proposal
        amendments = () if proposal.amendment is None else (proposal.amendment,)
        if proposal.key != self.key:
            raise RecordInvalid(f"the record of round {proposal.key.round} does not follow round {self.head.round}")
        if not all(map(self.accepts, amendments)):
            raise RecordInvalid("it changes settings, and that is not the owner's next change")
        if (latch := proposal.latch) is not None and (self.latch or not latch.is_by(self.owner)):
            raise RecordInvalid("it demands a quorum from here on, and that is not the owner's demand")
        evicted = self.evicted.union(*(amendment.evicts for amendment in amendments))
        if not evicted.isdisjoint({*proposal.roster, *proposal.islands}):
            raise RecordInvalid("the run's owner has taken a member of it out")
        kept = self.kept(proposal.amendment)
        if kept and (kept != proposal.roster or not set(kept) <= set(self.roster)):
            raise RecordInvalid("its roster is not the one that the run's owner has forced")
        holders = {grant.holder.rpartition("#")[0] for grant in proposal.grants}
        if not set(proposal.witnesses).isdisjoint({*proposal.islands, *holders}):
            raise RecordInvalid("a witness contributes in it, or leases samples")
        marks, versions = dict(self.marks), dict(self.versions)
        if proposal.contributions:
            versions[proposal.fragment] = Version(record.digest, proposal.step)
        for contribution in proposal.contributions:
            offer = contribution.offer
            if offer.fragment != proposal.fragment:
                raise RecordInvalid(f"{contribution.island}: fragment {offer.fragment} in a round of another")
            if not self.fits(contribution.island, offer):
                raise RecordInvalid(f"{contribution.island}: progress from {offer.lo} on, which is not its mark")
            marks[contribution.island, offer.incarnation, offer.fragment] = offer.hi
        marks = self._pruned(marks, proposal)
        ledger = self.settled(proposal.contributions, proposal.releases)
        for grant in proposal.grants:
            ledger, granted = ledger.grant(grant.holder, size(grant.samples))
            if granted != grant.samples:  # the ledger decides which positions come next
                raise RecordInvalid(f"{grant.holder} is granted samples that are not next in line")
        return replace(
            self,
            head=self.head_after(record),
            roster=proposal.roster,
            ledger=ledger,
            marks=tuple(sorted(marks.items())),
            step=proposal.step,
            updates=self.updates + bool(proposal.contributions),
            versions=tuple(sorted(versions.items())),
            amendments=(*self.amendments, *amendments),
            absent=self._absent_after(proposal),
            witnesses=proposal.witnesses,
            latch=self.latch if latch is None else latch.head.digest,
            forces=self.forces + bool(kept),
            holes=self._holes_after(proposal, marks),
        )

    def _pruned(self, marks: dict[Mark, int], proposal: Proposal) -> dict[Mark, int]:
        """Return the marks without those of lives that are over: a later one of the island has contributed."""
        lives = {part.island: part.offer.incarnation for part in proposal.contributions}
        return {mark: hi for mark, hi in marks.items() if mark[1] >= lives.get(mark[0], 0)}

    def _holes_after(self, proposal: Proposal, marks: dict[Mark, int]) -> tuple[KeptHole, ...]:
        """Return the holes that are left: whoever contributes again covers its own."""
        parts = [(part.island, part.offer) for part in proposal.contributions]
        offers = {(island, offer.incarnation, offer.fragment): offer for island, offer in parts}
        holes = [each for each in self.holes if each[0] in marks and each[0] not in offers]
        if (hole := proposal.hole) is not None:
            of = [mark for mark in offers if mark[0] == hole.island]
            if len(of) != 1 or len(offers) < 2 or not is_normal(hole.pages):
                raise RecordInvalid("it names a hole that cannot be right")
            holes += [(mark, offers[mark].lo, hole.pages) for mark in of if hole.pages]
        return tuple(sorted(holes))

    def _absent_after(self, proposal: Proposal) -> tuple[tuple[str, int], ...]:
        """Return for how many records in a row members have given no answer, by name; those who did are left out."""
        counts = dict(self.absent)
        silent = (name for name in proposal.roster if name in self.places and name not in proposal.answered)
        return tuple(sorted((name, counts.get(name, 0) + 1) for name in silent))

    def settled(self, contributions: tuple[Contribution, ...], releases: tuple[str, ...]) -> Ledger:
        """Return the ledger after a round has consumed samples and taken leases back."""
        ledger = self.ledger
        for contribution in contributions:
            offer = contribution.offer
            ledger = ledger.consume(holder_name(contribution.island, offer.incarnation), offer.samples)
        for holder in releases:
            ledger = ledger.release(holder)
        return ledger
