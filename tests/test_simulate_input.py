"""Topologies and faults as people write them, and those they cannot mean: odd numbers, and contradictions."""

import math
import re
from pathlib import Path

import pytest
from topologies import EXAMPLES, IDS, faults

from diloco.cli.app import app
from diloco.cli.real import named_apart, refuse_one_folder, refuse_report, world_of
from diloco.comm.transport.link import Path as Way
from diloco.config.file import load_config
from diloco.errors import ConfigError
from diloco.simulate.real.faults import parse_faults
from diloco.simulate.real.network import network_at
from diloco.simulate.real.topology import Rates, Topology, read_topology

GOOD = """\
regions:
  eu: {up: 50mbit, delay: 5ms}
  us: {up: 20mbit, delay: 10ms}
islands: [eu, eu, us]
paths:
  - {between: [eu, us], delay: 45ms}
  - {between: [1, 2], delay: 1ms}
"""


def topology_of(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    return read_topology(path)


def refusal_of(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        topology_of(tmp_path, text)
    return str(refused.value).removeprefix(f"{tmp_path}/topology.yaml, ")


# topologies

RICH = """\
regions:
  eu: {up: 50mbit, down: 100mbit, delay: 5ms}
  us: {up: 20mbit, delay: 10ms, changes: [{at: 60s, up: 5mbit}, {at: 2min, up: 20mbit, down: 30mbit}]}
islands: [eu, {region: eu, up: 10mbit}, us]
paths:
  - {between: [1, 3], delay: 1ms}
  - {between: [eu, us], delay: 45ms, jitter: 5ms, loss: 0.5%, stall: 300ms}
"""


def test_a_topology_has_rates_by_island_and_paths_by_pair(tmp_path):
    topology = topology_of(tmp_path, RICH)
    assert [site.rates for site in topology.sites] == [Rates(50e6, 100e6), Rates(10e6, 100e6), Rates(20e6, 20e6)]
    assert topology.paths == {
        frozenset((1, 2)): Way(0.005),
        frozenset((1, 3)): Way(0.001),  # the pair itself counts more than its regions, wherever it is written
        frozenset((2, 3)): Way(0.045, 0.005, 0.005, 0.3),
    }
    assert topology.in_region("eu") == (1, 2)


def test_rates_change_over_time(tmp_path):
    site = topology_of(tmp_path, RICH).site(3)
    assert [site.rates_at(at_s) for at_s in (0, 60, 119, 120, 1e6)] == [
        Rates(20e6, 20e6), Rates(5e6, 5e6), Rates(5e6, 5e6), Rates(20e6, 30e6), Rates(20e6, 30e6),
    ]  # fmt: skip


def test_the_example_is_a_topology():
    topology = read_topology(EXAMPLES / "topology.yaml")
    assert topology.islands == 4 and topology.reachable(1) == {1, 2, 3, 4}


BAD_TOPOLOGIES = {
    "negative rate": (("up: 50mbit, down", "up: -50mbit, down"), 2, "up: -50mbit: a rate cannot be negative"),
    "no rate": (("down: 100mbit", "down: 0mbit"), 2, "down: 0mbit: a link without any rate"),
    "no unit": (("{region: eu, up: 10mbit}", "{region: eu, up: 10}"), 4, "the unit is missing"),
    "unknown region": (("islands: [eu,", "islands: [asia,"), 4, "there is no region 'asia': eu, us"),
    "unknown key": (("jitter", "jiter"), 7, "there is no such key here as jiter"),
    "unknown island": (("[1, 3]", "[1, 4]"), 6, "no region or island '4': regions eu, us, islands 1 to 3"),
    "one end": (("[1, 3]", "[1]"), 6, "a path has two ends"),
    "no path": (("  - {between: [eu, us]", "  - {between: [eu, eu]"), 4, "nothing says how eu and us are connected"),
    "cannot connect": (
        (
            "delay: 1ms}\n  - {between: [eu, us], delay: 45ms, jitter: 5ms, loss: 0.5%, stall: 300ms}",
            "cut: true}\n  - {between: [eu, us], cut: true}",
        ),
        6,
        "this cannot connect: no way leads from island-1 to island-3",
    ),
    "order of changes": (("at: 2min", "at: 20s"), 3, "changes come in the order of time, and 60s comes before"),
    "change of nothing": (("{at: 60s, up: 5mbit}", "{at: 60s}"), 3, "a change needs a new rate"),
    "loss": (("loss: 0.5%", "loss: 5"), 7, "loss: 5: write a share"),
    "written twice": (("down: 100mbit", "up: 100mbit"), 2, "up is written twice"),
    "no islands": (("islands: [eu, {region: eu, up: 10mbit}, us]", "islands: []"), 4, "0 islands: 1 to 64"),
    "no YAML": (("islands: [eu,", "islands: [eu, ["), 5, "not valid YAML"),
    "a list of nothing": (("islands: [eu, {region: eu, up: 10mbit}, us]", "islands: eu"), 4, "write a list here"),
}


@pytest.mark.parametrize("case", BAD_TOPOLOGIES)
def test_a_bad_topology_is_refused_with_line_and_reason(tmp_path, case):
    (old, new), line, reason = BAD_TOPOLOGIES[case]
    assert RICH.count(old) == 1
    told = refusal_of(tmp_path, RICH.replace(old, new))
    assert told.startswith(f"line {line}: ") and reason in told


def test_one_cut_path_does_not_take_a_topology_apart(tmp_path):
    topology = topology_of(tmp_path, RICH.replace("[1, 3], delay: 1ms", "[1, 3], cut: true"))
    assert topology.unconnected == [frozenset((1, 3))]
    assert network_at(topology, (), IDS, 0.0)["cut"] == [["island-1", "island-3"]]


# faults


def test_faults_are_read_and_come_in_order():
    found = faults(kill="1@60s", stop="2@30s..45s", cut="eu|us@1.5min..120s", slow="3x2.5")
    assert [(f.kind, f.islands, f.others, f.at_s, f.until_s, f.factor) for f in found] == [
        ("slow", (3,), (), 0.0, math.inf, 2.5), ("stop", (2,), (), 30.0, 45.0, 1.0),
        ("kill", (1,), (), 60.0, math.inf, 1.0), ("cut", (1, 2), (3, 4), 90.0, 120.0, 1.0),
    ]  # fmt: skip


def test_islands_that_join_have_the_last_numbers():
    found = faults(Topology.uniform(5, 1e6, 0.0), join=["2@10s", "1@20s"], kill="5@30s")
    assert [(fault.kind, fault.islands) for fault in found] == [("join", (3, 4)), ("join", (5,)), ("kill", (5,))]


def test_a_cut_can_be_between_single_islands():
    (fault,) = faults(cut="1,island-2|us@0s..5s")
    assert fault.pairs == {frozenset(pair) for pair in ((1, 3), (1, 4), (2, 3), (2, 4))}


BAD_FAULTS = {
    "unknown island": ({"kill": "9@60s"}, "--kill 9@60s: there is no island '9', only islands 1 to 4"),
    "unknown side": ({"cut": "eu|asia@1s..2s"}, "no island 'asia', only regions eu, us and islands 1 to 4"),
    "island nought": ({"slow": "0x2"}, "--slow 0x2: there is no island '0'"),
    "no time": ({"kill": "1"}, "--kill 1: it does not say when; write --kill 1@60s"),
    "negative time": ({"kill": "1@-5s"}, "--kill 1@-5s: '-5s': write a duration"),
    "no end": ({"stop": "1@5s"}, "--stop 1@5s: it needs a beginning and an end"),
    "an end": ({"kill": "1@5s..6s"}, "--kill 1@5s..6s: this happens at one moment"),
    "backwards": ({"stop": "1@5s..4s"}, "--stop 1@5s..4s: it ends before it begins"),
    "one side": ({"cut": "eu@5s..6s"}, "a cut has two sides"),
    "both sides": ({"cut": "eu|2,3@5s..6s"}, "island-2 is on both sides"),
    "overlapping cuts": (
        {"cut": ["eu|us@10s..20s", "1|4@19s..30s"]},
        "--cut 1|4@19s..30s: island-1 and island-4 are cut off from each other then already by --cut eu|us@10s..20s",
    ),
    "overlapping stops": ({"stop": ["1@1s..5s", "1@4s..6s"]}, "that island is stopped then by --stop 1@1s..5s"),
    "killed while stopped": ({"stop": "1@1s..5s", "kill": "1@3s"}, "--kill 1@3s: that island is stopped then"),
    "killed before it joins": ({"join": "1@9s", "kill": "4@9s"}, "that island is not there before --join 1@9s"),
    "all join": ({"join": "4@9s"}, "at least one has to be there from the beginning"),
    "nobody joins": ({"join": "0@9s"}, "--join 0@9s: '0' is no number of islands"),
    "faster": ({"slow": "1x0.5"}, "'0.5' is no number from 1 to 1000"),
    "twice slow": ({"slow": ["1x2", "1x3"]}, "--slow 1x3: --slow 1x2 says something else"),
}


@pytest.mark.parametrize("case", BAD_FAULTS)
def test_a_bad_fault_is_refused_with_its_option_and_reason(case):
    given, reason = BAD_FAULTS[case]
    with pytest.raises(ConfigError, match=re.escape(reason)):
        faults(**given)


def test_cuts_that_only_touch_are_fine():
    assert len(faults(cut=["eu|us@10s..20s", "eu|us@20s..30s", "1|2@15s..25s"])) == 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "Add --link 20mbit,80ms, or --topology FILE"),
        ({"link": "-20mbit,80ms"}, "--link -20mbit,80ms: a rate cannot be negative"),
        ({"link": "20,80ms"}, "--link 20,80ms: the unit is missing"),
        ({"link": "20mbit", "islands": 60, "faults": {"join": ["5@1s"]}}, "65 islands: up to 64"),
        ({"link": "20mbit", "topology": EXAMPLES / "topology.yaml"}, "--link 20mbit: --topology"),
        ({"topology": Path("nowhere.yaml")}, "nowhere.yaml: no such file"),
    ],
)
def test_what_cannot_be_simulated_is_refused(given, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        world_of(**{"islands": None, "link": None, "topology": None, "faults": {}, **given})


def test_two_configurations_need_two_folders():
    with pytest.raises(ConfigError, match=r"b.yaml and a.yaml would both train in runs/x"):
        refuse_one_folder([(Path("a.yaml"), "runs/x"), (Path("b.yaml"), "runs/x")])


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("out.json", "with the JSON beside it; write out.html"),
        ("folder", "folder is a folder; write --report folder/report.html"),
        ("named.html", "named.json is a folder; write --report named.json/report.html"),
        ("file/report.html", "--report file/report.html cannot be written: [Errno 20] Not a directory"),
        ("/proc/report.html", "--report /proc/report.html cannot be written"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_starts(page, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "named.json").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=re.escape(reason)):
        app(["simulate", "run.yaml", "--link", "20mbit", "--report", page])
    assert sorted(tmp_path.iterdir()) == before


def test_a_report_may_be_in_a_folder_that_is_not_there_yet(tmp_path):
    refuse_report(tmp_path / "some" / "where" / "report.html")
    refuse_report(Path("report.html"))
    assert list(tmp_path.iterdir()) == []


def test_a_simulation_leaves_the_folder_of_the_run_itself_alone(tmp_path):
    plain, placed = tmp_path / "plain.yaml", tmp_path / "placed.yaml"
    plain.write_text("run: mine")
    placed.write_text("{run: mine, checkpoint: {dir: here}}")
    folders = [load_config(path, named_apart(path, ["seed=3"])).dir for path in (plain, placed)]
    assert folders == ["runs/mine-simulated", "here"]
    assert named_apart(plain, ["run=other"]) == ["run=other"]


# odd numbers and contradictions


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
    settled = "  - {between: [1, 3], delay: 3ms}\n"
    doubtful = GOOD + "  - {between: [1, us], delay: 2ms}\n  - {between: [3, eu], cut: true}\n"
    assert refusal_of(tmp_path, doubtful).startswith("line 9: how island-1 and island-3 are connected")
    assert topology_of(tmp_path, doubtful + settled).paths[frozenset((1, 3))].delay_s == 0.003


def test_not_cut_is_no_contradiction(tmp_path):
    assert topology_of(tmp_path, GOOD.replace("delay: 45ms", "delay: 45ms, cut: false")).unconnected == []
