"""Nothing waits in silence: what is said before an island trains, and when it does not for a while."""

import io
import signal
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from launched import wait_until
from own_loops import made, run_of, train_all
from rich.console import Console

import diloco
from diloco.island.mesh import ProcessMesh
from diloco.report import announce
from diloco.report.announce import Announcer
from diloco.report.board import WAIT_ECHO_S, Board
from diloco.report.events import Start, Waiting, WitnessStart, of_kind
from diloco.report.live import LiveView, WaitsView
from diloco.report.sinks import EVENTS, Events
from diloco.report.terminal import sentence
from diloco.report.watching import recent_events
from diloco.run import status
from diloco.run.signals import stop_on_signal
from diloco.run.start import RunEntry
from diloco.train.trainer import Trainer

WITNESS = WitnessStart(run="r", dir="d", trained_parameters=2000, steps=9, round=4)
START = Start(
    run="r", dir="runs/r", model="tiny", parameters=9, trained_parameters=9, data="d", data_tokens=12, device="cpu",
    dtype="float32", mesh="fsdp 1 x tp 1", steps=40, every=10, tokens_per_step=1000,
)  # fmt: skip
WAIT = Waiting(time=1012.0, since=1000.0, state="waiting", cause="round", islands=("island-3",))


def test_an_island_that_waits_for_others_reports_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(status, "WAITS_S", 0.1)
    model, file = made(), tmp_path / "run" / EVENTS
    where = run_of(tmp_path, elastic={"min_islands": 2, "grace_s": 0.1})
    with diloco.connect(where, model, "SGD", optimizer_options={"lr": 0.1}) as run:
        run.should_stop = lambda: bool(of_kind(recent_events(file), Waiting))  # until it has said so
        train_all(run, model)
    (told, *_) = of_kind(recent_events(file), Waiting)
    assert told.state == "waiting" and told.cause == "min_islands" and told.since < told.time
    assert "fewer islands are there than elastic.min_islands" in capsys.readouterr().err


def in_a_pipe() -> tuple[Announcer, io.StringIO]:
    out = io.StringIO()
    return Announcer(Console(file=out, width=40)), out


def test_a_wait_says_for_whom_since_when_and_why():
    assert sentence(WAIT) == "waiting for island-3 (12 s so far)"
    few = replace(WAIT, cause="min_islands", islands=())
    assert sentence(few) == "waiting (12 s so far): fewer islands are there than elastic.min_islands"


def test_what_all_islands_wait_for_is_one_line():
    board = Board.of(["island-1", "island-2"])
    assert board.hear("island-1", WAIT) == ["island-1 is waiting for island-3 (12 s so far)"]
    assert board.hear("island-2", replace(WAIT, time=WAIT.time + 1)) == []
    assert board.hear("island-2", replace(WAIT, time=WAIT.time + WAIT_ECHO_S))


def test_a_loop_of_ones_own_hears_of_waits_on_standard_error(capsys):
    view = WaitsView()
    view.emit(WAIT)
    assert capsys.readouterr() == ("", "diloco: waiting for island-3 (12 s so far)\n")


def test_in_a_pipe_a_wait_for_others_is_told_after_a_while_and_local_work_is_not(monkeypatch):
    monkeypatch.setattr(announce, "FIRST_SAID_S", 0.01)
    announcer, out = in_a_pipe()
    with announcer.during("looking for members of the run"):
        announcer.searching(1.0, "nobody is in the run's directory")
        assert wait_until(lambda: out.getvalue().endswith("\n"))
    assert out.getvalue().startswith("looking for members of the run (0.")
    silent, nothing = in_a_pipe()
    with silent.during("opening the model", local=True):
        time.sleep(0.05)
    assert not nothing.getvalue()


def test_a_download_says_how_much_how_fast_until_when_and_from_whom():
    now = iter((0.0, 5.0, 15.0, 15.0))
    announcer = Announcer(Console(file=io.StringIO()), quiet=True, clock=lambda: next(now))
    with announcer.during("fetching the run's state"):
        announcer.downloading(0, 4 << 20, {"island-1": 0, "island-2": 0})
        announcer.downloading(1 << 20, 4 << 20, {"island-1": 1 << 20, "island-2": 0})
        assert announcer.text == "fetching the run's state: 1 MiB of 4 MiB, 102 KiB/s, ETA 30 s from island-1"


def test_ctrl_c_before_training_is_answered_before_anything_is_closed():
    announcer, out = in_a_pipe()
    with pytest.raises(KeyboardInterrupt), announcer.during("looking for members of the run"):
        raise KeyboardInterrupt
    assert out.getvalue() == "interrupted: nothing was trained since this start\n", "others may have, before it"


@pytest.mark.parametrize("begins", [WITNESS, START], ids=["witness", "trainer"])
def test_ctrl_c_is_answered_by_the_picture_while_it_is_drawn_and_in_a_line_before_and_after(small, capfd, begins):
    entry = RunEntry(ProcessMesh(0, 1, torch.device("cpu"), None), Events(), ExitStack(), None, Trainer)
    entry._console = Console(file=io.StringIO(), force_terminal=True)
    view = entry._open_view(small())
    assert isinstance(view, LiveView)

    def answered() -> str:
        entry.stop.asked_at, entry.stop.said = None, ""
        with stop_on_signal(entry.stop, "saying goodbye"):
            signal.raise_signal(signal.SIGINT)
        assert entry.stop.said == "saying goodbye"
        return capfd.readouterr().err

    assert answered() == "\nsaying goodbye\n"
    view.emit(begins)
    assert answered() == ""
    view.close()
    assert answered() == "\nsaying goodbye\n"


def test_in_a_terminal_one_line_is_redrawn_and_goes_away():
    out = io.StringIO()
    announcer = Announcer(Console(file=out, width=100, force_terminal=True))
    with announcer.during("fetching the run's state"):
        announcer.downloading(1, 2, {})
        assert wait_until(lambda: "1 B of 2 B" in out.getvalue())
    assert out.getvalue().endswith("\x1b[2K") or "\x1b[2K" in out.getvalue()
    quiet = io.StringIO()
    with Announcer(Console(file=quiet, force_terminal=True), quiet=True).during("anything"):
        pass
    assert not quiet.getvalue()
