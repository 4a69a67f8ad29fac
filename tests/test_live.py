"""What a person sees of a run in a real terminal, while it trains and when they have seen enough."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from conftest import SMALL, read_events
from screen import Screen, diloco

from diloco.run.signals import REPEAT_S

LONG = {**SMALL, "inner": {**SMALL["inner"], "steps": 100_000}, "log": {"every": 1}}


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**LONG, "checkpoint": {"dir": str(tmp_path / "run")}}))
    return path


def trains(lines: list[str]) -> bool:
    return any("ETA" in line for line in lines) and any("training" in line for line in lines)


def is_drawn(lines: list[str]) -> bool:
    bar = any(line.startswith("step ") and "/100000" in line and "━" in line for line in lines)
    return bar and any(re.match(r"round \d+: \w+ for ", line) for line in lines)


@pytest.mark.slow
def test_in_a_terminal_a_run_is_drawn_and_ctrl_c_is_answered_in_place(config_file, tmp_path):
    with closing(Screen(diloco("run", config_file), cwd=tmp_path)) as screen:
        screen.wait_for(lambda lines: trains(lines) and is_drawn(lines))
        screen.resize(44, 12)
        screen.wait_for(lambda lines: any(line.startswith("quickstart ") and "training" in line for line in lines))
        screen.press("\x03")
        assert screen.end() == 0
        assert any("finishing this step" in frame for frame in screen.frames)
        assert "paused: step" in screen.text and not any("training" in line for line in screen.lines)
        assert screen.text.rstrip().count("\x1b[?25h") >= 1  # the cursor is there again


@pytest.mark.slow
def test_a_second_ctrl_c_is_heeded_at_once_and_leaves_a_cursor(config_file, tmp_path):
    stuck = ["--islands", "1", "--set", "elastic.min_islands=2", "--set", "elastic.grace_s=600"]
    with closing(Screen(diloco("run", config_file, *stuck), cwd=tmp_path)) as screen:
        screen.wait_for(lambda lines: any("waiting" in line for line in lines))
        screen.press("\x03")
        screen.wait_for(lambda lines: any("once more to leave at once" in line for line in lines))
        time.sleep(1.2 * REPEAT_S)  # an echo of the first would not count
        screen.press("\x03")
        assert screen.end(30) == 128 + signal.SIGINT
        assert screen.text.endswith("\x1b[?25h\r\n")


@pytest.mark.slow
def test_as_json_a_run_prints_its_events_and_nothing_else(config_file, tmp_path):
    command = diloco("run", config_file, "--json", "--set", "inner.steps=6")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and done.stderr == ""
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed == read_events(tmp_path / "run" / "events.jsonl")
    again = diloco("run", config_file, "--quiet", "--resume", "--set", "inner.steps=8")
    done = subprocess.run(again, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("done: step 8") and done.stdout.count("\n") == 1


@pytest.mark.slow
def test_a_run_whose_reader_leaves_says_so_in_a_line_and_trains_on(config_file, tmp_path):
    command = diloco("run", config_file, "--set", "inner.steps=40")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    said = process.stderr.read().decode()
    assert process.wait(300) == 0 and "Traceback" not in said, said
    assert said.startswith("nobody reads this output any more: training goes on") and said.count("\n") == 1
    assert read_events(tmp_path / "run" / "events.jsonl")[-2]["finished"]


@pytest.mark.soak
def test_islands_one_that_joins_and_one_that_watches_show_the_same_run(config_file, tmp_path):
    """Three terminals: two islands of one command, a third that joins, and somebody who only looks."""
    here = {"cwd": tmp_path}
    with closing(Screen(diloco("run", config_file, "--islands", 2), **here)) as fleet:
        fleet.wait_for(lambda lines: trains(lines) and any(line.startswith("island-2") for line in lines))
        watch = diloco("status", "run", "--watch")
        with (
            closing(Screen(watch, width=70, **here)) as watcher,
            closing(Screen(diloco("join", "run/ticket", "--name", "guest", "--dir", "guest"), **here)) as guest,
        ):
            for screen in (fleet, watcher, guest):
                screen.wait_for(lambda lines: trains(lines) and sum("33%" in line for line in lines) == 3)
            guest.press("\x03")
            assert guest.end() == 0 and "contributed to" in " ".join(guest.lines)
            for screen in (fleet, watcher):
                screen.wait_for(lambda lines: any("guest" in line and "left" in line for line in lines))
            os.killpg(fleet_child(tmp_path / "run", "island-2"), signal.SIGSTOP)
            watcher.wait_for(lambda lines: any("island-2" in line and "silent" in line for line in lines))
            watcher.press("\x03")
            assert watcher.end() == 0
        os.killpg(fleet_child(tmp_path / "run", "island-2"), signal.SIGCONT)
        fleet.press("\x03")
        fleet.wait_for(lambda lines: any("pausing" in line for line in lines))
        assert fleet.end() == 0


def fleet_child(folder: Path, name: str) -> int:
    listed = json.loads((folder / "islands.json").read_text())
    return next(each["pid"] for each in listed if each["name"] == name)
