"""What people write for a simulation and cannot mean: odd numbers, and topologies that contradict themselves."""

import re
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.simulation.faults import parse_faults
from diloco.simulation.topology import Topology
from diloco.simulation.topologyfile import read_topology

GOOD = """\
regions:
  eu: {up: 50mbit, delay: 5ms}
  us: {up: 20mbit, delay: 10ms}
islands: [eu, eu, us]
paths:
  - {between: [eu, us], delay: 45ms}
  - {between: [1, 2], delay: 1ms}
"""


def refusal_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_topology(path)
    return str(refused.value).removeprefix(f"{path}, ")


@pytest.mark.parametrize("number", ["²", "٣", "1" * 5000])
def test_what_is_no_number_of_an_island_is_refused_wherever_it_is_written(tmp_path, number):
    islands = Topology.uniform(3, 1e6, 0.01)
    for kind, text in (("kill", f"{number}@60s"), ("cut", f"1|{number}@1s..2s"), ("slow", f"{number}x2")):
        with pytest.raises(ConfigError, match=f"there is no island '{number}'"):
            parse_faults({kind: [text]}, islands)
    with pytest.raises(ConfigError, match=f"'{number}' is no number of islands"):
        parse_faults({"join": [f"{number}@60s"]}, islands)
    told = refusal_of(tmp_path, GOOD.replace("[1, 2]", f"[{number}, 2]"))
    assert told.startswith(f"line 7: there is no region or island '{number}'")


def test_a_factor_is_written_in_plain_digits():
    with pytest.raises(ConfigError, match=re.escape("'٣' is no number from 1 to 1000")):
        parse_faults({"slow": ["1x٣"]}, Topology.uniform(3, 1e6, 0.01))


def test_rates_that_no_link_has_are_refused(tmp_path):
    assert refusal_of(tmp_path, GOOD.replace("50mbit", "1e300gbit")).startswith("line 2: up: 1e300gbit: must be finite")
    assert "from 1bit to 1000tbit" in refusal_of(tmp_path, GOOD.replace("50mbit", "1e-300bit"))
