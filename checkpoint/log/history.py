"""The headers of all rounds that an island has ever committed: a file that only grows, whatever is pruned of the log.

Each line of `history.jsonl` is a `RoundHeader`, or a `Move` to another branch. The log itself is what is durable; a
header is written after its record, without waiting for the disk, and synced before the record is pruned. What a crash
has cost is added again from the log. A line that is torn or no JSON is passed over. Nothing heavy is imported here:
commands that only look read it.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

HISTORY = "history.jsonl"  # in an island's log folder
MOST_ISLANDS = 1 << 16
GIVEN_BYTES = 8 << 20  # of the end of a history, to whoever joins
DIGEST = re.compile(rb'^\{"digest": "([0-9a-f]{64})"')  # each line begins so
SURROGATES = re.compile(r"[\ud800-\udfff]")  # no output takes them
BLOCK = 1 << 20  # of a file that is read from its end
KNOWN = 1 << 16  # the last rounds, at least, that are not written twice
MOST = 2**63
MOST_MS = 2**47  # since 1970: in the year 6429, which every calendar still has

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ContributionHeader:
    """Describe one island's part in a round."""

    island: str  # its peer id
    tokens: int
    steps: int  # inner steps behind it
    weight: int  # in the mean
    loss: float | None = None  # mean training loss behind it; None: not known
    step_ms: int = 0  # what an inner step took; 0: not known
    late: bool = False  # of an earlier phase


@dataclass(frozen=True)
class RoundHeader:
    """Describe one committed round for ever: who contributed what, when, and how the roster changed."""

    digest: str  # the chain digest of its record
    parent: str
    round: int
    time_ms: int  # when this island appended it, by its clock on the wall
    step: int  # the run's clock after it
    fragment: int  # -1: it changes no parameter
    tokens: int
    total_tokens: int  # with all rounds before
    size: int  # of its encoded result, in bytes
    contributions: tuple[ContributionHeader, ...]
    islands: int  # members of the roster after it
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()  # members that gave the coordinator no answer
    amendment: int = 0  # the number of the owner's change; 0: none
    changes: str = ""  # what it changes, as it was signed
    collect_ms: int = 0  # from the commit before to its *begin*, as its coordinator measured; 0: not known
    exchange_ms: int = 0  # and from that to its commit
    added: bool = False  # afterwards, out of order: by whoever gave it, or from the log
    v: int = 1

    @property
    def loss(self) -> float | None:
        """Return the mean training loss behind it, by weight; None where nobody has said one."""
        known = [(each.loss, each.weight) for each in self.contributions if each.loss is not None]
        weights = sum(weight for _, weight in known)
        return sum(loss * weight for loss, weight in known) / weights if weights else None

    def line(self) -> bytes:
        """Return it as a line of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True)
class Move:
    """Say that the chain goes on from another record than the last one that was written: a whole state was taken over.

    Rounds that were written before may have been undone by that. Those that were not are found by parents.
    """

    moved_to: str  # the chain digest of a record
    round: int

    def line(self) -> bytes:
        """Return it as a line of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"


Line = RoundHeader | Move


def header_in(line: object) -> RoundHeader | None:
    """Return the header in a parsed line; None for what is none. Fields that are not known here are ignored.

    Others may have written the line: whatever it holds, nothing is raised, and what is returned can be shown.
    """
    if not isinstance(line, dict):
        return None
    try:
        parts = tuple(ContributionHeader(**_known(ContributionHeader, part)) for part in line["contributions"])
        found = RoundHeader(**{**_known(RoundHeader, line), "contributions": parts})
    except (TypeError, KeyError, AttributeError):
        return None
    times = (found.time_ms, found.collect_ms, found.exchange_ms)
    return found if all(0 <= each < MOST_MS for each in times) else None


def move_in(line: object) -> Move | None:
    """Return the move in a parsed line; None for what is none."""
    if not isinstance(line, dict):
        return None
    try:
        return Move(**_known(Move, line))
    except TypeError:
        return None


def _known(kind: type[ContributionHeader | RoundHeader | Move], line: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line that are known; raise TypeError where one is not what it should be."""
    given = {each.name: line[each.name] for each in fields(kind) if each.name in line}
    for name, value in given.items():
        if not _fits(value, HINTS[kind][name]):
            raise TypeError(f"{name}={value!r}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _fits(value: object, hint: Any) -> bool:
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST
    if hint is bool:
        return isinstance(value, bool)
    if hint is str:
        return isinstance(value, str) and SURROGATES.search(value) is None
    if float in get_args(hint):  # bounded before anything is computed: an integer may have hundreds of digits
        return value is None or (isinstance(value, int | float) and abs(value) < MOST)
    if not isinstance(value, list) or len(value) > MOST_ISLANDS:
        return False
    return str not in get_args(hint) or all(_fits(each, str) for each in value)


HINTS = {kind: get_type_hints(kind) for kind in (ContributionHeader, RoundHeader, Move)}


class HistoryFile:
    """Append headers to the file of a log's folder, each once. A disk that refuses is tried again with the next."""

    def __init__(self, folder: Path, logged: Collection[str] = ()) -> None:
        """Read from the end which of these rounds the file has, at least those of its last block.

        `logged` are the digests of the records that the log still holds. A last line that is torn is cut off before
        anything is added.
        """
        self._path = folder / HISTORY
        self._torn_at: int | None = None
        self._end = ""  # where the chain ends
        self._waiting, self._refused = list[bytes](), False
        found = self._read_back(set(logged)) if self._path.exists() else []
        self._known = dict.fromkeys(reversed(found))  # oldest first
        self._most = max(KNOWN, len(found))

    def _read_back(self, missing: set[str]) -> list[str]:
        """Return the digests of the last rounds, newest first, until none is missing and the chain's end is known."""
        found = list[str]()
        for number, lines in enumerate(_blocks_back(self._path)):
            if not number and lines[0]:
                self._torn_at = self._path.stat().st_size - len(lines[0])
            for line in lines if number else lines[1:]:
                if not self._end and (known := lines_in(line)) and (isinstance(known[0], Move) or not known[0].added):
                    self._end = _digest(known[0])
                if (match := DIGEST.match(line)) is not None and line.endswith(b"}"):
                    found.append(match[1].decode())
            missing.difference_update(found)
            if self._end and not missing:
                break
        return found

    def lacks(self, digest: str) -> bool:
        """Tell whether the header of a record is not there yet."""
        return digest not in self._known

    def append(self, headers: Iterable[RoundHeader]) -> None:
        """Write headers, unless they are there. If one does not follow the one before, that is written, too."""
        for header in headers:
            if header.digest not in self._known:
                self._known[header.digest] = None
                if not header.added:
                    self._go_to(Move(header.parent, header.round - 1))
                    self._end = header.digest
                self._waiting.append(header.line())
        for oldest in list(islice(self._known, max(0, len(self._known) - self._most))):
            del self._known[oldest]
        self._write()

    def move(self, to: Move) -> None:
        """Write that the chain goes on from another record, unless it ends there."""
        self._go_to(to)
        self._write()

    def _go_to(self, to: Move) -> None:
        if self._end not in ("", to.moved_to):
            self._waiting.append(to.line())
        self._end = to.moved_to

    def _write(self) -> None:
        if not self._waiting:
            return
        lines = b"".join(self._waiting)
        try:
            with self._path.open("ab", buffering=0) as file:
                if self._torn_at is not None:
                    file.truncate(self._torn_at)
                self._torn_at = file.seek(0, os.SEEK_END)  # if anything fails from here on, half a line may be there
                if file.write(lines) < len(lines):
                    raise OSError("only a part of them was written")
                self._torn_at = None
        except OSError as error:
            if not self._refused:
                log.warning("%s: headers cannot be written now: %s; they wait", self._path, error)
            self._refused = True
            return
        self._waiting.clear()
        self._refused = False

    def sync(self) -> None:
        """Wait until everything is on the disk; raise OSError if something is not even written."""
        if self._waiting:
            raise OSError(f"{len(self._waiting)} headers could not be written to {self._path}")
        if self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())


def _blocks_back(path: Path) -> Iterator[list[bytes]]:
    """Yield a file's lines from the last one to the first, some at a time; the first of all is what follows the last
    end of a line."""
    with path.open("rb") as file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at:
            size = min(at, BLOCK)
            at -= size
            file.seek(at)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            if whole := lines if at else [rest, *lines]:
                yield whole[::-1]


def _digest(line: Line) -> str:
    """Return where the chain is with this line."""
    return line.moved_to if isinstance(line, Move) else line.digest


def read_history(folder: Path) -> list[Line]:
    """Return what the file of a log's folder says, in the order in which it was written; nothing without a file."""
    try:
        return lines_in((folder / HISTORY).read_bytes())
    except FileNotFoundError:
        return []


def read_headers(folder: Path) -> list[RoundHeader]:
    """Return all headers of a log's folder in the order in which they were written; none where there is no file."""
    return [line for line in read_history(folder) if isinstance(line, RoundHeader)]


def end_of_history(folder: Path) -> bytes | None:
    """Return the last headers of a log's folder as they were written, as many as are given to a newcomer."""
    if not (folder / HISTORY).exists():
        return None
    with (folder / HISTORY).open("rb") as file:
        skip = max(0, os.fstat(file.fileno()).st_size - GIVEN_BYTES)
        file.seek(skip)
        return file.read().partition(b"\n")[2] if skip else file.read()


def headers_in(raw: bytes) -> list[RoundHeader]:
    """Return the headers in these lines; what is none is passed over."""
    return [line for line in lines_in(raw) if isinstance(line, RoundHeader)]


def lines_in(raw: bytes) -> list[Line]:
    """Return the headers and moves in these lines; what is neither is passed over."""
    found: list[Line] = []
    for line in raw.split(b"\n"):
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn, nested without end, or the empty end
        if (known := header_in(tree) or move_in(tree)) is not None:
            found.append(known)
    return found


def chain_of(lines: Iterable[Line], others: Iterable[RoundHeader] = ()) -> list[RoundHeader]:
    """Return the chain that ends where these lines end, oldest first.

    What is missing in it, because a whole state was taken over, is taken from `others` where they have it. Else it
    begins after the gap: what was written before a move may be undone. Where there is a gap and no move, a line was
    damaged, or written by an earlier diloco: there the chain goes on with the last round before it.
    """
    own = list(lines)
    headers = [line for line in own if isinstance(line, RoundHeader)]
    known = {header.digest: header for header in (*others, *sorted(headers, key=lambda header: not header.added))}
    first, chain = _end_of(own, known), list[RoundHeader]()
    places = {line.digest: place for place, line in enumerate(own) if isinstance(line, RoundHeader) and not line.added}
    place = len(own)  # of the oldest line of its own in the chain
    while first is not None and (not chain or first.round < chain[-1].round):
        chain.append(first)
        place = min(place, places.get(first.digest, place))
        first = known.get(first.parent) or _before_gap(own[:place], first)
    return chain[::-1]


def _end_of(own: list[Line], known: dict[str, RoundHeader]) -> RoundHeader | None:
    """Return with which round the chain of these lines ends, as far as that is known."""
    in_order = [line for line in own if isinstance(line, Move) or not line.added]
    last = (in_order or own)[-1] if own else None
    return known.get(last.moved_to) if isinstance(last, Move) else last


def _before_gap(own: list[Line], first: RoundHeader) -> RoundHeader | None:
    """Return the last round before one whose parent is not known; None where a move lies between."""
    for line in reversed(own):
        if isinstance(line, Move):
            return None
        if not line.added and line.round < first.round and line.total_tokens <= first.total_tokens - first.tokens:
            return line
    return None
