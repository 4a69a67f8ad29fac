"""Parse what hits islands and their network, and when. Pure.

`--kill 1@60s`, `--stop 2@30s..45s`, `--cut eu|us@90s..120s`, `--join 1@100s`, `--slow 3x2.5`. Time counts from the
moment when the first islands all train.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import NoReturn

from diloco.errors import ConfigError
from diloco.simulate.real.topology import Topology, between, island_name
from diloco.units import is_whole, parse_duration

HOW = {
    "kill": "1@60s: island 1 at 60 seconds",
    "stop": "2@30s..45s: island 2 from 30 to 45 seconds",
    "cut": "eu|us@90s..120s: regions, or islands such as 1,2|3",
    "join": "1@100s: one more island at 100 seconds",
    "slow": "3x2.5: steps of island 3 take 2.5 times as long",
}
MAX_SLOW = 1000.0


@dataclass(frozen=True)
class Fault:
    """Describe one fault: its kind, the islands that it hits (counted from 1), and when, in seconds."""

    kind: str  # a key of HOW
    said: str  # as it was given
    islands: tuple[int, ...]
    at_s: float = 0.0
    until_s: float = math.inf
    others: tuple[int, ...] = ()  # the other side of a cut
    factor: float = 1.0  # of slow

    @property
    def pairs(self) -> set[frozenset[int]]:
        """Return the pairs of islands that a cut separates."""
        return between(self.islands, self.others)

    def overlaps(self, other: "Fault") -> bool:
        """Return whether there is a moment at which both faults are in effect."""
        return self.at_s < other.until_s and other.at_s < self.until_s

    def describe(self) -> str:
        """Describe the fault in words, with islands' names, for the output and the report."""
        names, until = ", ".join(map(island_name, self.islands)), f" until {self.until_s:g} s"
        match self.kind:
            case "kill":
                return f"kill -9 {names}"
            case "stop":
                return f"{names} is stopped{until}"
            case "cut":
                return f"{names} and {', '.join(map(island_name, self.others))} are cut off from each other{until}"
            case "join":
                return f"{names} joins"
        return f"{names}: steps take {self.factor:g} times as long"


def joining(texts: Iterable[str]) -> int:
    """Count the islands that `--join` starts later."""
    return sum(_count(text) for text in texts)


def parse_faults(given: Mapping[str, Iterable[str]], topology: Topology) -> tuple[Fault, ...]:
    """Parse the texts of each kind into faults, earliest first.

    Islands that join are the topology's last. What cannot happen together is refused.
    """
    first = topology.islands - joining(given.get("join", ()))
    if first < 1:
        raise ConfigError(f"--join: of {topology.islands} islands at least one has to be there from the beginning")
    faults: list[Fault] = []
    for text in given.get("join", ()):
        at_s, until_s = _times("join", text)
        count = _count(text)
        faults.append(Fault("join", f"--join {text}", tuple(range(first + 1, first + count + 1)), at_s, until_s))
        first += count
    for kind in ("kill", "stop", "cut", "slow"):
        faults += [_parse(kind, text, topology) for text in given.get(kind, ())]
    _refuse_nonsense(faults)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _parse(kind: str, text: str, topology: Topology) -> Fault:
    said = f"--{kind} {text}"
    if kind == "slow":
        who, _, factor = text.partition("x")
        if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", factor.strip()) or not 1 <= float(factor) <= MAX_SLOW:
            _refuse(kind, text, f"{factor.strip()!r} is no number from 1 to {MAX_SLOW:g}")
        return Fault(kind, said, (_island(kind, text, who, topology),), factor=float(factor))
    at_s, until_s = _times(kind, text)
    who = text.partition("@")[0]
    if kind == "cut":
        return _cut(said, text, who, at_s, until_s, topology)
    return Fault(kind, said, (_island(kind, text, who, topology),), at_s, until_s)


def _cut(said: str, text: str, who: str, at_s: float, until_s: float, topology: Topology) -> Fault:
    names = who.split("|")
    if len(names) != 2:
        _refuse("cut", text, "a cut has two sides")
    one, other = (_side(text, name, topology) for name in names)
    if both := sorted(set(one) & set(other)):
        _refuse("cut", text, f"{island_name(both[0])} is on both sides")
    return Fault("cut", said, one, at_s, until_s, other)


def _side(text: str, names: str, topology: Topology) -> tuple[int, ...]:
    """Parse one side of a cut: regions and islands, separated by commas."""
    found: list[int] = []
    for name in (name.strip() for name in names.split(",")):
        found += topology.in_region(name) if name else ()
        if not name or not topology.in_region(name):
            found.append(_island("cut", text, name, topology))
    return tuple(sorted(set(found)))


def _island(kind: str, text: str, name: str, topology: Topology) -> int:
    """Parse an island's number, or its name; ConfigError if there is none such."""
    number = name.strip().removeprefix("island-")
    if not is_whole(number) or not 1 <= int(number) <= topology.islands:
        regions = sorted({site.region for site in topology.sites} - {""})
        known = f"regions {', '.join(regions)} and " if regions and kind == "cut" else ""
        _refuse(kind, text, f"there is no island {name.strip()!r}, only {known}islands 1 to {topology.islands}")
    return int(number)


def _count(text: str) -> int:
    """Parse how many islands a `--join` starts."""
    number = text.partition("@")[0].strip()
    if not is_whole(number) or int(number) < 1:
        _refuse("join", text, f"{number!r} is no number of islands")
    return int(number)


def _times(kind: str, text: str) -> tuple[float, float]:
    """Parse when a fault begins and ends, in seconds; one that happens at a moment ends never."""
    _, at, when = text.partition("@")
    if not at:
        _refuse(kind, text, "it does not say when")
    begin, dots, end = when.partition("..")
    lasts = kind in ("stop", "cut")
    if bool(dots) != lasts:
        _refuse(kind, text, "it needs a beginning and an end" if lasts else "this happens at one moment")
    at_s = _seconds(kind, text, begin)
    until_s = _seconds(kind, text, end) if lasts else math.inf
    if until_s <= at_s:
        _refuse(kind, text, "it ends before it begins")
    return at_s, until_s


def _seconds(kind: str, text: str, moment: str) -> float:
    try:
        return parse_duration(moment.strip())
    except ValueError as error:
        _refuse(kind, text, f"{moment.strip()!r}: {error}")


def _refuse_nonsense(faults: list[Fault]) -> None:
    """Refuse faults that cannot happen after, or during, other faults."""
    joins = {island: fault for fault in faults if fault.kind == "join" for island in fault.islands}
    for fault in faults:
        late = [joins[island] for island in fault.islands if island in joins and fault.kind in ("kill", "stop")]
        if late and fault.at_s <= late[0].at_s:
            raise ConfigError(f"{fault.said}: that island is not there before {late[0].said}")
    for one, other in combinations(faults, 2):
        kinds = {one.kind, other.kind}
        if kinds == {"cut"} and one.overlaps(other) and one.pairs & other.pairs:
            pair = " and ".join(map(island_name, sorted(min(one.pairs & other.pairs, key=sorted))))
            raise ConfigError(f"{other.said}: {pair} are cut off from each other then already by {one.said}")
        same = set(one.islands) & set(other.islands)
        if same and kinds == {"slow"}:
            raise ConfigError(f"{other.said}: {one.said} says something else about that island")
        if same and kinds == {"kill"} and one.at_s == other.at_s:
            raise ConfigError(f"{other.said}: {one.said} kills it at that moment already")
        if same and "stop" in kinds and kinds <= {"stop", "kill"}:
            stop, second = (one, other) if one.kind == "stop" else (other, one)
            end = second.until_s if second.kind == "stop" else second.at_s
            if second.at_s < stop.until_s and stop.at_s <= end:
                raise ConfigError(f"{second.said}: that island is stopped then by {stop.said}")


def _refuse(kind: str, text: str, reason: str) -> NoReturn:
    """Raise ConfigError with the reason, and how this option is written."""
    raise ConfigError(f"--{kind} {text}: {reason}; write --{kind} {HOW[kind]}")
