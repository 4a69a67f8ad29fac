"""Several islands on one machine: what is made of their events, and real processes that are killed and come back."""

import io
import json
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from conftest import SMALL, run_cli
from events import a_round, told
from launched import (
    ONE,
    TWO,
    FakeChild,
    events_of,
    founded,
    islands,
    last_agreed,
    pids,
    processes_at,
    rounds_with,
    wait_until,
)
from rich.console import Console

from diloco.comm.peers.ticket import Ticket
from diloco.config.file import load_config, overrides_tree
from diloco.errors import SaveError
from diloco.launch.fleet import RESTARTS, SAVING_S, Fleet, Plan, is_saving, open_run, spread
from diloco.launch.mesh_processes import SUPERVISED
from diloco.launch.processes import Child
from diloco.report.watching import IslandsView
from diloco.run.folder import release
from diloco.run.signals import REPEAT_S


@pytest.fixture
def plan(tmp_path) -> Plan:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "checkpoint": {"dir": str(tmp_path / "run"), "snapshot_every": 7}}))
    return Plan(load_config(path, ["log.every=3"]), path, ("log.every=3",), 2, link="50mbit,20ms")


def option(arguments: list[str], name: str) -> list[str]:
    return [after for word, after in pairwise(arguments) if word == name]


def test_a_joiner_gets_what_is_its_own_and_nothing_else(plan):
    arguments = plan.joiner(TWO)
    assert arguments[:2] == ["join", f"{plan.folder}/ticket"]
    assert option(arguments, "--name") == [TWO] and option(arguments, "--dir") == [f"{plan.folder}/island-2"]
    assert option(arguments, "--link") == ["50mbit,20ms"] and "--host" not in arguments
    own = overrides_tree(option(arguments, "--set"))
    assert own == {
        "island": SMALL["island"], "log": {"every": 3}, "evaluate": {"samples": 16}, "checkpoint": {"snapshot_every": 7}
    }  # fmt: skip


def test_the_founder_gets_every_override_and_a_folder_of_its_own(plan):
    arguments = plan.founder()
    assert arguments[:4] == ["run", str(plan.path), "--islands", "1"]
    own = ["log.every=3", f"checkpoint.dir={plan.folder}/island-1"]
    assert option(arguments, "--set") == ["elastic.start_islands=2", *own]  # nobody trains ahead of the others


def test_islands_share_the_cores(plan):
    cores = len(os.sched_getaffinity(0))
    assert plan.environment == {"OMP_NUM_THREADS": str(max(1, cores // 2)), SUPERVISED: "1"}


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def view(out) -> IslandsView:
    return IslandsView(Console(file=out, width=200))


def test_an_earlier_run_is_kept_or_refused(plan, view, out):
    (plan.folder / "island-1").mkdir(parents=True)
    (plan.folder / "config.yaml").touch()
    open_run(plan, view, fresh=False)  # a founding that failed left nothing to go on with
    release(plan.folder)
    (plan.folder / "island-1" / "outer").mkdir()
    (plan.folder / "island-1" / "outer" / "log-00000001.seg").touch()
    with pytest.raises(SaveError, match="already holds a run of several islands: add --resume"):
        open_run(plan, view, fresh=False)
    open_run(plan, view, fresh=True)
    assert f"the earlier run is kept as {plan.folder.with_name('run.1')}" in out.getvalue()
    assert (plan.folder.with_name("run.1") / "island-1").is_dir()


def test_nothing_is_resumed_where_nothing_is(plan, view):
    with pytest.raises(SaveError, match="holds no run to resume: start without --resume"):
        open_run(replace(plan, resume=True), view, fresh=False)
    assert not plan.folder.exists()


def test_who_is_saving_is_given_its_time(tmp_path):
    assert not is_saving(tmp_path)
    part = tmp_path / "save-00000003.part" / "inner"
    part.mkdir(parents=True)
    (part / "rank-00000.safetensors").write_bytes(b"half")
    assert is_saving(tmp_path)
    before = time.time() - SAVING_S - 1
    for path in (part, part / "rank-00000.safetensors"):
        os.utime(path, (before, before))
    assert not is_saving(tmp_path)
    (tmp_path / "outer" / "snapshot-00000002-abc.part").mkdir(parents=True)
    (tmp_path / "outer" / "snapshot-00000002-abc.part" / "parameters-00000.safetensors").touch()
    assert is_saving(tmp_path)


def test_a_ticket_names_everybody_before_it_names_anybody_twice():
    assert spread([["a1", "a2"], [], ["b1"]]) == ["a1", "b1", "a2"]
    assert len(spread([[str(number)] for number in range(20)])) == 8


def test_a_child_says_why_it_ended(tmp_path):
    child = Child(ONE, tmp_path / ONE)
    child.start(["run", "there-is-no-such.yaml"], {})
    assert wait_until(lambda: child.exit_code is not None)
    assert child.exit_code == 2
    assert child.reason().startswith("exit code 2: error[config]: there-is-no-such.yaml: no such file")


@pytest.fixture
def fleet(plan, view, out, monkeypatch) -> Fleet:
    """A founder that trains, and a second island that dies whenever it is started."""
    monkeypatch.setattr("diloco.launch.fleet.RESTART_S", 0.0)
    founder = founded(plan, view)
    (founder / "events.jsonl").write_text(json.dumps(told("start", steps=40, every=10).plain()) + "\n")
    made = Fleet(plan, view)
    made.out = out
    made.children = {ONE: FakeChild(founder, None), TWO: FakeChild(plan.folder / TWO, 1)}
    made.found()
    return made


def test_an_island_that_keeps_dying_stays_away_in_the_end(fleet):
    for _ in range(3 * RESTARTS):
        fleet.poll(0)
    assert fleet.children[TWO].starts == 1 + RESTARTS
    assert fleet.out.getvalue().count("island-2 died (exit code 1: it went wrong)") == 1 + RESTARTS
    assert "island-2 has died 6 times and is not restarted" in fleet.out.getvalue()
    assert fleet.at_work  # the other one trains on


def test_restarting_can_be_switched_off(fleet):
    fleet.plan = replace(fleet.plan, restart=False)
    for _ in range(5):
        fleet.poll(0)
    assert fleet.children[TWO].starts == 1 and fleet.at_work


def test_when_nobody_is_left_nobody_is_started_again(fleet):
    fleet.poll(0)
    fleet.children[ONE].exit_code = 1
    fleet.children[TWO].exit_code = None
    fleet.poll(0)
    assert "no island is left in the run" in fleet.out.getvalue()
    assert fleet.children[TWO].asked == 1 and not fleet._again_at


def test_the_first_signal_pauses_once_and_the_second_kills(fleet):
    fleet.poll(0)
    fleet.poll(1)
    fleet.poll(1)
    assert fleet.children[ONE].paused == 1 and fleet.children[ONE].exit_code is None
    fleet.poll(2)
    assert fleet.children[ONE].exit_code == -9 and not fleet.at_work


def test_an_island_that_was_still_starting_when_asked_to_stop_has_not_died(fleet):
    fleet.children[TWO].exit_code = None
    fleet.poll(1)
    fleet.children[TWO].exit_code = -signal.SIGUSR1
    fleet.poll(1)
    assert "island-2 had not started yet" in fleet.out.getvalue() and "died" not in fleet.out.getvalue()


def test_once_the_run_is_over_nobody_is_started_again(fleet):
    with (fleet.plan.folder / ONE / "events.jsonl").open("a") as events:
        events.write(json.dumps(a_round(9, ONE, at=1, step=40).plain()) + "\n")
    for _ in range(3):
        fleet.poll(0)
    assert fleet.children[TWO].starts == 1 and fleet.board.rows[TWO].state == "gone"
    assert "island-2 died" in fleet.out.getvalue() and "starts again" not in fleet.out.getvalue()


def test_the_ticket_follows_the_islands_that_are_there(fleet):
    fleet.poll(0)
    first = Ticket.parse((fleet.plan.folder / "ticket").read_text(), time.time())
    assert len(first.addresses) == 1
    fleet.children[TWO].exit_code = None
    (fleet.plan.folder / TWO / "addresses").write_text(f"/ip4/127.0.0.1/tcp/2/p2p/{'2' * 52}\n")
    fleet.poll(0)
    fleet.poll(0)
    both = Ticket.parse((fleet.plan.folder / "ticket").read_text(), time.time())
    assert both.run_id == first.run_id and len(both.addresses) == 2


# Real processes from here on.


@pytest.mark.slow
@pytest.mark.parametrize("victim", [ONE, pytest.param(TWO, marks=pytest.mark.soak)])
def test_two_islands_train_one_model_and_one_that_is_killed_comes_back_and_contributes(tmp_path, victim):
    """The founder too: nobody needs it."""
    other = TWO if victim == ONE else ONE
    with islands(tmp_path, "inner.steps=60") as process:
        assert wait_until(lambda: len(rounds_with(tmp_path, other, victim)) > 1)
        before = pids(tmp_path)[victim]
        os.kill(before, signal.SIGKILL)
        killed_in = rounds_with(tmp_path, other, victim)[-1]
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert err == ""
    assert "island-2 joined: state of round" in out and "island-1, island-2  validation loss" in out
    assert "digests equal on island-1, island-2" in out and "next:" in out
    assert "tokens/s" not in out  # no line for each step
    assert f"{victim} died (killed by SIGKILL)" in out and f"{victim} joined: state of round" in out
    assert pids(tmp_path)[victim] != before
    assert rounds_with(tmp_path, other, victim)[-1] > killed_in
    assert last_agreed(tmp_path, ONE) == last_agreed(tmp_path, TWO)
    assert processes_at(tmp_path) == []


@pytest.mark.cluster
def test_a_finished_run_of_several_islands_is_trained_on_by_its_owner(tmp_path):
    """In the same log, by a change of settings; and again by `diloco set` and the command that it was begun with."""
    with islands(tmp_path, "inner.steps=12") as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "--resume --set inner.steps=24\n" in out, out + err
    with islands(tmp_path, "inner.steps=24", options=("--resume",)) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and err == "", out + err
    assert "by the run's owner: inner.steps=24" in out and "done: step 24" in out
    assert rounds_with(tmp_path, ONE, TWO)[-1] > 4 and last_agreed(tmp_path, ONE) == last_agreed(tmp_path, TWO)
    done = run_cli("set", str(tmp_path / "run"), "inner.lr=0.001")
    assert done.returncode == 2 and "at its end, step 24: add inner.steps=48" in done.stderr
    assert run_cli("set", str(tmp_path / "run"), "inner.steps=30").returncode == 0
    with islands(tmp_path, "inner.steps=12", options=("--resume",)) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "done: step 30" in out, out + err


@pytest.mark.slow
def test_islands_asked_to_stop_do_so_in_good_order(tmp_path):
    with islands(tmp_path, "inner.steps=100000") as process:
        assert wait_until(lambda: rounds_with(tmp_path, ONE, TWO))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "paused: step" in out, out + err
    assert "died" not in out and "continues where the islands stopped" in out
    assert all(events_of(tmp_path, name)[-1]["event"] == "agreed" for name in (ONE, TWO))
    assert processes_at(tmp_path) == []


@pytest.mark.soak
def test_a_second_signal_ends_islands_that_do_not_leave(tmp_path):
    with islands(tmp_path, "inner.steps=100000") as process:
        assert wait_until(lambda: rounds_with(tmp_path, ONE, TWO))
        os.kill(pids(tmp_path)[TWO], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(1.5 * REPEAT_S)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "stopped: step" in out and "the last round that any island has" in out
    assert wait_until(lambda: processes_at(tmp_path) == [])


@pytest.mark.slow
def test_islands_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    with islands(tmp_path, "inner.steps=100000") as process:
        assert wait_until(lambda: rounds_with(tmp_path, ONE, TWO))
        process.kill()
        process.wait()
        assert wait_until(lambda: processes_at(tmp_path) == [])


@pytest.mark.slow
def test_a_run_that_cannot_be_founded_says_why(tmp_path):
    with islands(tmp_path, "data.sequence=100M") as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "island-1 died (exit code 2: error[data]: " in out
    assert "the run was not founded" in out
