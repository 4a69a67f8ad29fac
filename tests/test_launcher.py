"""Several islands on one machine: what is made of their events, and real processes that are killed and come back."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from rich.console import Console

from diloco.board import ECHO_S, HOLD_S, Board, account
from diloco.child import Child
from diloco.comm.ticket import Ticket
from diloco.configfile import load_config, overrides_tree
from diloco.errors import SaveError
from diloco.events import Event, read_events
from diloco.fleet import RESTARTS, Fleet, spread
from diloco.fleetplan import Plan
from diloco.launcher import open_run
from diloco.runner import REPEAT_S
from diloco.terminal import sentence
from diloco.watching import Lines, Tail, cells, open_islands_view, table

ONE, TWO = "island-1", "island-2"


def told(kind: str, at: float = 0.0, **fields: object) -> dict[str, object]:
    return {"event": kind, "time": at, **fields}


def a_round(number: int, *contributors: str, at: float, step: int, digest: str = "") -> dict[str, object]:
    fields = {"contributors": list(contributors), "step": step, "digest": digest or f"digest {number}"}
    return told("round", at, round=number, **fields)


def validation(number: int, step: int, loss: float) -> dict[str, object]:
    return told("validation", round=number, step=step, validation_loss=loss)


def agreed(state: str) -> dict[str, object]:
    return told("agreed", round=3, chain="c" * 64, state=state * 64)


@pytest.fixture
def board() -> Board:
    made = Board.of([ONE, TWO])
    made.hear(ONE, told("start", steps=40))
    return made


def test_a_row_follows_its_island(board):
    board.hear(ONE, told("step", step=7, loss=2.5, tokens_per_s=1500.0))
    board.hear(ONE, a_round(3, ONE, at=1, step=10))
    assert cells(board.rows[ONE]) == (ONE, "training", "7", "2.5000", "1.5k", "3")
    assert cells(board.rows[TWO]) == (TWO, "starting", "", "", "", "")


def test_steps_make_no_lines(board):
    assert board.hear(ONE, told("step", step=7, loss=None, tokens_per_s=1500.0)) == []


def test_a_round_is_one_line_whoever_tells_it(board):
    lines = board.hear(ONE, a_round(2, ONE, TWO, at=10, step=10))
    lines += board.hear(TWO, a_round(2, ONE, TWO, at=10, step=10))
    lines += board.hear(ONE, validation(2, 10, 4.25))
    lines += board.hear(TWO, a_round(3, ONE, at=12, step=20))
    lines += board.hear(ONE, a_round(4, ONE, TWO, at=17, step=30))
    assert lines == [
        "round   2  step    10  island-1, island-2  validation loss 4.2500",
        "round   3  step    20  island-1  5.0 steps/s",
    ]
    assert board.flush() == ["round   4  step    30  island-1, island-2  2.0 steps/s"]


def test_a_round_waits_for_its_validation_but_not_for_ever(board):
    board.hear(ONE, a_round(2, ONE, at=10, step=10))
    assert board.tick(10 + HOLD_S) == []
    assert board.tick(10.1 + HOLD_S) == ["round   2  step    10  island-1"]
    assert board.tick(20 + HOLD_S) == []


def test_the_same_round_on_another_branch_is_told(board):
    board.hear(ONE, a_round(2, ONE, at=10, step=10, digest="one side"))
    assert board.hear(TWO, a_round(2, TWO, at=11, step=10, digest="the other")) == ["round   2  step    10  island-1"]


def test_a_round_that_only_hands_out_samples_is_nobodys(board):
    board.hear(ONE, a_round(2, ONE, at=10, step=10))
    assert board.hear(ONE, a_round(3, at=19, step=10)) == ["round   2  step    10  island-1"]
    assert board.hear(ONE, a_round(4, ONE, at=20, step=20)) == []
    assert board.flush() == ["round   4  step    20  island-1  1.0 steps/s"]
    assert "  island-1 contributed to 2 of 2 rounds" in account(board)


def test_a_loss_that_everybody_notices_is_told_once(board):
    lost = told("elastic", 100.0, what="lost", island="island-3", text="round 7 goes on without it")
    assert board.hear(ONE, lost) == ["island-3 lost: round 7 goes on without it"]
    assert board.hear(TWO, {**lost, "time": 101.0}) == []
    assert board.hear(TWO, {**lost, "time": 101.0 + ECHO_S}) == ["island-3 lost: round 7 goes on without it"]


def test_goodbyes_at_the_end_are_no_news(board):
    goodbye = told("elastic", 100.0, what="left", island=TWO, text="leaves")
    assert board.hear(ONE, goodbye) == ["island-2 left"]
    board.hear(ONE, a_round(9, ONE, at=200, step=40))
    assert board.hear(ONE, {**goodbye, "time": 201.0}) == []


def finish(board: Board, one: str, two: str) -> None:
    board.hear(ONE, validation(1, 0, 5.5))
    board.hear(ONE, a_round(2, ONE, at=10, step=20))
    board.hear(TWO, a_round(3, ONE, TWO, "guest", at=11, step=40))
    board.hear(ONE, validation(3, 40, 2.25))
    for name, state in ((ONE, one), (TWO, two)):
        board.hear(name, told("end", step=40, finished=True))
        board.hear(name, agreed(state))


def test_the_account_names_rounds_shares_restarts_and_equal_digests(board):
    board.again(TWO)
    finish(board, "a", "a")
    assert board.finished and board.agree
    assert account(board) == [
        "done: step 40, round 3, validation loss 5.500 -> 2.250",
        "  island-1 contributed to 2 of 2 rounds",
        "  island-2 contributed to 1 of 2 rounds, started again 1 time",
        "  guest contributed to 1 of 2 rounds",
        "digests equal on island-1, island-2: round 3, chain cccccccccccc, state aaaaaaaaaaaa",
    ]


def test_islands_that_differ_are_named(board):
    finish(board, "a", "b")
    assert not board.agree
    differing = "digests DIFFER: island-1 round 3 state aaaaaaaaaaaa; island-2 round 3 state bbbbbbbbbbbb"
    assert account(board)[-1] == differing


def test_who_left_before_the_end_is_not_compared(board):
    finish(board, "a", "b")
    board.rows[TWO].finished = False
    assert board.agree
    assert account(board)[-1].startswith("digests: only island-1 saw the end, so there is nothing to compare: round 3")


def test_a_run_without_an_end_has_no_agreement(board):
    assert not board.finished and not board.agree
    assert account(board)[0] == "stopped: step 0, round 0"
    assert "nothing to compare" in account(board)[-1]


def test_an_island_that_starts_again_has_nothing_to_show_from_its_last_life(board):
    board.hear(ONE, told("step", step=7, loss=2.5, tokens_per_s=1500.0))
    board.again(ONE)
    assert cells(board.rows[ONE]) == (ONE, "starting", "7", "", "", "")
    assert board.rows[ONE].restarts == 1


def test_an_island_by_itself_tells_of_the_others_too():
    assert sentence(told("ticket", ticket="diloco1-abc")) == "others join with: diloco join diloco1-abc"
    lost = told("elastic", what="lost", island=TWO, text="round 7 goes on without it")
    assert sentence(lost) == "island-2 lost: round 7 goes on without it"
    assert sentence(a_round(3, ONE, at=1, step=20)) is None
    assert sentence(a_round(3, ONE, TWO, at=1, step=20)) == "round   3  step    20  island-1, island-2"
    assert str(sentence(a_round(3, *"abcdefg", at=1, step=20))).endswith("7 islands")


def test_a_tail_waits_for_whole_lines_and_skips_what_a_killed_writer_left(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"event": "start"}\n{"event": "st')
    assert tail.read() == [{"event": "start"}]
    with path.open("a") as file:
        file.write('ep"}\n{"half\n{"event": "end"}\n')
    assert tail.read() == [{"event": "step"}, {"event": "end"}]
    assert tail.read() == []


def test_without_a_terminal_there_is_no_table(board):
    out = io.StringIO()
    view = open_islands_view(out)
    assert isinstance(view, Lines)
    view.show(board.rows.values())
    view.say("island-2 joined [red]")
    assert out.getvalue() == "island-2 joined [red]\n"


def test_the_table_has_a_row_for_each_island(board):
    out = io.StringIO()
    Console(file=out, width=80).print(table(board.rows.values()))
    header, *rows = out.getvalue().splitlines()
    assert header.split() == ["island", "state", "step", "loss", "tokens/s", "round"]
    assert [row.split() for row in rows] == [[ONE, "training"], [TWO, "starting"]]


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
    assert option(arguments, "--set") == ["log.every=3", f"checkpoint.dir={plan.folder}/island-1"]


def test_islands_share_the_cores(plan):
    cores = len(os.sched_getaffinity(0))
    assert plan.environment == {"OMP_NUM_THREADS": str(max(1, cores // 2))}


def test_an_earlier_run_is_kept_or_refused(plan):
    (plan.folder / "island-1").mkdir(parents=True)
    (plan.folder / "config.yaml").touch()
    with pytest.raises(SaveError, match="already holds a run of several islands: add --resume"):
        open_run(plan, fresh=False)
    assert open_run(plan, fresh=True) == plan.folder.with_name("run.1")
    assert (plan.folder.with_name("run.1") / "island-1").is_dir()


def test_a_ticket_names_everybody_before_it_names_anybody_twice():
    assert spread([["a1", "a2"], [], ["b1"]]) == ["a1", "b1", "a2"]
    assert len(spread([[str(number)] for number in range(20)])) == 8


def test_a_child_says_why_it_ended(tmp_path):
    child = Child(ONE, tmp_path / ONE)
    child.start(["run", "there-is-no-such.yaml"], {})
    assert wait_until(lambda: not child.alive)
    assert child.exit_code == 2
    assert child.reason().startswith("exit code 2: error[config]: there-is-no-such.yaml: no such file")


def wait_until(condition, timeout_s: float = 50.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


class FakeChild:
    """An island without a process."""

    def __init__(self, folder: Path, exit_code: int | None) -> None:
        self.name, self.folder, self.exit_code, self.pid = folder.name, folder, exit_code, 1
        self.starts, self.asked, self.paused = 0, 0, 0

    def start(self, arguments, environment) -> None:
        self.starts += 1

    def ask(self) -> None:
        self.asked += 1

    def pause(self) -> None:
        self.paused += 1

    def kill(self) -> None:
        self.exit_code = -9

    def reason(self) -> str:
        return "exit code 1: it went wrong"

    @property
    def alive(self) -> bool:
        return self.exit_code is None


@pytest.fixture
def fleet(plan, monkeypatch) -> Fleet:
    """A founder that trains, and a second island that dies whenever it is started."""
    monkeypatch.setattr("diloco.fleet.RESTART_S", 0.0)
    open_run(plan, fresh=False)
    founder = plan.folder / ONE
    (founder / "ticket").touch()
    (founder / "addresses").write_text(f"/ip4/127.0.0.1/tcp/1/p2p/{'1' * 52}\n")
    (founder / "events.jsonl").write_text(json.dumps(told("start", steps=40)) + "\n")
    out = io.StringIO()
    made = Fleet(plan, Lines(Console(file=out, width=200)))
    made.out = out
    made.children = {ONE: FakeChild(founder, None), TWO: FakeChild(plan.folder / TWO, 1)}
    made.found()
    return made


def test_an_island_that_keeps_dying_stays_away_in_the_end(fleet):
    for _ in range(3 * RESTARTS):
        fleet.look(0)
    assert fleet.children[TWO].starts == 1 + RESTARTS
    assert fleet.out.getvalue().count("island-2 died (exit code 1: it went wrong)") == 1 + RESTARTS
    assert "island-2 has died 6 times and stays away" in fleet.out.getvalue()
    assert fleet.at_work  # the other one trains on


def test_restarting_can_be_switched_off(fleet):
    fleet.plan = replace(fleet.plan, restart=False)
    for _ in range(5):
        fleet.look(0)
    assert fleet.children[TWO].starts == 1 and fleet.at_work


def test_when_nobody_is_left_nobody_is_started_again(fleet):
    fleet.look(0)
    fleet.children[ONE].exit_code = 1
    fleet.children[TWO].exit_code = None
    fleet.look(0)
    assert "no island is left in the run" in fleet.out.getvalue()
    assert fleet.children[TWO].asked == 1 and not fleet._again_at


def test_the_first_signal_pauses_once_and_the_second_kills(fleet):
    fleet.look(0)
    fleet.look(1)
    fleet.look(1)
    assert fleet.children[ONE].paused == 1 and fleet.children[ONE].alive
    fleet.look(2)
    assert not fleet.children[ONE].alive and not fleet.at_work


def test_once_the_run_is_over_nobody_is_started_again(fleet):
    with (fleet.plan.folder / ONE / "events.jsonl").open("a") as events:
        events.write(json.dumps(a_round(9, ONE, at=1, step=40)) + "\n")
    for _ in range(3):
        fleet.look(0)
    assert fleet.children[TWO].starts == 1 and fleet.board.rows[TWO].state == "gone"
    assert "island-2 died" in fleet.out.getvalue() and "starts again" not in fleet.out.getvalue()


def test_the_ticket_follows_the_islands_that_are_there(fleet):
    fleet.look(0)
    first = Ticket.parse((fleet.plan.folder / "ticket").read_text(), time.time())
    assert len(first.addresses) == 1
    fleet.children[TWO].exit_code = None
    (fleet.plan.folder / TWO / "addresses").write_text(f"/ip4/127.0.0.1/tcp/2/p2p/{'2' * 52}\n")
    fleet.look(0)
    fleet.look(0)
    both = Ticket.parse((fleet.plan.folder / "ticket").read_text(), time.time())
    assert both.run_id == first.run_id and len(both.addresses) == 2


# Real processes from here on. Rounds need two islands, so that none of them trains ahead while others start.
TOGETHER = {
    "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 40},
    "sync": {"every": 10},
    "elastic": {"min_islands": 2, "silence_s": 2},
}


@contextmanager
def islands(tmp_path: Path, *changes: str, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """`diloco run --islands 2` as a person starts it; whatever happens, nothing of it stays."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **TOGETHER, "checkpoint": {"dir": str(tmp_path / "run")}}))
    sets = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "diloco", "run", str(path), "--islands", "2", *sets, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids(tmp_path: Path) -> dict[str, int]:
    path = tmp_path / "run" / "islands.json"
    return {entry["name"]: entry["pid"] for entry in json.loads(path.read_text())} if path.exists() else {}


def processes_at(tmp_path: Path) -> list[str]:
    """Command lines of all processes that were started for this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended meanwhile
            continue
    return [line for line in found if str(tmp_path) in line]


def events_of(tmp_path: Path, name: str) -> list[Event]:
    path = tmp_path / "run" / name / "events.jsonl"
    return read_events(path) if path.exists() else []


def rounds_with(tmp_path: Path, teller: str, name: str) -> list[int]:
    events = events_of(tmp_path, teller)
    return [event["round"] for event in events if event["event"] == "round" and name in event["contributors"]]


def last_agreed(tmp_path: Path, name: str) -> tuple[int, str, str]:
    event = [event for event in events_of(tmp_path, name) if event["event"] == "agreed"][-1]
    return event["round"], event["chain"], event["state"]


@pytest.mark.slow
def test_two_islands_train_one_model_and_end_with_equal_digests(tmp_path):
    with islands(tmp_path) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert err == ""
    assert "island-2 joined: state of round" in out
    assert "island-1, island-2  validation loss" in out
    assert "digests equal on island-1, island-2" in out and "next:" in out
    assert last_agreed(tmp_path, ONE) == last_agreed(tmp_path, TWO)
    assert "tokens/s" not in out  # no line for each step
    assert processes_at(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [ONE, TWO])
def test_a_killed_island_comes_back_and_contributes(tmp_path, victim):
    """The founder too: nobody needs it."""
    other = TWO if victim == ONE else ONE
    with islands(tmp_path, "inner.steps=100") as process:
        assert wait_until(lambda: len(rounds_with(tmp_path, other, victim)) > 1)
        before = pids(tmp_path)[victim]
        os.kill(before, signal.SIGKILL)
        killed_in = rounds_with(tmp_path, other, victim)[-1]
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert f"{victim} died (killed by SIGKILL)" in out and f"{victim} joined: state of round" in out
    assert pids(tmp_path)[victim] != before
    assert rounds_with(tmp_path, other, victim)[-1] > killed_in
    assert last_agreed(tmp_path, ONE) == last_agreed(tmp_path, TWO)
    assert processes_at(tmp_path) == []


@pytest.mark.slow
def test_islands_asked_to_stop_do_so_in_good_order(tmp_path):
    with islands(tmp_path, "inner.steps=100000") as process:
        assert wait_until(lambda: rounds_with(tmp_path, ONE, TWO))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped: step" in out, out + err
    assert "died" not in out
    assert all(events_of(tmp_path, name)[-1]["event"] == "agreed" for name in (ONE, TWO))
    assert processes_at(tmp_path) == []


@pytest.mark.slow
def test_a_second_signal_ends_islands_that_do_not_leave(tmp_path):
    with islands(tmp_path, "inner.steps=100000") as process:
        assert wait_until(lambda: rounds_with(tmp_path, ONE, TWO))
        os.kill(pids(tmp_path)[TWO], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(1.5 * REPEAT_S)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == 1 and "stopped: step" in out
    assert wait_until(lambda: processes_at(tmp_path) == [], timeout_s=5)


@pytest.mark.slow
def test_islands_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    with islands(tmp_path, "inner.steps=100000") as process:
        assert wait_until(lambda: rounds_with(tmp_path, ONE, TWO))
        process.kill()
        process.wait()
        assert wait_until(lambda: processes_at(tmp_path) == [], timeout_s=5)


@pytest.mark.slow
def test_a_run_that_cannot_be_founded_says_why(tmp_path):
    with islands(tmp_path, "data.sequence=100M") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "island-1 died (exit code 2: error[data]: " in out
    assert "the run was not founded" in out
