"""Messages between islands about rounds, and effects that a node asks its driver for. ARCHITECTURE.md has the table."""

from dataclasses import dataclass

from diloco.elastic.protocol.ranges import Ranges
from diloco.elastic.protocol.record import (
    NO_PHASES,
    Amendment,
    Ballot,
    Head,
    Key,
    Latch,
    Offer,
    Phases,
    Proposal,
    Record,
)


@dataclass(frozen=True)
class Held:
    """Name a result that its holder has stored, and the ballot under which it was stored."""

    ballot: Ballot
    record: Record


@dataclass(frozen=True)
class Heartbeat:
    """Announce that the sender is alive, and its head; also the answer to a peer with another head."""

    head: Head  # durable
    promise: Ballot  # for the round that follows this head
    incarnation: int
    sequence: int  # one that comes after a later one changes nothing
    leading: bool = False  # a term of the sender's own is under way
    running: bool = False  # and an attempt in it
    moving: bool = False  # bytes of an exchange have moved at the sender since its last one
    roster_of: str = ""  # the digest of the record whose roster these are places of; "": many do not say
    hears: tuple[int, ...] = ()
    linked: tuple[int, ...] = ()  # those of them that hear the sender, too
    follows: str = ""  # to whom alone it promises
    behind_s: float = 0.0  # until it will have caught up, as it thinks
    write_s: float = 0.0  # what its disk takes to write
    rank: int = 0  # of its chain: 1 if it contains the latched record and nothing without a quorum after it, + forces
    latch: Latch | None = None  # until a record contains it
    amendment: Amendment | None = None  # the next one, where the sender has it
    state_digest: str = ""  # of the vectors at this head, where it is known
    missed: tuple[int, ...] | None = None  # by one that speaks for others, too: whom of the roster it does not hear


@dataclass(frozen=True)
class Collect:
    """Start a term of the sender for the round that follows its head, and ask for promises."""

    head: Head
    term: int


@dataclass(frozen=True)
class Promise:
    """Promise a coordinator to take part in no ballot below its own for this key; the answer to *collect*."""

    key: Key
    term: int
    incarnation: int
    want: int  # samples that the sender would like to hold
    held: Held | None
    amendment: Amendment | None = None  # the next one, where the sender has it
    witness: bool = False
    admission: str = ""  # in hex, of one that has not been a member before


@dataclass(frozen=True)
class Nack:
    """Refuse a *collect* or *begin*, because a higher ballot is promised already."""

    key: Key
    promise: Ballot


@dataclass(frozen=True)
class Follows:
    """Refuse a *collect* because another island should lead; nothing is promised."""

    key: Key
    term: int
    leader: str


@dataclass(frozen=True)
class Ready:
    """Offer progress at the sync point, or progress that an earlier round did not contain."""

    key: Key
    term: int
    offers: tuple[Offer, ...]
    bytes_per_s: int = 0  # of its link; 0: not known


@dataclass(frozen=True)
class Begin:
    """Specify one attempt at a round completely: a proposal to reduce, or a result to adopt."""

    key: Key
    ballot: Ballot
    proposal: Proposal
    members: tuple[str, ...]  # who must hold the result before it is committed
    bytes_per_s: tuple[int, ...]  # of the members' links, for the spans
    adopted: str = ""  # digest of a result that is there already
    holder: str = ""  # and who has it
    first: tuple[tuple[str, int], ...] = ()  # members and rates of the first attempt, of which pages may be kept
    owners: tuple[tuple[int, int, int], ...] = ()  # of the lost member's pages [lo, hi): places among the members


@dataclass(frozen=True)
class Begun:
    """Confirm that the sender takes part in an attempt."""

    key: Key
    ballot: Ballot


@dataclass(frozen=True)
class Done:
    """Report that the sender has stored the result of an attempt."""

    key: Key
    ballot: Ballot
    payload: str  # digest of the result's bytes


@dataclass(frozen=True)
class Halt:
    """Ask a member to give an attempt up, and to answer *failed* with what it has received."""

    key: Key
    ballot: Ballot


@dataclass(frozen=True)
class Received:
    """Report what a member of a failed attempt has received from another one, or made itself, in pages."""

    peer: str
    pages: Ranges  # that this peer was to reduce
    means: Ranges  # of them, those whose mean is here
    whole: bool  # all of its contribution that the reporting member still needs is here


@dataclass(frozen=True)
class Failed:
    """Report that an attempt did not succeed at the sender, and which peer it blames."""

    key: Key
    ballot: Ballot
    blamed: str  # "" where nobody is
    reason: str
    refused: bool = False  # what the blamed one contributed is bad
    amendment: bool = False  # the sender cannot follow the change of settings
    local: bool = False  # the mean is made: others may well have the result
    kept: tuple[Received, ...] = ()  # of each member, the sender included


@dataclass(frozen=True)
class Commit:
    """Announce that a record is final, and whose *done* made it so."""

    key: Key
    head: Head  # after it
    stored_by: tuple[str, ...]
    phases: Phases = NO_PHASES


@dataclass(frozen=True)
class Goodbye:
    """Announce that the sender leaves, so that the others stop waiting for it at once."""

    reason: str = ""


Message = (
    Heartbeat | Collect | Promise | Nack | Follows | Ready | Begin | Begun | Done | Halt | Failed | Commit | Goodbye
)

Answer = Promise | Follows | Ready | Begun | Done | Failed


# What a node asks for, in order. What is to be durable comes before what depends on it.


@dataclass(frozen=True)
class Vow:
    """Hold what an island has promised and stored for the round that follows a head."""

    head: Head
    promise: Ballot
    held: Held | None = None


@dataclass(frozen=True)
class Memory:
    """Hold what a restart must not forget: a vow for each head that a crash could bring back, and for later ones."""

    vows: tuple[Vow, ...] = ()
    term: int = 0  # the highest seen so far, for any key: a ballot's name is never used twice
    latch: Latch | None = None


@dataclass(frozen=True)
class Remember:
    """Ask the driver to store a memory; messages that come after it, but heartbeats, wait until it is durable.

    The driver answers with `remembered` then.
    """

    memory: Memory


@dataclass(frozen=True)
class Send:
    """Ask the driver to send a message to one peer, once everything asked for before is durable."""

    to: str
    message: Message


@dataclass(frozen=True)
class Reduce:
    """Ask the driver to take part in an all-reduce, and to answer with `reduced` or `reduce_failed`."""

    begin: Begin


@dataclass(frozen=True)
class Cancel:
    """Ask the driver to give up the all-reduce of a ballot that is no longer of use."""

    ballot: Ballot


@dataclass(frozen=True)
class FetchResult:
    """Ask the driver to get a result's bytes from their holder, and to answer with `fetched` or `fetch_failed`."""

    holder: str
    record: Record


@dataclass(frozen=True)
class CatchUp:
    """Ask the driver to get the state at this head, or a later one, from this peer and others.

    The driver answers with `caught_up` or `catch_up_failed`.
    """

    peer: str
    head: Head


@dataclass(frozen=True)
class GoBack:
    """Ask the driver to get the state after an earlier record of this island's own log, by the record's digest.

    What came after it is in no history. The driver answers with `went_back` or `cannot_go_back`.
    """

    digest: str


@dataclass(frozen=True)
class Append:
    """Ask the driver to append a committed record to the log, then to apply it to the outer state.

    The driver answers with `stored` when the log is durable up to it.
    """

    record: Record
    stored_by: tuple[str, ...] = ()  # whose *done* made it final
    phases: Phases = NO_PHASES


@dataclass(frozen=True)
class Moved:
    """Report that the head has changed, by a commit or by catching up.

    `switched`: to a state that is not one round further, such as one of a heavier branch.
    """

    switched: bool


@dataclass(frozen=True)
class Note:
    """Report to people what happened, and to which island."""

    kind: str
    peer: str
    text: str


Effect = Remember | Send | Reduce | Cancel | FetchResult | CatchUp | GoBack | Append | Moved | Note
