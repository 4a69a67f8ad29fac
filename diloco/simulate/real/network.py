"""Follow the network of a simulated island, as a file describes it right now.

`diloco simulate` writes the file (rates of each island, paths of each pair, who is cut off from whom) and changes it as
time passes; each island's process finds it by an environment variable and follows it. It also records what has passed
its link, for the report.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco.comm.transport.link import Link, Paths
from diloco.comm.transport.link import Path as Way
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Transport
from diloco.run.local import Connection
from diloco.simulate.real.faults import Fault
from diloco.simulate.real.netns import Namespaces, enter
from diloco.simulate.real.topology import Topology, island_name

VARIABLE = "DILOCO_SIMULATION"  # the file
LOOK_S = 0.1
SAMPLE_S = 0.5
TRAFFIC = "traffic.jsonl"  # in an island's folder

log = logging.getLogger(__name__)


def network_at(
    topology: Topology,
    faults: tuple[Fault, ...],
    ids: Mapping[str, str],
    seconds: float,
    namespaces: Namespaces | None = None,
) -> dict[str, Any]:
    """Return what the file holds at that time, in seconds. `ids` are the islands' peer ids, by name."""
    slow = {fault.islands[0]: fault.factor for fault in faults if fault.kind == "slow"}
    cut = cut_pairs(faults, seconds)
    islands = {}
    for number, site in enumerate(topology.sites, start=1):
        name, rates = island_name(number), site.rates_at(seconds)
        islands[name] = {"id": ids[name], **asdict(rates), "slow": slow.get(number, 1.0)}
        if namespaces is not None:
            islands[name] |= {"namespace": namespaces.name(number), "host": namespaces.host(number)}
    paths = [{"between": _names(pair), **asdict(path)} for pair, path in topology.paths.items()]
    without_streams = cut | set(topology.unconnected)  # those find each other all the same, through the rest
    return {
        "islands": islands,
        "paths": paths,
        "cut": sorted(_names(pair) for pair in without_streams),
        "silent": sorted(_names(pair) for pair in cut),
    }


def cut_pairs(faults: tuple[Fault, ...], seconds: float) -> set[frozenset[int]]:
    """Return the pairs of islands between which a fault lets nothing through at that time, in seconds."""
    cuts = (fault for fault in faults if fault.kind == "cut" and fault.at_s <= seconds < fault.until_s)
    return {pair for fault in cuts for pair in fault.pairs}


def _names(pair: frozenset[int]) -> list[str]:
    return [island_name(number) for number in sorted(pair)]


@dataclass(frozen=True)
class OwnLink:
    """Describe what the file holds for one island."""

    id: str
    up_bits_per_s: float
    down_bits_per_s: float
    slow: float
    namespace: str = ""  # then the kernel holds its rates
    host: str = ""


class SimulatedNetwork:
    """Apply the file to an island's transport, on the island's side."""

    def __init__(self, file: Path, folder: Path) -> None:
        self._file, self._folder, self._name = file, folder, folder.name
        self._ids: dict[str, str] = {}
        self._cut: set[frozenset[str]] = set()  # pairs without streams
        self._silent: set[frozenset[str]] = set()  # those of which the directory exchanges nothing either
        self._seen = 0
        self.own = self._read()[0]

    def _read(self) -> tuple[OwnLink, dict[str, Any]]:
        """Read the file, and return this island's link and the whole tree."""
        self._seen = self._file.stat().st_mtime_ns
        tree = json.loads(self._file.read_text())
        self._ids = {name: island["id"] for name, island in tree["islands"].items()}
        self._silent = self._pairs(tree["silent"])
        return OwnLink(**tree["islands"][self._name]), tree

    def _pairs(self, names: list[list[str]]) -> set[frozenset[str]]:
        return {frozenset(self._ids[name] for name in pair) for pair in names}

    def shape(self, transport: Transport) -> Transport:
        """Return the transport over this network, which is followed for as long as the process lives."""
        own, tree = self._read()
        link = Link() if own.namespace else Link(own.up_bits_per_s, own.down_bits_per_s)
        paths = Paths()
        for path in tree["paths"]:
            one, other = (self._ids[name] for name in path.pop("between"))
            paths.set(one, other, Way(**path))
        self._follow(tree, link, paths)
        threading.Thread(target=self._watch, args=(link, paths), name="simulation", daemon=True).start()
        return ShapedTransport(transport, link, paths, by_stamp=not own.namespace)

    def _watch(self, link: Link, paths: Paths) -> None:
        """Follow changes of the file and record the traffic, on a thread of its own."""
        sampled = 0.0
        with (self._folder / TRAFFIC).open("a", buffering=1) as traffic:
            while True:
                if self._file.stat().st_mtime_ns != self._seen:
                    self._follow(self._read()[1], link, paths)
                if time.time() - sampled >= SAMPLE_S:
                    sampled = time.time()
                    sample = {"time": sampled, "sent": link.up.passed_bytes, "received": link.down.passed_bytes}
                    traffic.write(json.dumps(sample) + "\n")
                time.sleep(LOOK_S)

    def _follow(self, tree: dict[str, Any], link: Link, paths: Paths) -> None:
        """Change rates, and cut and heal paths, as the file says."""
        own = OwnLink(**tree["islands"][self._name])
        if not own.namespace:
            link.up.change(own.up_bits_per_s)
            link.down.change(own.down_bits_per_s)
        cut = self._pairs(tree["cut"])
        for one, other in map(sorted, cut - self._cut):
            paths.cut(one, other)
        for one, other in map(sorted, self._cut - cut):
            paths.heal(one, other)
        self._cut = cut

    def is_cut(self, peer: str) -> bool:
        """Tell whether a fault cuts this island off from a peer at present, for the directory too."""
        return frozenset((self.own.id, peer)) in self._silent


def as_simulated(connection: Connection, folder: Path) -> Connection:
    """Return the connection of the island in this folder: changed only if this process belongs to a simulation."""
    file = os.environ.get(VARIABLE)
    if file is None:
        return connection
    network = SimulatedNetwork(Path(file), folder)
    own = network.own
    if own.namespace:
        enter(own.namespace)  # before anything listens
    return replace(
        connection, host=own.host or connection.host, up_bits_per_s=own.up_bits_per_s,
        down_bits_per_s=own.down_bits_per_s, delay_s=0.0, shape=network.shape, is_cut=network.is_cut, slowness=own.slow,
    )  # fmt: skip
