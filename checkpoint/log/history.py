"""The headers of all rounds that an island has ever committed: a file that only grows, whatever is pruned of the log.

Each line of `history.jsonl` is a `RoundHeader`. The log itself is what is durable; a header is written after its
record, without waiting for the disk, and synced before the record is pruned. What a crash has cost is added again from
the log. A line that is torn or no JSON is passed over. Nothing heavy is imported here: commands that only look read it.
"""

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

HISTORY = "history.jsonl"  # in an island's log folder
MOST_ISLANDS = 1 << 16
GIVEN_BYTES = 8 << 20  # of the end of a history, to whoever joins
DIGEST = re.compile(rb'^\{"digest": "([0-9a-f]{64})"')  # each line begins so
SURROGATES = re.compile(r"[\ud800-\udfff]")  # no output takes them
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


def _known(kind: type[ContributionHeader] | type[RoundHeader], line: dict[str, Any]) -> dict[str, Any]:
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


HINTS = {kind: get_type_hints(kind) for kind in (ContributionHeader, RoundHeader)}


class HistoryFile:
    """Append headers to the file of a log's folder, each once. A disk that refuses is tried again with the next."""

    def __init__(self, folder: Path) -> None:
        """Read which rounds the file has. A last line that is torn is cut off before anything is added."""
        self._path = folder / HISTORY
        whole = self._path.read_bytes() if self._path.exists() else b""
        end = whole.rfind(b"\n") + 1
        self._torn_at = end if end < len(whole) else None
        found = (DIGEST.match(line) for line in whole[:end].split(b"\n"))
        self._known = {match[1].decode() for match in found if match is not None}
        self._waiting: list[RoundHeader] = []

    def lacks(self, digest: str) -> bool:
        """Tell whether the header of a record is not there yet."""
        return digest not in self._known

    def append(self, header: RoundHeader) -> None:
        """Write a header, unless it is there."""
        if header.digest in self._known:
            return
        self._known.add(header.digest)
        self._waiting.append(header)
        lines = b"".join(each.line() for each in self._waiting)
        try:
            with self._path.open("ab", buffering=0) as file:
                if self._torn_at is not None:
                    file.truncate(self._torn_at)
                    self._torn_at = None
                at = file.seek(0, os.SEEK_END)
                if file.write(lines) < len(lines):
                    file.truncate(at)
                    return
        except OSError as error:
            log.warning("%s: the header of round %d is not written yet: %s", self._path, header.round, error)
            return
        self._waiting.clear()

    def sync(self) -> None:
        """Wait until everything is on the disk; raise OSError if something is not even written."""
        if self._waiting:
            raise OSError(f"{len(self._waiting)} headers could not be written to {self._path}")
        if self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())


def read_headers(folder: Path) -> list[RoundHeader]:
    """Return all headers of a log's folder in the order in which they were written; none where there is no file."""
    try:
        return headers_in((folder / HISTORY).read_bytes())
    except FileNotFoundError:
        return []


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
    found: list[RoundHeader] = []
    for line in raw.split(b"\n"):
        try:
            header = header_in(json.loads(line))
        except (ValueError, RecursionError):
            continue  # torn, nested without end, or the empty end
        if header is not None:
            found.append(header)
    return found


def chain_of(headers: Iterable[RoundHeader], others: Iterable[RoundHeader] = ()) -> list[RoundHeader]:
    """Return the chain that ends with the last of these headers, oldest first.

    What is missing in it, because a whole state was taken over, is taken from `others` where they have it; else the
    chain goes on with the last round before the gap.
    """
    own = list(headers)
    if not own:
        return []
    known = {header.digest: header for header in (*others, *own)}
    chain = [own[-1]]
    while True:
        first = chain[-1]
        before = known.get(first.parent) or next((each for each in reversed(own) if each.round < first.round), None)
        if before is None or before.round >= first.round:
            return chain[::-1]
        chain.append(before)
