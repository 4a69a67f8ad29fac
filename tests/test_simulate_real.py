"""Simulations with real islands: processes that are killed, stopped, cut off, joined and interrupted."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import SMALL, run_cli


@pytest.mark.slow
def test_real_islands_are_killed_stopped_cut_and_joined_and_all_of_it_is_in_the_report(tmp_path):
    path = tmp_path / "run.yaml"
    sections = {"inner": {**SMALL["inner"], "steps": 150}, "elastic": {"min_islands": 2, "silence_s": 2}}
    path.write_text(yaml.safe_dump({**SMALL, **sections, "log": {"every": 5}, "checkpoint": {"dir": "run"}}))
    script = ["--kill", "2@2s", "--stop", "1@3s..4s", "--cut", "1|2@0s..1s", "--slow", "1x2", "--join", "1@1s"]
    done = run_cli("simulate", str(path), "--islands", "2", "--link", "20mbit,20ms", *script, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report: run/report.html" in done.stdout
    (told,) = json.loads((tmp_path / "run" / "report.json").read_text())["simulations"]
    assert told["finished"] and told["agree"] and all(fault["happened"] for fault in told["faults"])
    islands = {island["name"]: island for island in told["islands"]}
    states = {name: [span["state"] for span in island["spans"]] for name, island in islands.items()}
    assert states["island-2"][0] == "joining" and "dead" in states["island-2"]
    assert not any(span["state"] == "dead" and span["begin_s"] < 0 for span in islands["island-2"]["spans"])
    assert "stopped" in states["island-1"] and "waiting" in states["island-1"]
    assert islands["island-3"]["spans"][0]["begin_s"] > 0.9
    assert all(island["sent"] > 0 for island in islands.values())
    assert told["losses"][-1]["loss"] < told["losses"][0]["loss"]
    assert (tmp_path / "run" / "report.html").read_text().count('<figure class="chart"') == 4


def config_of(folder: Path, name: str, **sections: object) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **sections, "run": name, "checkpoint": {"dir": name}}))
    return str(path)


@pytest.mark.soak
def test_ctrl_c_wakes_who_is_stopped_and_neither_the_script_nor_the_next_run_goes_on(tmp_path):
    configs = [config_of(tmp_path, name, inner={**SMALL["inner"], "steps": 100_000}) for name in ("a", "b")]
    script = ["--stop", "2@0s..10min", "--join", "1@15s"]
    command = [sys.executable, "-m", "diloco", "simulate", *configs, "--islands", "2", "--link", "20mbit,20ms", *script]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        while not lines or "island-2 is stopped" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=240)[0]
    assert process.returncode == 1 and f"not started: {configs[1]}" in rest
    assert "island-2 goes on" in rest and "died" not in rest and not (tmp_path / "b").exists()
    (told,) = json.loads((tmp_path / "a" / "report.json").read_text())["simulations"]
    assert [fault["happened"] for fault in told["faults"]] == [True, False]
    assert not (tmp_path / "a" / "island-3" / "output.log").exists()


@pytest.mark.soak
def test_a_run_that_cannot_start_does_not_cost_the_report_of_the_one_before(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").touch()
    configs = [config_of(tmp_path, name) for name in ("a", "b")]
    done = run_cli("simulate", *configs, "--islands", "1", "--link", "20mbit,20ms", cwd=tmp_path)
    assert done.returncode != 0 and "b already exists and is not a diloco run" in done.stderr
    (told,) = json.loads((tmp_path / "a" / "report.json").read_text())["simulations"]
    assert told["name"] == "a" and told["finished"]
