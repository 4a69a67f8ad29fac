"""Check the invariants I1 to I6, worked out anew from the logs: nothing here trusts what a node believes."""

from collections import Counter
from dataclasses import dataclass, field

from diloco.elastic.protocol.messages import Held
from diloco.elastic.protocol.ranges import Ranges, both, minus, normal, size
from diloco.elastic.protocol.record import Key, Offer, Proposal, Record
from diloco.elastic.protocol.state import Mark


class Violation(AssertionError):
    """Signal that an invariant does not hold."""


@dataclass(frozen=True)
class Chain:
    """Hold what a branch contains: progress, samples, updates and amendments."""

    progress: dict[tuple[str, int, int], int]  # of an island's life, by fragment
    samples: Ranges
    twice: Ranges
    updates: int = 0  # records with contributions
    amendments: int = 0
    holes: dict[tuple[str, int, int], Ranges] = field(default_factory=dict)  # pages of the last progress not counted


@dataclass
class Checker:
    """Check every record when an island appends it. After the latched one, there is one record per round ever."""

    fragments: int = 1
    restarted: bool = False  # somebody has: a message of its former life may come late, and its lease seem another's
    chains: dict[str, Chain] = field(default_factory=dict)
    latched: str = ""  # the record after which every one needs a quorum
    parents: dict[str, str] = field(default_factory=dict)
    stored: dict[str, bool] = field(default_factory=dict)  # by record: whether somebody knows that a quorum has it
    by_round: dict[int, tuple[str, str]] = field(default_factory=dict)  # its first record, and who has it
    rivals: dict[Key, dict[str, set[str]]] = field(default_factory=dict)  # key -> record -> who has it
    carried: dict[tuple[str, Offer], Ranges] = field(default_factory=dict)  # pages of earlier progress in an offer

    def genesis(self, digest: str) -> None:
        """Begin a run with this record 0, which contains nothing."""
        self.chains[digest] = Chain({}, (), ())

    def latch(self, digest: str) -> None:
        """Take in that the owner has demanded a quorum after this record; raises Violation if it is another one."""
        if self.latched not in ("", digest):
            raise Violation("I1: two latched histories")
        self.latched = digest

    def _counts(self, digest: str) -> bool:
        """Return whether a record is in the latched history: it and all between had a quorum."""
        while self.latched and self.stored.get(digest):
            digest = self.parents[digest]
            if digest == self.latched:
                return True
        return False

    def appended(
        self, island: str, record: Record, overlaps: Ranges, steady: set[str], *, calm: bool, valid: bool = True
    ) -> None:
        """Check a record that an island has appended; raises Violation.

        `valid`: a quorum has stored it. `steady` islands were alive and reachable all the time. In a `calm` world
        nobody was suspected wrongly. `overlaps` are the samples that the ledger says were used twice.
        """
        key = record.proposal.key
        self.parents[record.digest] = key.parent
        self.stored[record.digest] = self.stored.get(record.digest, False) or valid
        self._check_agreement(island, record, steady, calm, strict=self._counts(record.digest))
        if record.digest not in self.chains:
            if key.parent not in self.chains:
                raise Violation(f"I1: {island} appended round {key.round} to a branch that nobody had")
            self.chains[record.digest] = self._extended(self.chains[key.parent], record)
        twice = self.chains[record.digest].twice
        if unsaid := minus(twice, overlaps):
            raise Violation(f"I5: samples {unsaid} are in two contributions, and the ledger does not say so")
        if twice and calm and not self.restarted and all(len(rivals) == 1 for rivals in self.rivals.values()):
            raise Violation(f"I5: samples {twice} are in two contributions, and nothing forked")

    def moved(self, island: str, head: str, other: str) -> None:
        """Check I1 of an island that moves to another head: of the latched history nothing is given up."""
        while self._counts(head) and other != head:
            if other not in self.parents:
                raise Violation(f"I1: {island} gives a record up that a quorum has stored after the latch")
            other = self.parents[other]

    def undone(self, island: str, digest: str, held: Held | None) -> None:
        """Check I1 of an island that undoes a record: one of the latched history it must still hold."""
        if self._counts(digest) and (held is None or held.record.digest != digest):
            raise Violation(f"I1: {island} undoes a record that a quorum has stored after the latch")

    def check_memory(self, marks: tuple[tuple[Mark, int], ...]) -> None:
        """Check that a state keeps marks of one life of each island, however many there were."""
        lives = Counter(island for island, _ in {mark[:2] for mark, _ in marks})
        for island in (name for name, count in lives.items() if count > 1):
            raise Violation(f"memory: a state keeps marks of {lives[island]} lives of {island}")

    def _check_agreement(self, island: str, record: Record, steady: set[str], calm: bool, *, strict: bool) -> None:
        """Check I1: no steady island has a rival of this record; if strict, its round has no rival at all."""
        key = record.proposal.key
        if strict:
            known, by = self.by_round.setdefault(key.round, (record.digest, island))
            if known != record.digest:
                raise Violation(f"I1: {island} has another record of round {key.round} than {by}")
        rivals = self.rivals.setdefault(key, {})
        new = record.digest not in rivals
        # all who took part hold what was committed
        if new:
            rivals[record.digest] = set(record.proposal.present)
        rivals[record.digest].add(island)
        if not (new and calm):  # an older commit shows late, or somebody was suspected wrongly: `merge` may fork then
            return
        for digest, who in rivals.items():
            if digest != record.digest and who & steady:
                raise Violation(
                    f"I1: {island} has a record of round {key.round}, and {min(who & steady)},"
                    " alive and reachable all the time, has another or took part in it"
                )

    def _extended(self, parent: Chain, record: Record) -> Chain:
        """Check I2 and I3 of a record that follows this branch, and return the longer branch."""
        progress = dict(parent.progress)
        self._check_turn(parent, record.proposal)
        for contribution in record.proposal.contributions:
            offer = contribution.offer
            mark = contribution.island, offer.incarnation, offer.fragment
            if offer.lo < progress.get(mark, 0):
                raise Violation(
                    f"I2: progress {offer.lo}..{offer.hi} of {contribution.island} is counted twice"
                    f" in round {record.proposal.key.round}"
                )
            if offer.lo > progress.get(mark, 0):
                raise Violation(f"I3: progress {progress.get(mark, 0)}..{offer.lo} of {contribution.island} is lost")
            progress[mark] = offer.hi
        holes = self._covered(parent, record.proposal)
        samples, twice = _consumed(parent, record.proposal)
        updates = parent.updates + bool(record.proposal.contributions)
        return Chain(progress, samples, twice, updates, self._amended(parent, record.proposal), holes)

    def _covered(self, parent: Chain, proposal: Proposal) -> dict[tuple[str, int, int], Ranges]:
        """Check that each contribution brings the pages on which the one before did not count, and no other ones."""
        holes = dict(parent.holes)
        for part in proposal.contributions:
            mark = part.island, part.offer.incarnation, part.offer.fragment
            missed, brought = holes.pop(mark, ()), self.carried.get((part.island, part.offer), ())
            if minus(missed, brought):
                raise Violation(f"I3: pages {minus(missed, brought)} of {part.island}'s earlier progress are lost")
            if minus(brought, missed):
                raise Violation(f"I2: pages {minus(brought, missed)} of {part.island} are counted twice")
            if proposal.hole is not None and proposal.hole.island == part.island:
                holes[mark] = proposal.hole.pages
        return holes

    def _amended(self, parent: Chain, proposal: Proposal) -> int:
        """Check I6: each amendment is contained once, one after the other."""
        if (amendment := proposal.amendment) is None:
            return parent.amendments
        if amendment.number != parent.amendments + 1:
            raise Violation(f"I6: amendment {amendment.number} comes after {parent.amendments} others")
        return amendment.number

    def _check_turn(self, parent: Chain, proposal: Proposal) -> None:
        """Check that fragments follow each other in the log, whatever happens between the updates."""
        turn = parent.updates % self.fragments if proposal.contributions else -1
        if {proposal.fragment, *(part.offer.fragment for part in proposal.contributions)} != {turn}:
            raise Violation(f"I2: round {proposal.key.round} is of fragment {proposal.fragment}, and {turn} is due")


def _consumed(parent: Chain, proposal: Proposal) -> tuple[Ranges, Ranges]:
    """Return the samples that the branch contains after this record, and those that it contains twice."""
    samples, twice = parent.samples, parent.twice
    offered = [contribution.offer.samples for contribution in proposal.contributions]
    every = tuple(part for ranges in offered for part in ranges)
    apart = size(normal(every)) == size(every)  # then all at once, for there may be thousands
    for ranges in [normal(every)] if apart else offered:
        twice = normal(twice + both(ranges, samples))
        samples = normal(samples + ranges)
    return samples, twice
