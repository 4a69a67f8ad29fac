"""What the segments of an island's log hold: records with the bytes of their results, promises, digests of states.

Records form chains by their parents' digests. An island only ever moves to a greater head, so of two records with one
parent the one that was written last counts. The bytes of a result come before its record, and in the same segment.
"""

import hashlib
import json
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeVar, get_type_hints

from diloco.checkpoint.log.segments import ByteRange, Damage, Frame, read_body, scan, segment_paths
from diloco.checkpoint.log.writing import canonical
from diloco.errors import SaveError

T = TypeVar("T")
FORMAT = 1
NOTHING = hashlib.sha256(b"").hexdigest()  # the result of a record that changes no vector


@dataclass(frozen=True)
class Entry:
    """Hold a committed record, opaque here: header, digest, parent's digest, and the digest of the result's bytes."""

    round: int
    digest: str
    parent: str
    header: bytes
    payload: str  # name of the bytes in the library: their SHA-256


class Kind(IntEnum):
    """Number the kinds of frames in a segment."""

    HEADER = 1
    MEMORY = 2  # what a restart must not forget: promises, a result that is held
    PAYLOAD = 3
    RECORD = 4
    STATE = 5  # digest of all vectors at a head


@dataclass(frozen=True)
class Header:
    """Open a segment, by naming its run and the head that its records follow."""

    genesis: str
    base: str  # the head that its records follow
    round: int
    format: int = FORMAT


@dataclass(frozen=True)
class Trouble:
    """Describe damage in a segment. `round` is that of the record concerned; None where it cannot be known."""

    path: Path
    text: str
    round: int | None = None
    torn: int | None = None  # cut the file here

    def __str__(self) -> str:
        which = "" if self.round is None else f", round {self.round}"
        return f"{self.path.name}{which}: {self.text}"


@dataclass
class Journal:
    """Hold an index of a log: records, where the bytes of their results lie, digests of states, and damage."""

    entries: dict[str, Entry] = field(default_factory=dict)
    children: dict[str, str] = field(default_factory=dict)
    payloads: dict[str, ByteRange] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)  # digests of vectors, by the head they belong to
    headers: dict[Path, Header] = field(default_factory=dict)
    memory: bytes | None = None
    troubles: list[Trouble] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Journal":
        """Read the segments in a folder and check every byte; nothing is changed."""
        journal, damages = cls(), []
        for path in segment_paths(folder):
            found = scan(path)
            for frame in found.frames:
                journal.take(frame.kind, frame.head, frame.body)
            newest = next(reversed(journal.entries.values())).round if journal.entries else 0
            damages += [(damage, newest) for damage in found.damages]
            if found.torn is not None:
                size = path.stat().st_size - found.torn
                text = f"its last {size} bytes are torn: their writer died, or they are damaged"
                journal.troubles.append(Trouble(path, text, torn=found.torn))
        rounds = {entry.payload: entry.round for entry in journal.entries.values()}
        journal.troubles += [_trouble(damage, rounds, newest) for damage, newest in damages]
        return journal

    def take(self, kind: int, head: bytes, body: ByteRange) -> None:
        """Add a frame that is whole to the index; frames come in the order of writing."""
        try:
            self._take(kind, head, body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # whole, and yet no diloco has written it
            raise SaveError(f"{body.path} is no log of a diloco run ({type(error).__name__})") from None

    def _take(self, kind: int, head: bytes, body: ByteRange) -> None:
        match kind:
            case Kind.HEADER:
                tree = json.loads(head)
                if (was := tree["format"]) != FORMAT:
                    raise SaveError(f"{body.path} has format {was}, this diloco writes {FORMAT}: use the same version")
                self.headers[body.path] = _checked(Header(**tree))
            case Kind.MEMORY:
                self.memory = head
            case Kind.PAYLOAD:
                self.payloads[head.decode()] = body
            case Kind.RECORD:
                if (raw := read_body(body)) is not None:
                    self.add(_checked(Entry(header=raw, **json.loads(head))))
            case Kind.STATE:
                version, digest = head.decode().split()
                self.states[version] = digest

    def add(self, entry: Entry) -> None:
        """Add a record, which from now on is the one that follows its parent."""
        self.entries.pop(entry.digest, None)
        self.entries[entry.digest] = entry
        self.children[entry.parent] = entry.digest

    def has(self, payload: str) -> bool:
        """Tell whether the bytes of a result are here; those of an empty result always are."""
        return payload == NOTHING or payload in self.payloads

    def payload(self, digest: str) -> bytes | None:
        """Return the bytes of a result; None where they are missing or not what was written."""
        if digest == NOTHING:
            return b""
        place = self.payloads.get(digest)
        raw = None if place is None else read_body(place)
        return raw if raw is not None and hashlib.sha256(raw).hexdigest() == digest else None

    def chain(self, version: str) -> list[Entry]:
        """List the records that follow this head, as far as the bytes of their results are here."""
        found: list[Entry] = []
        while (digest := self.children.get(version)) is not None:
            entry = self.entries[digest]
            if not self.has(entry.payload) or len(found) == len(self.entries):  # records that follow each other
                break
            found.append(entry)
            version = digest
        return found

    def leading_to(self, head: str) -> list[Entry]:
        """List the records that end with this head, oldest first, as far back as there are any."""
        found: list[Entry] = []
        while (entry := self.entries.get(head)) is not None and len(found) < len(self.entries):
            found.append(entry)
            head = entry.parent
        return found[::-1]

    def broken_after(self, versions: list[str], head: str) -> str | None:
        """Return the head after which something is missing on the way to this head; None if nothing is.

        The way begins at one of the snapshots of these versions, oldest first. Where an island took another head over
        as a whole, a segment begins that no record leads to: that is no damage.
        """
        leading = self.leading_to(head)
        first = leading[0].parent if leading else head
        on_chain = {first, *(entry.digest for entry in leading)}
        begun = first in versions or any(header.base == first for header in self.headers.values())
        before = [version for version in versions if version not in on_chain]
        starts = [version for version in versions if version in on_chain][:1] if begun else before[-1:]
        if not starts:
            return None
        last = [*starts, *(entry.digest for entry in self.chain(starts[0]))][-1]
        return None if last == head else last

    def forget(self, path: Path) -> None:
        """Remove the header and the results of a segment that was deleted; its records stay in the index."""
        self.headers.pop(path, None)
        for digest in [digest for digest, place in self.payloads.items() if place.path == path]:
            del self.payloads[digest]


def _checked(frame: T) -> T:
    """Return a frame's content; raise TypeError unless its values have their types."""
    if any(type(getattr(frame, name)) is not hint for name, hint in get_type_hints(type(frame)).items()):
        raise TypeError("a value has another type")
    return frame


def header_frame(header: Header) -> bytes:
    """Encode a segment's header, as the head of the segment's first frame."""
    return canonical(vars(header))


def record_frame(entry: Entry) -> bytes:
    """Encode an entry as the head of its frame; the record itself is the frame's body."""
    return canonical({name: value for name, value in vars(entry).items() if name != "header"})


def _round_of(head: bytes) -> int | None:
    try:
        number = json.loads(head)["round"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return number if type(number) is int else None


def _trouble(damage: Damage, rounds: dict[str, int], newest: int) -> Trouble:
    path, where = damage.path, f"damaged at byte {damage.offset}"
    match damage.frame:
        case None:
            return Trouble(path, f"{where}, after the record of round {newest}")
        case Frame(Kind.PAYLOAD, head):
            return Trouble(path, f"the bytes of a result are {where}", rounds.get(head.decode(errors="replace")))
        case Frame(Kind.RECORD, head):
            return Trouble(path, f"a record is {where}", _round_of(head))
    return Trouble(path, where)
