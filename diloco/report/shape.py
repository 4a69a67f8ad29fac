"""The shape of what a page about a run shows: of a dashboard, of `diloco report`, and of `simulate`'s report.

A dashboard's page gets a `View` that grows: rows are only ever added to its series, and `now` is replaced. A page in a
file gets one whole `View`. The drawings (`assets/parts.js`) take curves, rows, links and bars, which `run.js` makes of
a view; `simulate` hands them over as they are here. Times are seconds since 1970, or since the simulation's zero.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.checkpoint.log.history import RoundHeader
from diloco.report.status import IslandStatus, RunStatus
from diloco.report.tables import harmless

COLUMNS = (
    "round", "time", "step", "total_tokens", "total_bytes", "loss", "collect_s", "exchange_s", "size", "fragment",
    "islands", "who", "joined", "left", "changes", "digest",
)  # fmt: skip
MOST_ROUNDS = 4000  # that a page is given at once: of older ones it gets every second, third, …
WHOLE_ROUNDS = 1000  # the last ones, which it gets all
MOST = {"waits": 20_000, "marks": 2_000, "flow": 900, "validation": 4_000}  # rows that are kept, here and by a page
CONTRIBUTED, LATE, SILENT, ABSENT = "c", "l", "s", "."
SHOWN = (  # of an island's status
    "name", "state", "since", "waiting_for", "cause", "text", "member", "leads", "round", "step", "loss",
    "tokens_per_s", "share", "contributed", "bytes_sent", "bytes_received", "link_bytes_per_s",
    "link_limit_bytes_per_s", "reaches_me", "device", "disk",
)  # fmt: skip
RUN_SHOWN = (
    "run", "at", "round", "step", "steps", "phase", "phase_since", "round_s", "eta_s", "rounds", "loss",
    "validation_loss", "silence_s", "finished", "ended",
)  # fmt: skip

Row = list[Any]


@dataclass(frozen=True)
class Curve:
    """Hold losses, and the steps, tokens, seconds and bytes until each of them; None where that is not known."""

    name: str
    kind: str  # training or validation
    step: Sequence[float | None]
    tokens: Sequence[float | None]
    seconds: Sequence[float | None]
    bytes: Sequence[float | None]
    loss: Sequence[float | None]


@dataclass(frozen=True)
class TimelineRow:
    """Hold what one island did: stretches of time with a state, and below them when it was sending."""

    name: str
    spans: Sequence[tuple[float, float, str]]
    sending: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Mark:
    """Point at a moment of the timeline, or a stretch of it: a fault, or what happened to an island."""

    at: float
    what: str
    text: str
    island: str = ""
    until: float | None = None


@dataclass(frozen=True)
class LinkUse:
    """Hold what an island's link carried and could have carried, in bits per second; limits hold from a time on."""

    name: str
    seconds: Sequence[float]
    up: Sequence[float]
    down: Sequence[float]
    limits: Sequence[tuple[float, float, float]]
    end_s: float


@dataclass(frozen=True)
class Bar:
    """Hold a share from 0 to 1, measured or computed."""

    name: str
    share: float
    computed: bool = False


@dataclass(frozen=True)
class View:
    """Hold what a page shows of a real run, or what came since it was last told (`reset` is False then)."""

    reset: bool
    islands: Sequence[str]  # names, by the numbers that rows have; the end of an id where no name is known
    rounds: Sequence[Row]  # in the order of COLUMNS
    waits: Sequence[Row]  # island, begin, end
    marks: Sequence[Row]  # time, island or -1, what, text
    flow: Sequence[Row]  # time, bytes per second that all islands send and receive
    validation: Sequence[Row]  # round, step, time, loss
    now: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**vars(self), "columns": COLUMNS, "most": {**MOST, "rounds": MOST_ROUNDS, "whole": WHOLE_ROUNDS}}


class IslandNumbers:
    """Number islands by when they were first seen, so that rows can name them briefly."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, peer: str) -> int:
        """Return an island's number; one that is new gets the next."""
        return self._numbers.setdefault(peer, len(self._numbers))

    def names(self, name: Callable[[str], str]) -> list[str]:
        """Return what the islands are called, in the order of their numbers."""
        return [harmless(name(peer)) for peer in self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)


class RoundRows:
    """Make rows of headers, with the sums up to each."""

    def __init__(self, numbers: IslandNumbers) -> None:
        self._numbers, self._bytes = numbers, 0

    def row(self, header: RoundHeader, changes: str) -> Row:
        """Return the row of the round that follows."""
        self._bytes += header.size
        joined, left = ([self._numbers.of(peer) for peer in peers] for peers in (header.joined, header.left))
        who = {self._numbers.of(peer): SILENT for peer in header.silent}
        who |= {self._numbers.of(part.island): LATE if part.late else CONTRIBUTED for part in header.contributions}
        letters = "".join(who.get(number, ABSENT) for number in range(len(self._numbers)))
        loss = header.loss
        return [
            header.round, header.time_ms / 1000, header.step, header.total_tokens, self._bytes,
            None if loss is None else round(loss, 5), header.collect_ms / 1000, header.exchange_ms / 1000, header.size,
            header.fragment, header.islands, letters.rstrip(ABSENT), joined, left, harmless(changes),
            header.digest[:16],
        ]  # fmt: skip


def thinned(rounds: Sequence[Row], most: int = MOST_ROUNDS, whole: int = WHOLE_ROUNDS) -> Sequence[Row]:
    """Return at most so many rounds: all of the last ones, and of older ones every second, third, …"""
    if len(rounds) <= most:
        return rounds
    older = rounds[:-whole]
    stride = -(-len(older) // (most - whole))
    return [*older[::stride], *rounds[-whole:]]


def now_of(
    status: RunStatus | None, why: Sequence[str], more: Callable[[IslandStatus], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what a page shows of the present: the run's status, its islands in the order of names, and sentences.

    `more` returns what is known of an island besides its status: its number, at least.
    """
    if status is None:
        return {"islands": [], "why": list(map(harmless, why))}
    told = {name: getattr(status, name) for name in RUN_SHOWN}
    islands = sorted(status.islands, key=lambda each: (_natural(each.name), each.island))
    return {**told, "islands": [{**_island(each), **more(each)} for each in islands], "why": list(map(harmless, why))}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts names so that island-2 comes before island-10."""
    return [(int(part[:9]), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _island(each: IslandStatus) -> dict[str, Any]:
    """Return the fields that are shown and known."""
    values = {name: getattr(each, name) for name in SHOWN}
    return {name: value for name, value in values.items() if value not in (None, "", (), False)}
