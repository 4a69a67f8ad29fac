"""One entry of the replicated log: who contributed what, under which settings, and the digest of the result's bytes."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from diloco.comm.peers.identity import Identity, verify
from diloco.elastic.protocol.ranges import Ranges, size

EMPTY = hashlib.sha256(b"").hexdigest()  # the payload of a record without contributions
CONTEXT = b"diloco amendment 1\0"  # what one key signs for one purpose can never pass for another
EVICT, FORCE, REVOKE = "evict", "force", "revoke"  # in an amendment's changes
LATCH_CONTEXT = b"diloco latch 1\0"
MAX_TOKENS = 2**40  # behind one offer: sums of many stay below 2^53
VOTE_UP_TO = 64  # members of a roster all vote; of more, only the first do
VOTERS = 32


class Head(NamedTuple):
    """Identify the end of a branch. Branches of one rank are compared by these fields, in this order."""

    tokens: int  # contributed since the beginning
    round: int
    digest: str


class Key(NamedTuple):
    """Identify what a round decides: the record that follows this parent. The number alone would mix up branches."""

    round: int
    parent: str


class Ballot(NamedTuple):
    """Number an attempt at a round. Ballots are compared by term, then coordinator, then attempt."""

    term: int
    coordinator: str
    attempt: int


NO_BALLOT = Ballot(0, "", 0)


@dataclass(frozen=True)
class Latch:
    """Demand a quorum for every record after a committed one, for ever: only the run's owner can."""

    head: Head  # durable at the signer, with nothing after it
    signature: str = ""  # in hex

    @classmethod
    def sign(cls, owner: Identity, head: Head) -> "Latch":
        """Make a latch that carries the owner's signature."""
        return cls(head, owner.sign(cls(head)._signed).hex())

    @property
    def _signed(self) -> bytes:
        return LATCH_CONTEXT + json.dumps(list(self.head), separators=(",", ":")).encode()

    def is_by(self, owner: str) -> bool:
        """Return whether the signature is that of `owner`, a public key in hex."""
        return signed_by(owner, self.signature, self._signed)


@dataclass(frozen=True)
class Amendment:
    """Change a run's settings while it runs: only its owner can make an amendment, a record puts it into force.

    What it changes is opaque here, but for whom it takes out of the roster (`evicts`, `kept`). Amendments are numbered;
    whoever holds one brings it to rounds until one contains it.
    """

    number: int  # 1, 2, …: each follows the one before
    changes: str
    signature: str = ""  # in hex

    @classmethod
    def sign(cls, owner: Identity, number: int, changes: str) -> "Amendment":
        """Make an amendment that carries the owner's signature.

        A run is identified by its owner's key, so the amendment is valid for no other run.
        """
        draft = cls(number, changes)
        return replace(draft, signature=owner.sign(draft._signed).hex())

    @cached_property
    def evicts(self) -> frozenset[str]:
        """Return the islands that it takes out of the run for good."""
        return self._named(EVICT)

    @cached_property
    def revokes(self) -> frozenset[str]:
        """Return the invites, by their public keys in hex, with which nobody new comes in any more."""
        return self._named(REVOKE)

    def _named(self, what: str) -> frozenset[str]:
        try:
            return frozenset(name for name in json.loads(self.changes)[what] if isinstance(name, str))
        except (ValueError, TypeError, LookupError, RecursionError):
            return frozenset()

    @cached_property
    def _force(self) -> tuple[Key, tuple[str, ...]] | None:
        try:
            force = json.loads(self.changes)[FORCE]
            key, keep = Key(int(force["round"]), str(force["parent"])), tuple(map(str, force["keep"]))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):  # 1e999 is no round
            return None
        return key, keep

    def kept(self, key: Key) -> tuple[str, ...]:
        """Return the members that alone decide the record with this key, and are its roster; empty: no force for it.

        The owner's signature stands for the quorum that is gone for good.
        """
        return self._force[1] if self._force is not None and self._force[0] == key else ()

    @property
    def _signed(self) -> bytes:
        return CONTEXT + json.dumps([self.number, self.changes], separators=(",", ":")).encode()

    def is_by(self, owner: str) -> bool:
        """Return whether the signature is that of `owner`, a public key in hex."""
        return signed_by(owner, self.signature, self._signed)


@dataclass(frozen=True)
class Offer:
    """Describe progress of the sender between two of its cuts, (lo, hi], for one fragment."""

    fragment: int
    lo: int
    hi: int
    tokens: int
    samples: Ranges  # consumed behind it
    norm: float = 0.0
    incarnation: int = 0  # whose progress it is: work that a restart restored stays with its old one
    late: bool = False  # of an earlier phase: ready without having trained
    steps: int = 0  # inner steps behind it
    step_ms: int = 0  # what an inner step took; 0: not known
    loss: float = 0.0  # mean of its inner steps, on the leader; 0: not known. For people: nothing is decided by it

    @property
    def is_possible(self) -> bool:
        """Return whether its numbers can be true of any island: no more samples or steps than tokens, none negative."""
        least = min(self.fragment, self.lo, self.norm, self.incarnation, self.steps, self.step_ms)
        return least >= 0 and max(size(self.samples), self.steps) <= self.tokens <= MAX_TOKENS


@dataclass(frozen=True)
class Contribution:
    """Describe one island's part in a round: what it offered, and its weight in the mean."""

    island: str
    offer: Offer
    weight: int  # its tokens, capped


@dataclass(frozen=True)
class Hole:
    """Name a contributor that was lost during the exchange, and where its bytes never left it.

    On these pages the mean is over the others.
    """

    island: str
    pages: Ranges


@dataclass(frozen=True)
class Grant:
    """Lease samples to a holder, by the record that contains this."""

    holder: str
    samples: Ranges


@dataclass(frozen=True)
class Settings:
    """Specify the outer optimizer's scalars and the codecs of a round.

    Scalars are computed once and stored, because libm differs between platforms.
    """

    lr: float = 0.0
    momentum: float = 0.0
    codec: str = "int8"  # of the contributions
    result: str = ""  # of their mean, where that is another one
    optimizer: str = "nesterov"
    beta2: float = 0.0  # adam's
    eps: float = 0.0
    beta1_correction: float = 1.0
    beta2_correction: float = 1.0

    @property
    def result_codec(self) -> str:
        """Return the codec of the mean: that of the contributions unless `result` names another."""
        return self.result or self.codec


@dataclass(frozen=True)
class Proposal:
    """Specify all that *begin* fixes. The result's bytes follow from it and from the contributions alone."""

    key: Key
    fragment: int  # -1: no contributions; the record only leases samples and amends settings
    contributions: tuple[Contribution, ...]
    roster: tuple[str, ...]  # of the next round, in order
    releases: tuple[str, ...]  # holders whose leases return
    grants: tuple[Grant, ...]
    settings: Settings
    step: int  # the run's clock after it
    amendment: Amendment | None = None  # of the run's settings, from the next round on
    answered: tuple[str, ...] = ()  # members of the roster that gave the coordinator any answer in this term
    witnesses: tuple[str, ...] = ()  # of the next roster: they store and vote, and contribute nothing
    latch: Latch | None = None  # from which on every record needs a quorum
    hole: Hole | None = None  # in the contribution of a member that was lost
    admissions: tuple[tuple[str, str], ...] = ()  # of members that are new to the run, in hex

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the proposal's canonical text, in hex."""
        return hashlib.sha256(canonical(self)).hexdigest()

    @cached_property
    def islands(self) -> tuple[str, ...]:
        """Return who contributes, in order; empty for a record that only leases samples or amends settings."""
        return tuple(contribution.island for contribution in self.contributions)

    @property
    def present(self) -> tuple[str, ...]:
        """Return who contributes and takes part in the exchange, in order: all, but for one that was lost."""
        lost = self.hole.island if self.hole is not None else None
        return tuple(island for island in self.islands if island != lost)

    @property
    def tokens(self) -> int:
        """Return the tokens behind all contributions, not capped as their weights are."""
        return sum(contribution.offer.tokens for contribution in self.contributions)


@dataclass(frozen=True)
class Record:
    """Hold one entry of the log: a proposal, and the digest of its result."""

    proposal: Proposal
    payload: str  # SHA-256 of the result's bytes

    @cached_property
    def digest(self) -> str:
        """Return the chain digest: it covers the parent's, and so everything before."""
        return hashlib.sha256(f"{self.proposal.digest} {self.payload}".encode()).hexdigest()


@dataclass(frozen=True)
class Phases:
    """Tell how long a round's coordinator has waited and exchanged: for people, beside the record and not hashed."""

    collect_ms: int = 0  # from the commit before to the *begin* that led to this one: the others trained
    exchange_ms: int = 0  # from that *begin* to the commit; 0: not known


NO_PHASES = Phases()


@dataclass(frozen=True)
class LoggedRecord:
    """Hold a record as the log keeps it: with those whose *done* made it final."""

    record: Record
    stored_by: tuple[str, ...] = ()
    time_ms: int = 0  # when it was appended, by the clock on the wall; of a record that was fetched: where it came from
    phases: Phases = NO_PHASES


def signed_by(owner: str, signature: str, signed: bytes) -> bool:
    """Return whether a signature in hex is that of a public key in hex."""
    try:
        return verify(bytes.fromhex(owner), bytes.fromhex(signature), signed)
    except ValueError:
        return False


def canonical(value: object) -> bytes:
    """Return the one JSON text of a value, the same on every machine, so that it can be hashed."""
    return json.dumps(value, default=_by_name, sort_keys=True, separators=(",", ":")).encode()


def _by_name(value: Any) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def holder_name(island: str, incarnation: int) -> str:
    """Return the name under which an incarnation of an island leases samples.

    Leases belong to an incarnation: what an island held when it died returns to the pool, although the island is back.
    """
    return f"{island}#{incarnation}"


def is_holder(name: str) -> bool:
    """Return whether this is the name of an incarnation of an island, under which it leases samples."""
    island, _, incarnation = name.rpartition("#")
    return bool(island) and incarnation.isascii() and incarnation.isdecimal()


def voters(roster: tuple[str, ...]) -> tuple[str, ...]:
    """Return the members whose *done* counts: all, or the first 32 of more than 64."""
    return roster[:VOTERS] if len(roster) > VOTE_UP_TO else roster


def quorum(roster: tuple[str, ...], present: Iterable[str]) -> bool:
    """Return whether a majority of the roster's voters is present, or exactly half of them with the first."""
    electorate = voters(roster)
    there = set(electorate).intersection(present)
    return 2 * len(there) > len(electorate) or (
        2 * len(there) == len(electorate) and not there.isdisjoint(electorate[:1])
    )
