"""Two minutes of `diloco bench soak`: real islands, killed, stopped, cut off and slowed. No time is judged."""

import json
import sys
import time
from contextlib import closing

import pytest
from events import told
from launched import wait_until

from diloco.bench.soak import measure
from diloco.bench.soak_island import SoakIsland
from diloco.bench.soak_network import FileNetwork, choose_backend
from diloco.bench.soak_process import set_clock
from diloco.errors import ConfigError

JUDGED = ("soak.rounds_lost", "soak.samples_twice", "soak.rounds_unchecked", "soak.digests_equal")


@pytest.mark.slow
def test_minutes_of_faults_lose_no_round_and_leave_equal_states(tmp_path):
    folder = tmp_path / "soak"
    report = measure(
        minutes=2.0, islands=4, every=5.0, seed=1, partition="auto", keep=folder, faults=True, baseline=1.0,
        backend="auto",
    )  # fmt: skip
    checks = {check.name: check for check in report.checks}
    assert [str(checks[name]) for name in JUDGED if not checks[name].holds] == []
    assert report.figures["rounds"] > 0 and report.figures["faults"] > 0
    assert json.loads((folder / "soak.json").read_text())["rounds"] == report.figures["rounds"]
    assert "## What was done" in (folder / "report.md").read_text()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").touch()
    options = {"minutes": 1.0, "islands": 2, "every": 5.0, "seed": 0, "faults": True, "baseline": None}
    with pytest.raises(ConfigError, match="already exists"):
        measure(**options, partition="auto", keep=tmp_path, backend="shaped")
    with pytest.raises(ConfigError, match="--partition pause"):
        measure(**options, partition="pause", keep=None, backend="shaped")


def test_without_root_the_network_is_a_file_that_the_islands_follow(tmp_path):
    network = FileNetwork(tmp_path, 3)
    network.set_cut(frozenset({(1, 2), (2, 1), (3, 1)}))
    network.set_slow(2, 1e6)
    (path,) = network.environment().values()
    with open(path) as file:
        tree = json.load(file)
    assert tree["cut"] == [["island-1", "island-2"], ["island-1", "island-3"]]
    assert tree["islands"]["island-2"]["up_bits_per_s"] == 1e6 < tree["islands"]["island-1"]["up_bits_per_s"]
    network.set_cut(frozenset())
    network.set_slow(2, None)
    with open(path) as file:
        tree = json.load(file)
    assert tree["cut"] == [] and tree["islands"]["island-2"]["up_bits_per_s"] > 1e6


@pytest.fixture
def island(tmp_path):
    with closing(SoakIsland(3, "island-3", tmp_path)) as made:
        yield made


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_an_island_that_ends_unasked_says_why(island):
    for code, refused, reason in (
        (
            "print('error[join]: nobody answers'); print('a late line'); exit(2)",
            True,
            "error[join]: nobody",
        ),
        ("print('Traceback'); exit(1)", False, "exit code 1: Traceback"),  # not what the life before has printed
        ("import os; os.kill(os.getpid(), 9)", False, "killed by SIGKILL: no output"),
    ):
        island.start(python(code), {})
        found = []
        assert wait_until(lambda found=found: found.append(island.ended()) or not island.running)
        (ended,) = filter(None, found)
        assert ended.refused is refused and reason in ended.text
    assert island.life == 3


def test_an_island_that_was_asked_to_leave_or_killed_ends_in_silence(island):
    for end in (lambda: island.ask_to_leave(0.0), island.kill):
        island.start(python("import time; time.sleep(600)"), {})
        end()
        assert wait_until(lambda: island.ended() or not island.running)
        assert island.ended() is None and not island.running


def test_a_stopped_island_cannot_work_until_it_proceeds(island):
    island.start(python("import time; time.sleep(600)"), {})
    assert not island.able  # it has not reported that it trains
    island.folder.mkdir()
    (island.folder / "events.jsonl").write_text(json.dumps(told("start", at=1.0).plain()) + "\n")
    assert [event.kind for event in island.events()] == ["start"] and island.able
    island.stop(daemon_too=True)
    assert not island.able and island.running
    island.proceed()
    assert island.able and not island.kill_daemon()
    usage = island.usage()
    assert usage is not None and usage.threads >= 1 and usage.files == 1 and usage.temporary == 0


def test_a_clock_that_is_off_leaves_the_monotonic_one_alone(monkeypatch):
    true_time, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", true_time)  # undone in the end
    set_clock(-1000.0)
    assert time.time() < true_time() - 900 and time.monotonic is monotonic


def test_an_unknown_backend_is_refused():
    assert choose_backend("shaped") == "shaped"
    with pytest.raises(ConfigError, match="--backend tape"):
        choose_backend("tape")
