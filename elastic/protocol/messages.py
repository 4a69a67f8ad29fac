"""What islands say to each other about rounds, and what a node asks its driver to do. ARCHITECTURE.md has the table."""

from dataclasses import dataclass

from diloco.elastic.protocol.record import Amendment, Ballot, Head, Key, Offer, Proposal, Record


@dataclass(frozen=True)
class Held:
    """A result that its holder has stored, and the ballot it was stored under."""

    ballot: Ballot
    record: Record


@dataclass(frozen=True)
class Heartbeat:
    head: Head
    promise: Ballot  # for the round that follows this head
    leading: bool
    incarnation: int
    state_digest: str = ""  # of the vectors at this head, where it is known
    missed: tuple[int, ...] | None = None  # by one that speaks for others, too: whom of the roster it does not hear


@dataclass(frozen=True)
class Collect:
    """The sender starts a term for the round that follows its head."""

    head: Head
    term: int


@dataclass(frozen=True)
class Promise:
    key: Key
    term: int
    incarnation: int
    want: int  # samples that the sender would like to hold
    held: Held | None
    amendment: Amendment | None = None  # the next one, where the sender has it


@dataclass(frozen=True)
class Nack:
    key: Key
    promise: Ballot


@dataclass(frozen=True)
class Ready:
    """At the sync point, or with progress that an earlier round did not contain."""

    key: Key
    term: int
    offers: tuple[Offer, ...]
    bytes_per_s: int = 0  # of its link; 0: not known


@dataclass(frozen=True)
class Begin:
    key: Key
    ballot: Ballot
    proposal: Proposal
    members: tuple[str, ...]  # who must hold the result before it is committed
    bytes_per_s: tuple[int, ...]  # of the members' links, for the spans
    adopted: str = ""  # digest of a result that is there already
    holder: str = ""  # and who has it


@dataclass(frozen=True)
class Done:
    key: Key
    ballot: Ballot
    payload: str  # digest of the result's bytes


@dataclass(frozen=True)
class Failed:
    """An attempt did not come about at the sender."""

    key: Key
    ballot: Ballot
    blamed: str  # "" where nobody is
    reason: str
    refused: bool = False  # what the blamed one contributed is bad
    amendment: bool = False  # the sender cannot follow the change of settings


@dataclass(frozen=True)
class Commit:
    record: Record


@dataclass(frozen=True)
class Goodbye:
    reason: str = ""


Message = Heartbeat | Collect | Promise | Nack | Ready | Begin | Done | Failed | Commit | Goodbye


# What a node asks for, in order. What is to be durable comes before what depends on it.


@dataclass(frozen=True)
class Memory:
    """What a restart must not forget about the round that follows `key.parent`."""

    key: Key
    promise: Ballot
    held: Held | None
    term: int = 0  # the highest seen so far, for any key: a ballot's name is never used twice


@dataclass(frozen=True)
class Remember:
    memory: Memory


@dataclass(frozen=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True)
class Reduce:
    """Take part in the all-reduce; answer with `reduced` or `reduce_failed`."""

    begin: Begin


@dataclass(frozen=True)
class Cancel:
    ballot: Ballot


@dataclass(frozen=True)
class FetchResult:
    """Get these bytes from their holder; answer with `fetched` or `fetch_failed`."""

    holder: str
    record: Record


@dataclass(frozen=True)
class CatchUp:
    """Get the state at this head, or a later one, from this peer and others; answer with `caught_up` or
    `catch_up_failed`."""

    peer: str
    head: Head


@dataclass(frozen=True)
class Append:
    """Committed: into the log, then into the outer state."""

    record: Record


@dataclass(frozen=True)
class Moved:
    """The head is another one: by a commit, or by a move to a heavier branch."""

    switched: bool


@dataclass(frozen=True)
class Note:
    """For people: what happened, and to whom."""

    kind: str
    peer: str
    text: str


Effect = Remember | Send | Reduce | Cancel | FetchResult | CatchUp | Append | Moved | Note
