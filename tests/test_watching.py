"""What a run tells, and to whom: files, terminal, trackers."""

import io
import json
import sys
import threading
from dataclasses import replace

import pytest
from conftest import read_events
from launched import wait_until
from rich.console import Console

from diloco.cli.shared import say
from diloco.report.console import table_console
from diloco.report.events import Amended, End, Note, Start, Step, Validation
from diloco.report.live import LiveView, open_islands_view, open_view
from diloco.report.sinks import Events, JsonLines
from diloco.report.terminal import PlainView, curve
from diloco.report.trackers import TensorBoard, WandB

STEP = Step(step=10, loss=2.5, lr=1e-3, tokens_per_s=5000.0)
START = Start(
    run="r", dir="runs/r", model="tiny", parameters=984_448, trained_parameters=984_448, data="d",
    data_tokens=12_000_000, device="cpu", dtype="float32", mesh="fsdp 1 x tp 1", steps=40, every=10,
    tokens_per_step=1000,
)  # fmt: skip


def test_events_are_json_lines_even_with_nan(tmp_path):
    events = Events([JsonLines(tmp_path / "deep" / "events.jsonl")])
    events.emit(replace(STEP, loss=float("nan"), step=1))
    events.emit(End(step=1))
    events.close()
    first, last = read_events(tmp_path / "deep" / "events.jsonl")
    assert first["loss"] is None and first["step"] == 1
    assert last["event"] == "end"


def test_plain_lines_hold_the_figures_a_person_wants():
    out = io.StringIO()
    events = Events([PlainView(Console(file=out, width=40))])
    events.emit(START)
    events.emit(STEP)
    events.emit(replace(STEP, mfu=0.456, skipped=3))
    events.emit(replace(STEP, skipped=1))
    events.emit(Validation(step=10, round=2, validation_loss=2.25))
    lines = out.getvalue().splitlines()
    assert lines == [
        "r: tiny, 984k parameters, on d, 12M tokens; cpu, float32",
        "step    10/40  loss 2.5000  5k tokens/s  ETA 6.0 s",
        "step    10/40  loss 2.5000  5k tokens/s  MFU 45.6%  3 steps skipped  ETA 6.0 s",
        "step    10/40  loss 2.5000  5k tokens/s  1 step skipped  ETA 6.0 s",
        "round   2  step    10  validation loss 2.2500",
    ]


def test_when_the_owner_moves_the_end_the_lines_count_to_that():
    out = io.StringIO()
    events = Events([PlainView(Console(file=out, width=40))])
    events.emit(START)
    events.emit(Amended(number=1, text="inner.steps=20", steps=20))
    events.emit(STEP)
    assert out.getvalue().splitlines()[-1] == "step    10/20  loss 2.5000  5k tokens/s  ETA 2.0 s"


def test_a_file_is_no_terminal(tmp_path):
    assert isinstance(open_view(tmp_path, console=Console(file=io.StringIO())), PlainView)
    assert open_view(tmp_path, "quiet") is None


def test_as_json_each_event_is_a_line_however_narrow(tmp_path):
    out = io.StringIO()
    view = open_view(tmp_path, "json", console=Console(file=out, width=40))
    assert view is not None
    for event in (START, STEP):
        view.emit(event)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        json.loads(json.dumps(event.plain())) for event in (START, STEP)
    ]


def test_of_several_islands_each_json_line_says_whose_it_is():
    out = io.StringIO()
    view = open_islands_view(lambda: None, "json", stream=out)
    view.hear("island-2", STEP)
    view.say("island-2 died")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["island"] == "island-2" and first["event"] == "step"
    assert (second["event"], second["text"]) == ("note", "island-2 died")
    silent = io.StringIO()
    open_islands_view(lambda: None, "quiet", stream=silent).say("island-2 died")
    assert not silent.getvalue()


ADDRESS = "[2001:db8:a:b:c:1]:4001"  # `:a:` and `:b:` are codes of emoji


def test_an_address_is_printed_as_it_is_by_whatever_prints_it(tmp_path, capsys):
    note, out = Note(text=ADDRESS), io.StringIO()
    for show in ("json", "auto"):
        view = open_view(tmp_path, show, console=Console(file=out, width=200))
        assert view is not None
        view.emit(note)
        islands = open_islands_view(lambda: None, show, stream=out)
        islands.hear("island-1", note)
        islands.say(ADDRESS)
    live = LiveView(Console(file=out, width=200, force_terminal=True, highlight=False), tmp_path)
    live.emit(note)
    say(ADDRESS)
    table_console().print(ADDRESS, markup=False)
    printed = [line for line in (out.getvalue() + capsys.readouterr().out).splitlines() if line]
    assert len(printed) == 8 and all(ADDRESS in line for line in printed), printed


def test_beside_json_and_quiet_output_other_lines_go_to_standard_error(capsys):
    for show, output in (("auto", "out"), ("json", "err"), ("quiet", "err")):
        say("dashboard: here", show=show)
        told = capsys.readouterr()
        assert (told.out + told.err, getattr(told, output)) == ("dashboard: here\n",) * 2


def test_the_curve_spans_its_values():
    assert curve([3.0, 2.0, 1.0]) == "█▅▁"
    assert curve([1.0, 1.0]) == "▁▁"
    assert curve([2.0, float("nan"), 1.0, float("inf")]) == "█ ▁ "
    assert curve([float("nan")]) == " "


def test_the_picture_is_drawn_while_steps_come_from_another_thread(tmp_path):
    out, over = io.StringIO(), threading.Event()
    view = LiveView(Console(file=out, force_terminal=True), tmp_path)
    view.emit(START)

    def train() -> None:
        while not over.is_set():
            view.emit(STEP)

    trainer, before = threading.Thread(target=train), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        trainer.start()
        for _ in range(1000):
            view._below()
    finally:
        sys.setswitchinterval(before)
        over.set()
        trainer.join()
        view.close()
    assert "loss ▁" in view._below()


def test_tensorboard_files_hold_the_curves(tmp_path, small):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = Events([TensorBoard(small())])
    events.emit(START)
    events.emit(STEP)
    events.emit(Validation(step=10, round=2, validation_loss=2.25))
    events.close()
    written = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    written.Reload()
    assert written.Scalars("step/loss")[0].value == 2.5
    assert written.Scalars("validation/validation_loss")[0].step == 10
    assert "step/mfu" not in written.Tags()["scalars"]


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path, monkeypatch, small):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    events = Events([WandB(small())])
    events.emit(STEP)
    events.close()
    (summary,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    # a process of W&B's own writes it, and may still do so
    assert wait_until(lambda: json.dumps("step/loss").encode()[1:-1] in summary.read_bytes())
