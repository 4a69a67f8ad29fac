"""What all islands agree on besides vectors: who takes part, how far the run is, and whose progress is contained.

It is a fold over the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from diloco.comm.peers.admission import Right, check_admission, read_invite
from diloco.comm.peers.identity import public_key_in, run_id_of
from diloco.comm.peers.packing import Reader
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
    is_holder,
    quorum,
)
from diloco.errors import IdentityError, RecordInvalid, TicketError

Mark = tuple[str, int, int]  # island, incarnation, fragment
KeptHole = tuple[Mark, int, Ranges]  # whose contribution, where that begins, and on which pages it does not count


class Admitted(NamedTuple):
    """Name an island that was ever a member, the key of the invite by which it came in, in hex, and its right."""

    island: str
    invite: str  # empty: the founder, which needed none
    right: int = int(Right.CONTRIBUTE)


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
    admitted: tuple[Admitted, ...] = ()  # everybody who was ever a member; see `objection`
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

    @cached_property
    def revoked(self) -> frozenset[str]:
        """Return the invites with which nobody new comes in any more, by their keys in hex."""
        return frozenset(invite for amendment in self.amendments for invite in amendment.revokes)

    @cached_property
    def invites(self) -> dict[str, str]:
        """Return by which invite each island came in; that of a founder, which needed none, is empty."""
        return {each.island: each.invite for each in self.admitted}

    @cached_property
    def only_witnesses(self) -> frozenset[str]:
        """Return the islands whose tickets allow them to store and vote, and nothing else."""
        return frozenset(each.island for each in self.admitted if each.right == Right.WITNESS)

    def objection(self, island: str, admission: str, *, witness: bool = False) -> str:
        """Return why an island cannot be a member of this run by its admission, in hex; "" if it can.

        Who was one once needs none. Where nobody is admitted, as in simulations, anybody may come. Whether an invite
        has expired does not matter here: that is for those to say who let its island in.
        """
        if island in self.evicted:
            return "the run's owner has taken it out"
        if island in self.only_witnesses and not witness:
            return "its ticket allows it to witness only"
        if not self.admitted or island in self.invites:
            return ""
        try:
            run_id = run_id_of(bytes.fromhex(self.owner))
            invite = check_admission(bytes.fromhex(admission), run_id, public_key_in(island)).invite
        except (TicketError, IdentityError, ValueError) as error:
            return str(error)
        name = invite.key.hex()
        if name in self.revoked:
            return "its ticket was revoked"
        if invite.right not in (Right.CONTRIBUTE, Right.WITNESS) or (invite.right == Right.WITNESS and not witness):
            return f"its ticket allows it to {invite.right.name.lower()} only"
        if sum(each.invite == name for each in self.admitted) >= invite.islands:
            return f"its ticket is used up: {invite.islands} island{'s' * (invite.islands > 1)} came in by it"
        return ""

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
        admitted = self._admitted_after(proposal)
        marks, versions = dict(self.marks), dict(self.versions)
        if proposal.contributions:
            versions[proposal.fragment] = Version(record.digest, proposal.step)
        for contribution in proposal.contributions:
            offer = contribution.offer
            if offer.fragment != proposal.fragment:
                raise RecordInvalid(f"{contribution.island}: fragment {offer.fragment} in a round of another")
            if not offer.is_possible or not self.ledger.reaches(offer.samples):
                raise RecordInvalid(f"{contribution.island}: numbers that cannot be right")
            if not self.fits(contribution.island, offer):
                raise RecordInvalid(f"{contribution.island}: progress from {offer.lo} on, which is not its mark")
            marks[contribution.island, offer.incarnation, offer.fragment] = offer.hi
        marks = self._pruned(marks, proposal)
        ledger = self.settled(proposal.contributions, proposal.releases)
        for grant in proposal.grants:
            ledger, granted = ledger.grant(grant.holder, size(grant.samples))
            if not is_holder(grant.holder):
                raise RecordInvalid(f"{grant.holder} is nobody who could hold samples")
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
            admitted=admitted,
            holes=self._holes_after(proposal, marks),
        )

    def _admitted_after(self, proposal: Proposal) -> tuple[Admitted, ...]:
        """Return who was ever a member; raise RecordInvalid if somebody new is in the roster without an admission."""
        if not self.admitted:
            return ()
        state, given = self, dict(proposal.admissions)
        if not self.only_witnesses.intersection(proposal.roster) <= set(proposal.witnesses):
            raise RecordInvalid("a member of it may only be a witness, and is none")
        for island in proposal.roster:
            if island not in self.invites:
                state = state.with_member(island, given.pop(island, ""), witness=island in proposal.witnesses)
        if given:
            raise RecordInvalid("it admits islands that it does not make members")
        return state.admitted

    def with_member(self, island: str, admission: str, *, witness: bool) -> "RunState":
        """Return the state in which this island has been a member; raise RecordInvalid if it may not become one."""
        if reason := self.objection(island, admission, witness=witness):
            raise RecordInvalid(f"{island} cannot be a member: {reason}")
        if not self.admitted or island in self.invites:
            return self
        invite = read_invite(Reader(bytes.fromhex(admission)))
        entry = Admitted(island, invite.key.hex(), int(invite.right))
        return replace(self, admitted=tuple(sorted((*self.admitted, entry))))

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
