"""The example's topology, and faults that happen in it."""

from pathlib import Path

from diloco.simulate.real.faults import parse_faults
from diloco.simulate.real.topology import Topology, read_topology

EXAMPLES = Path(__file__).parent.parent / "examples"
IDS = {f"island-{number}": f"id-{number}" for number in range(1, 9)}


def regions() -> Topology:
    return read_topology(EXAMPLES / "topology.yaml")  # eu: 1, 2; us: 3, 4


def faults(topology: Topology | None = None, **given: str | list[str]):
    lists = {kind: [texts] if isinstance(texts, str) else texts for kind, texts in given.items()}
    return parse_faults(lists, topology or regions())
