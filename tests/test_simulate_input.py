"""What people write for a simulation and cannot mean: odd numbers, and topologies that contradict themselves."""

import re
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.simulate.real.faults import parse_faults
from diloco.simulate.real.topology import Topology, read_topology

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


CONTRADICTIONS = {
    "the same pair": ("[1, 2], delay: 2ms", "how island-1 and island-2 are connected is said already by line 7"),
    "the other way round": ("[2, 1], cut: true", "how island-1 and island-2 are connected is said already by line 7"),
    "the same regions": ("[us, eu], delay: 2ms", "how island-1 and island-3 are connected is said already by line 6"),
    "one end": ("[3, 3], delay: 2ms", "both ends are island-3"),
    "one end as a region": ("[3, us], delay: 2ms", "both ends are island-3"),
    "cut and delayed": ("[1, 3], cut: true, delay: 2ms", "what is cut has no delay"),
    "cut and lossy": ("[1, 3], loss: 1%, cut: true", "what is cut has no loss"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_topology_that_contradicts_itself_is_refused_with_line_and_reason(tmp_path, case):
    path, reason = CONTRADICTIONS[case]
    assert refusal_of(tmp_path, f"{GOOD}  - {{between: {path}}}\n").startswith(f"line 8: {reason}")


def test_what_is_said_twice_may_be_settled_by_what_is_more_special(tmp_path):
    path, settled = tmp_path / "topology.yaml", "  - {between: [1, 3], delay: 3ms}\n"
    doubtful = GOOD + "  - {between: [1, us], delay: 2ms}\n  - {between: [3, eu], cut: true}\n"
    assert refusal_of(tmp_path, doubtful).startswith("line 9: how island-1 and island-3 are connected")
    path.write_text(doubtful + settled)
    assert read_topology(path).paths[frozenset((1, 3))].delay_s == 0.003


def test_not_cut_is_no_contradiction(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(GOOD.replace("delay: 45ms", "delay: 45ms, cut: false"))
    assert read_topology(path).unconnected == []
