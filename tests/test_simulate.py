"""Simulations: what islands and their fleet make of a topology and of faults."""

import io
import json
import re
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress

import pytest
import yaml
from conftest import SMALL
from events import told
from launched import FakeChild, founded, wait_until
from rich.console import Console
from topologies import IDS, faults, regions

from diloco.cli.real import refuse_backend
from diloco.comm.transport.link import Line
from diloco.comm.transport.link import Path as Way
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.file import load_config
from diloco.errors import ConfigError, PeerLost
from diloco.launch.fleet import RESTARTS
from diloco.report.watching import IslandsView
from diloco.run.local import Connection
from diloco.simulate.real.fleet import NETWORK, SimulatedFleet, SimulatedPlan, World
from diloco.simulate.real.netns import Namespaces, enter, refuse_if_not_permitted
from diloco.simulate.real.network import VARIABLE, as_simulated, network_at
from diloco.simulate.real.topology import Rates, Topology

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


@pytest.mark.skipif(not permitted(), reason=BACKEND_REASON)
def test_namespaces_can_be_made_again_while_a_process_lives_in_the_old_ones():
    with ExitStack() as stack:
        for _ in range(2):
            with Namespaces(1).opened() as namespaces:
                process = subprocess.Popen(["ip", "netns", "exec", namespaces.name(1), "sleep", "60"])
                stack.callback(process.wait)
                stack.callback(process.kill)


@pytest.mark.skipif(not permitted(), reason=BACKEND_REASON)
def test_a_cut_between_namespaces_loses_one_direction_without_an_error():
    with Namespaces(2).opened() as namespaces, ExitStack() as stack:
        sockets: dict[int, socket.socket] = {}

        def listen(island: int) -> None:
            enter(namespaces.name(island))
            sockets[island] = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sockets[island].bind((namespaces.host(island), 0))
            sockets[island].settimeout(0.5)

        for island in (1, 2):
            thread = threading.Thread(target=listen, args=(island,))  # the test itself stays where it is
            thread.start()
            thread.join(30)

        def arrives(sender: int, receiver: int, text: bytes) -> bool:
            sockets[sender].sendto(text, sockets[receiver].getsockname())
            with suppress(TimeoutError):
                while sockets[receiver].recv(100) != text:
                    pass
                return True
            return False

        assert wait_until(lambda: arrives(1, 2, b"before") and arrives(2, 1, b"before"))  # the links have come up
        namespaces.cut(1, 2)
        assert not arrives(1, 2, b"lost") and arrives(2, 1, b"the other direction")
        namespaces.heal(1, 2)
        assert arrives(1, 2, b"after") and arrives(2, 1, b"after")


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
    (fleet.plan.folder / name / "events.jsonl").write_text(json.dumps(told("start", steps=40, every=10).plain()) + "\n")


def cuts(fleet: SimulatedFleet) -> list[list[str]]:
    return json.loads((fleet.plan.folder / NETWORK).read_text())["cut"]


def test_a_cut_from_the_beginning_begins_when_all_train(fleet):
    made = fleet(cut="1|2@0s..1h")
    trains(made, "island-1")
    made.poll(0)
    assert cuts(made) == []
    trains(made, "island-2")
    made.poll(0)
    assert cuts(made) == [["island-1", "island-2"]]


def test_time_does_not_wait_for_who_died_and_stays_away(fleet):
    made = fleet(restart=False, kill="1@0s")
    trains(made, "island-1")
    made.children["island-2"].exit_code = 1
    made.poll(0)
    made.poll(0)
    assert "all islands train but island-2 (gone for good): from here on" in made.out.getvalue()
    assert made.children["island-1"].exit_code == -9 and len(made.happened.faults) == 1


def test_time_waits_for_who_died_and_comes_back(fleet):
    made = fleet(kill="1@0s")
    trains(made, "island-1")
    made.children["island-2"].exit_code = 1
    for _ in range(RESTARTS):
        made.poll(0)
        assert made.happened.zero is None
    made.children["island-2"].exit_code = None
    made.poll(0)
    assert made.happened.zero is None
    trains(made, "island-2")
    made.poll(0)
    assert made.happened.zero is not None
