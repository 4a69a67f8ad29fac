"""Simulations: topologies and faults as people write them, and what islands and their fleet make of them."""

import io
import json
import math
import re
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from rich.console import Console
from test_board import told
from test_launcher import FakeChild, founded, wait_until

from diloco.cli.app import app
from diloco.cli.real import refuse_backend, refuse_one_folder, refuse_report, world_of
from diloco.comm.transport.link import Line
from diloco.comm.transport.link import Path as Way
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.file import load_config
from diloco.errors import ConfigError, PeerLost
from diloco.launch.fleet import RESTARTS
from diloco.report.watching import IslandsView
from diloco.run.peer import Connection
from diloco.simulate.real.faults import parse_faults
from diloco.simulate.real.fleet import NETWORK, SimulatedFleet, SimulatedPlan, World
from diloco.simulate.real.netns import Namespaces, enter, refuse_if_not_permitted
from diloco.simulate.real.network import VARIABLE, as_simulated, network_at
from diloco.simulate.real.topology import Rates, Topology, read_topology

EXAMPLES = Path(__file__).parent.parent / "examples"
IDS = {f"island-{number}": f"id-{number}" for number in range(1, 9)}


# topologies

GOOD = """\
regions:
  eu: {up: 50mbit, down: 100mbit, delay: 5ms}
  us: {up: 20mbit, delay: 10ms, changes: [{at: 60s, up: 5mbit}, {at: 2min, up: 20mbit, down: 30mbit}]}
islands: [eu, {region: eu, up: 10mbit}, us]
paths:
  - {between: [1, 3], delay: 1ms}
  - {between: [eu, us], delay: 45ms, jitter: 5ms, loss: 0.5%, stall: 300ms}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    return path


def test_a_topology_has_rates_by_island_and_paths_by_pair(tmp_path):
    topology = read_topology(written(tmp_path, GOOD))
    assert [site.rates for site in topology.sites] == [Rates(50e6, 100e6), Rates(10e6, 100e6), Rates(20e6, 20e6)]
    assert topology.paths == {
        frozenset((1, 2)): Way(0.005),
        frozenset((1, 3)): Way(0.001),  # the pair itself counts more than its regions, wherever it is written
        frozenset((2, 3)): Way(0.045, 0.005, 0.005, 0.3),
    }
    assert topology.in_region("eu") == (1, 2)


def test_rates_change_over_time(tmp_path):
    site = read_topology(written(tmp_path, GOOD)).site(3)
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
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        read_topology(path)
    assert str(refused.value).startswith(f"{path}, line {line}: ")


def test_one_cut_path_does_not_take_a_topology_apart(tmp_path):
    topology = read_topology(written(tmp_path, GOOD.replace("[1, 3], delay: 1ms", "[1, 3], cut: true")))
    assert topology.unconnected == [frozenset((1, 3))]
    assert network_at(topology, (), IDS, 0.0)["cut"] == [["island-1", "island-3"]]


# faults


def regions() -> Topology:
    return read_topology(EXAMPLES / "topology.yaml")  # eu: 1, 2; us: 3, 4


def faults(topology: Topology | None = None, **given: str | list[str]):
    lists = {kind: [texts] if isinstance(texts, str) else texts for kind, texts in given.items()}
    return parse_faults(lists, topology or regions())


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


# the islands' side


def test_the_network_at_a_moment():
    topology, script = regions(), faults(cut="eu|us@10s..20s", slow="3x2.5")
    before, during, after = (network_at(topology, script, IDS, at_s) for at_s in (9.9, 10.0, 20.0))
    assert before["cut"] == after["cut"] == []
    assert ["island-1", "island-3"] in during["cut"] and ["island-1", "island-2"] not in during["cut"]
    assert before["islands"]["island-3"] == {"id": "id-3", "up_bits_per_s": 20e6, "down_bits_per_s": 50e6, "slow": 2.5}
    assert network_at(topology, script, IDS, 40.0)["islands"]["island-4"]["up_bits_per_s"] == 5e6


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Two islands over memory, each behind its simulated link; call it with what the file is to hold from then on."""
    file, topology = tmp_path / "network.json", regions()
    monkeypatch.setenv(VARIABLE, str(file))

    def write(at_s: float, **given: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(json.dumps(network_at(topology, faults(topology, **given), IDS, at_s)))
        draft.rename(file)

    return write


def test_an_island_follows_its_network(world, tmp_path):
    world(0)
    memory = MemoryNetwork()
    islands = {}
    for number in (1, 4):
        (tmp_path / f"island-{number}").mkdir()
        connection = as_simulated(Connection(), tmp_path / f"island-{number}")
        islands[number] = connection.shape(memory.transport(f"id-{number}"))
    one, four = islands[1], islands[4]
    assert one.paths.between("id-1", "id-4") == Way(0.045, 0.005, 0.001, 0.2)
    assert (four.link.up.bytes_per_s, four.link.down.bytes_per_s) == (20e6 / 8, 50e6 / 8)
    world(40, cut="eu|us@0s..50s")
    assert wait_until(lambda: one.paths.is_cut("id-1", "id-4") and four.paths.is_cut("id-1", "id-4"))
    assert four.link.up.bytes_per_s == 5e6 / 8
    with pytest.raises(PeerLost, match="cut"):
        one.connect(four.transport.address(), "any", timeout_s=1)
    world(60)
    assert wait_until(lambda: not one.paths.is_cut("id-1", "id-4"))
    assert wait_until((tmp_path / "island-1" / "traffic.jsonl").exists)


def test_outside_a_simulation_there_is_no_such_network(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert as_simulated(Connection(name="mine"), tmp_path) == Connection(name="mine")


def test_a_slow_island_is_slow(world, tmp_path):
    world(0, slow="3x2.5")
    assert [as_simulated(Connection(), tmp_path / f"island-{n}").slowness for n in (3, 1)] == [2.5, 1.0]


def test_a_line_counts_and_changes_its_rate():
    line = Line(8e6)
    assert line.reserve(1_000_000, now=0.0) == 1.0
    line.change(80e6)
    assert line.reserve(1_000_000, now=0.0) == pytest.approx(1.1)
    assert line.passed_bytes == 2_000_000


# network namespaces

BACKEND_REASON = "NO NETWORK NAMESPACES: the kernel's shaping was NOT tried; it needs Linux, root, ip and tc"


def permitted() -> bool:
    try:
        refuse_if_not_permitted()
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not permitted(), reason=BACKEND_REASON)
def test_namespaces_reach_each_other_hold_rates_and_leave_nothing_behind():
    with Namespaces(2).opened() as namespaces:
        listener, answer = [], []

        def inside(island: int, work) -> None:
            """A thread of its own: the test itself stays where it is."""
            thread = threading.Thread(target=lambda: (enter(namespaces.name(island)), work()))
            thread.start()
            thread.join(30)

        inside(2, lambda: listener.append(socket.create_server((namespaces.host(2), 0))))
        inside(1, lambda: answer.append(socket.create_connection(listener[0].getsockname(), timeout=20)))
        assert answer[0].getpeername()[0] == namespaces.host(2)
        namespaces.shape(1, Rates(5e6, 7e6))
        buckets = subprocess.run(["tc", "-n", namespaces.name(1), "qdisc"], capture_output=True, text=True).stdout
        assert re.search(r"tbf .* dev eth0 root .*rate 5Mbit", buckets)
        for open_socket in (*listener, *answer):
            open_socket.close()
        names = [namespaces.name(island) for island in (1, 2)]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in names)


def test_without_permission_namespaces_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="--backend netns needs root"):
        refuse_backend("netns")
    with pytest.raises(ConfigError, match="--backend tc: there are shaped and netns"):
        refuse_backend("tc")


# the fleet


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """Two islands without processes; call it with what befalls them."""
    monkeypatch.setattr("diloco.launch.fleet.RESTART_S", 0.0)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "checkpoint": {"dir": str(tmp_path / "run")}}))

    def make(*, restart: bool = True, **given: str) -> SimulatedFleet:
        topology = Topology.uniform(2, 20e6, 0.02)
        plan = SimulatedPlan(load_config(path, []), path, (), 2, restart=restart)
        out = io.StringIO()
        view = IslandsView(Console(file=out, width=200))
        founded(plan, view)
        made = SimulatedFleet(plan, view, World(topology, faults(topology, **given)))
        made.out = out
        made.children = {name: FakeChild(plan.folder / name, None) for name in plan.names}
        made.found()
        return made

    return make


def trains(fleet: SimulatedFleet, name: str) -> None:
    (fleet.plan.folder / name / "events.jsonl").write_text(json.dumps(told("start", steps=40, every=10)) + "\n")


def cuts(fleet: SimulatedFleet) -> list[list[str]]:
    return json.loads((fleet.plan.folder / NETWORK).read_text())["cut"]


def test_a_cut_from_the_beginning_begins_when_all_train(fleet):
    made = fleet(cut="1|2@0s..1h")
    trains(made, "island-1")
    made.look(0)
    assert cuts(made) == []
    trains(made, "island-2")
    made.look(0)
    assert cuts(made) == [["island-1", "island-2"]]


def test_time_does_not_wait_for_who_died_and_stays_away(fleet):
    made = fleet(restart=False, kill="1@0s")
    trains(made, "island-1")
    made.children["island-2"].exit_code = 1
    made.look(0)
    made.look(0)
    assert "all islands train but island-2 (gone for good): from here on" in made.out.getvalue()
    assert made.children["island-1"].exit_code == -9 and len(made.happened.faults) == 1


def test_time_waits_for_who_died_and_comes_back(fleet):
    made = fleet(kill="1@0s")
    trains(made, "island-1")
    made.children["island-2"].exit_code = 1
    for _ in range(RESTARTS):
        made.look(0)
        assert made.happened.zero is None
    made.children["island-2"].exit_code = None
    made.look(0)
    assert made.happened.zero is None
    trains(made, "island-2")
    made.look(0)
    assert made.happened.zero is not None
