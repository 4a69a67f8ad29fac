"""Describe where islands are and how they are connected: rates of each, which may change over time, paths of each pair.

People write it as YAML, and every mistake is reported with its line:

regions:
  eu: {up: 50mbit, down: 100mbit, delay: 5ms}       # delay: between two islands of the region
  us: {up: 20mbit, delay: 10ms, changes: [{at: 60s, up: 5mbit}, {at: 90s, up: 20mbit}]}
islands: [eu, eu, us, {region: us, up: 10mbit}]     # island-1, island-2, …
paths:
  - {between: [eu, us], delay: 45ms, jitter: 5ms, loss: 0.1%, stall: 200ms}
  - {between: [1, 2], delay: 1ms}                   # two islands; `cut: true`: never connected
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path as FilePath
from typing import Any, NoReturn

import yaml

from diloco.comm.transport.link import Path
from diloco.config.file import reading_yaml
from diloco.errors import ConfigError
from diloco.units import is_whole, parse_delay, parse_duration, parse_rate, parse_share

MAX_ISLANDS = 64
ISLAND_KEYS = ("up", "down", "changes")
PATH_KEYS = ("delay", "jitter", "loss", "stall")

Keys = tuple[str, ...]
Pair = frozenset[int]


def island_name(number: int) -> str:
    """Return an island's name by its number, from 1."""
    return f"island-{number}"


@dataclass(frozen=True)
class Rates:
    """Hold the rates of an island's link, in bits per second."""

    up_bits_per_s: float
    down_bits_per_s: float


@dataclass(frozen=True)
class Site:
    """Describe one island's region and link. `changes` are rates from a moment on, earliest first."""

    region: str
    rates: Rates
    changes: tuple[tuple[float, Rates], ...] = ()

    def rates_at(self, seconds: float) -> Rates:
        """Return the rates at this time, in seconds since all islands train."""
        passed = [rates for at_s, rates in self.changes if at_s <= seconds]
        return passed[-1] if passed else self.rates


@dataclass(frozen=True)
class Topology:
    """Describe all islands and paths. Islands count from 1, as in their names; pairs without a path never connect."""

    sites: tuple[Site, ...]
    paths: Mapping[Pair, Path] = field(default_factory=dict)

    @classmethod
    def uniform(cls, islands: int, bits_per_s: float, delay_s: float) -> "Topology":
        """Make islands with equal links, and the same one-way delay between any two of them."""
        sites = (Site("", Rates(bits_per_s, bits_per_s)),) * islands
        return cls(sites, {pair: Path(delay_s) for pair in pairs(islands)})

    @property
    def islands(self) -> int:
        """Return how many there are, those that join later included."""
        return len(self.sites)

    def site(self, island: int) -> Site:
        """Return where an island is; the first one has number 1."""
        return self.sites[island - 1]

    def in_region(self, name: str) -> tuple[int, ...]:
        """List the numbers of a region's islands; none if there is no such region."""
        return tuple(number for number, site in enumerate(self.sites, start=1) if site.region == name)

    @property
    def unconnected(self) -> list[Pair]:
        """List the pairs that can never reach each other directly."""
        return [pair for pair in pairs(self.islands) if pair not in self.paths]

    def reachable(self, island: int) -> set[int]:
        """Return the islands that can be reached from this one, by way of others too, itself included."""
        found, new = {island}, {island}
        while new:
            new = {other for pair in self.paths if pair & new for other in pair} - found
            found |= new
        return found


def pairs(islands: int) -> list[Pair]:
    """List all pairs of so many islands."""
    return [frozenset(pair) for pair in combinations(range(1, islands + 1), 2)]


def between(one: Iterable[int], other: Iterable[int]) -> set[Pair]:
    """Return the pairs that lead from one group to the other; an island is in no pair with itself."""
    return {frozenset((a, b)) for a in one for b in other if a != b}


@dataclass(frozen=True)
class Region:
    """Hold what a region sets for its islands, as it was written."""

    rates: dict[str, float]
    changes: tuple[tuple[float, dict[str, float]], ...]
    path: Path  # between two islands in it


def read_topology(path: FilePath) -> Topology:
    """Read a topology from a YAML file; ConfigError names the line of a mistake."""
    with reading_yaml(path, hint="a checkout has examples/topology.yaml"):
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    if root is None:
        raise ConfigError(f"{path}: is empty: it needs `regions` and `islands`")
    return Reader(path).topology(root)


def positive_rate(text: str) -> float:
    """Parse a rate in bits per second that is above zero."""
    if text.lstrip().startswith("-"):
        raise ValueError("a rate cannot be negative")
    rate = parse_rate(text)
    if not rate:
        raise ValueError("a link without any rate carries nothing; for a while: --cut")
    return rate


class Reader:
    """Convert YAML nodes to a topology, so that every mistake can be reported with its line."""

    _regions: dict[str, Region]
    _bare: Topology  # without paths

    def __init__(self, path: FilePath) -> None:
        self._path = path

    def topology(self, root: yaml.Node) -> Topology:
        """Convert the whole file; refuse one in which island-1 cannot reach all others, if only through others."""
        parts = self._fields(root, ("regions", "islands", "paths"), needed=("regions", "islands"))
        self._regions = {name: self._region(name, node) for name, node in self._fields(parts["regions"]).items()}
        nodes = self._items(parts["islands"])
        if not 1 <= len(nodes) <= MAX_ISLANDS:
            self._refuse(parts["islands"], f"{len(nodes)} islands: 1 to {MAX_ISLANDS} can run on one machine")
        sites = tuple(map(self._site, nodes))
        self._bare = Topology(sites)
        listed = self._items(parts["paths"]) if "paths" in parts else []
        topology = Topology(sites, self._paths(listed, parts["islands"]))
        if apart := set(range(1, len(sites) + 1)) - topology.reachable(1):
            names = ", ".join(map(island_name, sorted(apart)))
            self._refuse(parts.get("paths", root), f"this cannot connect: no way leads from island-1 to {names}")
        return topology

    def _region(self, name: str, node: yaml.Node) -> Region:
        """Convert a region; its name must not be a number, which means an island."""
        parts = self._fields(node, (*ISLAND_KEYS, *PATH_KEYS), needed=("up",))
        if is_whole(name):
            self._refuse(node, f"region {name}: a number means an island; give it another name")
        return Region(self._rates(parts), self._changes(parts), self._path_of(parts))

    def _site(self, node: yaml.Node) -> Site:
        """Convert an island: the name of its region, or a mapping that changes what the region sets."""
        own = isinstance(node, yaml.MappingNode)
        parts = self._fields(node, ("region", *ISLAND_KEYS), needed=("region",)) if own else {"region": node}
        name = self._text(parts["region"])
        if name not in self._regions:
            known = ", ".join(self._regions) or "none is listed"
            self._refuse(parts["region"], f"there is no region {name!r}: {known}")
        region = self._regions[name]
        rates = {**region.rates, **self._rates(parts)}
        first, moments = made(rates), []
        for at_s, change in self._changes(parts) if "changes" in parts else region.changes:
            rates = {**rates, **change}
            moments.append((at_s, made(rates)))
        return Site(name, first, tuple(moments))

    def _rates(self, parts: dict[str, yaml.Node]) -> dict[str, float]:
        """Convert `up` and `down`, as far as they are written."""
        return {key: self._value(parts[key], key, positive_rate) for key in ("up", "down") if key in parts}

    def _changes(self, parts: dict[str, yaml.Node]) -> tuple[tuple[float, dict[str, float]], ...]:
        """Convert the changes of rates, which must be in the order of time."""
        changes: list[tuple[float, dict[str, float]]] = []
        for node in self._items(parts["changes"]) if "changes" in parts else []:
            fields = self._fields(node, ("at", "up", "down"), needed=("at",))
            at_s, rates = self._value(fields["at"], "at", parse_duration), self._rates(fields)
            if not rates:
                self._refuse(node, "a change needs a new rate: {at: 60s, up: 5mbit}")
            if changes and at_s <= changes[-1][0]:
                self._refuse(node, f"changes come in the order of time, and {changes[-1][0]:g}s comes before this one")
            changes.append((at_s, rates))
        return tuple(changes)

    def _path_of(self, parts: dict[str, yaml.Node]) -> Path:
        """Convert delay, jitter, stall and loss."""
        kinds: dict[str, Callable[[str], float]] = {"delay": parse_delay, "jitter": parse_delay, "stall": parse_delay}
        given = {f"{key}_s": self._value(parts[key], key, read) for key, read in kinds.items() if key in parts}
        loss = {"loss": self._value(parts["loss"], "loss", parse_share)} if "loss" in parts else {}
        return Path(**given, **loss)

    def _paths(self, nodes: list[yaml.Node], islands: yaml.Node) -> dict[Pair, Path]:
        """Return the path of each pair: one of two islands counts before that of their regions."""
        found: dict[Pair, Path | None] = {}
        for name, region in self._regions.items():
            inside = self._bare.in_region(name)
            found |= dict.fromkeys(between(inside, inside), region.path)
        read = [self._listed(node) for node in nodes]
        for _, ends, path in sorted(read, key=lambda one: one[0]):
            found |= dict.fromkeys(ends, path)
        self._refuse_twice(nodes, [(special, ends) for special, ends, _ in read])
        for pair in pairs(self._bare.islands):
            if pair not in found:
                one, other = (self._bare.site(number).region for number in sorted(pair))
                how = f"{{between: [{one}, {other}], delay: 40ms}}"
                self._refuse(islands, f"nothing says how {one} and {other} are connected: add {how} to paths")
        return {pair: path for pair, path in found.items() if path is not None}

    def _listed(self, node: yaml.Node) -> tuple[int, set[Pair], Path | None]:
        """Convert one entry of `paths`: how many ends are islands, the pairs, and their path; None: cut."""
        parts = self._fields(node, ("between", "cut", *PATH_KEYS), needed=("between",))
        ends = self._items(parts["between"])
        if len(ends) != 2:
            self._refuse(parts["between"], "a path has two ends: [eu, us]")
        sides = [self._side(end) for end in ends]
        special = sum(is_whole(self._text(end)) for end in ends)
        if special and not between(*sides):
            self._refuse(parts["between"], f"both ends are {island_name(sides[0][0])}: a path has two")
        cut = "cut" in parts and self._value(parts["cut"], "cut", yes_or_no)
        if cut and (also := [key for key in PATH_KEYS if key in parts]):
            self._refuse(parts[also[0]], f"what is cut has no {also[0]}: leave out that or cut")
        return special, between(*sides), None if cut else self._path_of(parts)

    def _refuse_twice(self, nodes: list[yaml.Node], read: list[tuple[int, set[Pair]]]) -> None:
        """Refuse two entries for a pair that are equally special, unless a more special one decides."""
        most: dict[Pair, int] = {}
        for special, ends in read:
            most |= {pair: max(special, most.get(pair, 0)) for pair in ends}
        lines: dict[Pair, int] = {}
        for node, (special, ends) in zip(nodes, read, strict=True):
            deciding = [pair for pair in ends if special == most[pair]]
            for pair in sorted(deciding, key=sorted):
                if pair in lines:
                    both = " and ".join(map(island_name, sorted(pair)))
                    self._refuse(node, f"how {both} are connected is said already by line {lines[pair]}: leave one out")
                lines[pair] = node.start_mark.line + 1

    def _side(self, node: yaml.Node) -> tuple[int, ...]:
        """Return the islands at one end of a path: one island, or all of a region."""
        name = self._text(node)
        if is_whole(name) and 1 <= int(name) <= self._bare.islands:
            return (int(name),)
        if name not in self._regions:
            known = f"regions {', '.join(self._regions)}, islands 1 to {self._bare.islands}"
            self._refuse(node, f"there is no region or island {name!r}: {known}")
        return self._bare.in_region(name)

    def _fields(self, node: yaml.Node, allowed: Keys = (), needed: Keys = ()) -> dict[str, yaml.Node]:
        """Return a mapping's values by key; without `allowed`, any key may be there."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, "write `{key: value}` here")
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = self._text(key_node)
            if allowed and key not in allowed:
                self._refuse(key_node, f"there is no such key here as {key}: {', '.join(allowed)}")
            if key in found:
                self._refuse(key_node, f"{key} is written twice")
            found[key] = value
        for key in needed:
            if key not in found:
                self._refuse(node, f"{key} is missing")
        return found

    def _items(self, node: yaml.Node) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self._refuse(node, "write a list here: [one, other]")
        return list(node.value)

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, "write a single value here")
        return str(node.value)

    def _value(self, node: yaml.Node, key: str, read: Callable[[str], Any]) -> Any:
        text = self._text(node)
        try:
            return read(text)
        except ValueError as error:
            self._refuse(node, f"{key}: {text}: {error}")

    def _refuse(self, node: yaml.Node, reason: str) -> NoReturn:
        raise ConfigError(f"{self._path}, line {node.start_mark.line + 1}: {reason}")


def made(rates: dict[str, float]) -> Rates:
    """Make rates of what was written: one rate alone means both directions."""
    return Rates(rates["up"], rates.get("down", rates["up"]))


def yes_or_no(text: str) -> bool:
    """Parse `true` or `false`; ValueError for anything else."""
    if text not in ("true", "false"):
        raise ValueError("write true or false")
    return text == "true"
