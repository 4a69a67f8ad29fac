"""Loops of people's own that are launched: asked to stop they contribute, save and leave; started again they resume."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from attached import Attached, free_ports, wait_for_end
from conftest import read_events
from launched import wait_until

from diloco.run.signals import LEFT

ROOT = Path(__file__).parent.parent
LOOP = """
import sys, time
import torch, diloco
from own_loops import DATA, made, train

where, options = {where!r}, {options!r}
model = made()
with diloco.connect(where, model, "SGD", optimizer_options={{"lr": 0.01}}, **options) as run:
    for batch in run.batches(DATA, 4):
        loss = train(model, run.optimizer, batch)
        time.sleep({pause_s})
        run.step(loss=loss)
print("finished", run.finished, "at step", run.step_count, flush=True)
"""


def start(folder: Path, name: str, where: object, pause_s: float = 0.0, **options: object) -> "subprocess.Popen[bytes]":
    """Run somebody's program; what it prints goes to NAME.log."""
    text = LOOP.format(where=where, options=options, pause_s=pause_s)
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", text], stdout=log, stderr=log, env={**os.environ, **paths}, start_new_session=True
        )


def steps(folder: Path) -> int:
    file = folder / "events.jsonl"
    return max((event.get("step") or 0 for event in read_events(file)), default=0) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_loop_that_gets_sigterm_leaves_its_block_and_resumes(tmp_path: Path, alone: bool) -> None:
    where = {"inner": {"steps": 200}, "sync": {"every": 4}, "log": {"every": 1}}
    tree = {**where, "checkpoint": {"dir": str(tmp_path / "run")}}
    first = start(tmp_path, "loop", tree, pause_s=0.05, alone=alone)
    assert wait_until(lambda: steps(tmp_path / "run") > 10)
    first.send_signal(signal.SIGTERM)
    assert wait_for_end(first) == [0]  # its own code: nobody has launched it
    assert "finished False" in (tmp_path / "loop.log").read_text() and list((tmp_path / "run").glob("save-*"))
    again = start(tmp_path, "loop", tree, alone=alone)
    assert wait_for_end(again) == [0]
    printed = (tmp_path / "loop.log").read_text()
    assert (
        "resumes at step" in printed and "resumes at step 0 " not in printed and "finished True at step 200" in printed
    )


@pytest.mark.cluster
def test_loops_with_secrets_found_join_and_come_back_in_any_order(tmp_path: Path) -> None:
    with Attached(tmp_path, 2, inner={"steps": 120, "warmup": 0}, elastic={"min_islands": 2}) as run:

        def begin(name: str) -> "subprocess.Popen[bytes]":
            process = start(tmp_path, name, str(run.config), 0.02, attach=str(run.secret(name)))
            run.ends(process)
            return process

        other, founder = begin("island-1"), begin("island-0")
        assert wait_until(lambda: run.is_training("island-1", 2))
        founder.send_signal(signal.SIGTERM)
        assert wait_for_end(founder) == [LEFT] and run.events("island-0", "agreed")  # it has said goodbye, and saved
        founder = begin("island-0")
        assert wait_until(lambda: run.output("island-0").count("takes part as island-0") == 2)
        kill_one(other)
        other = begin("island-1")
        assert wait_for_end(founder, other) == [0, 0]
        run.check_one_run()


def kill_one(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_loop_that_waits_for_the_run_leaves_when_asked(tmp_path: Path) -> None:
    with Attached(tmp_path, 2, inner={"steps": 20, "warmup": 0}) as run:
        process = start(tmp_path, "island-1", str(run.config), attach=str(run.secret("island-1")))
        run.ends(process)
        assert wait_until(lambda: "waits since" in run.output("island-1"))
        process.send_signal(signal.SIGTERM)
        assert wait_for_end(process) == [LEFT]


SIGNALLED = """
import signal
import diloco
from own_loops import DATA, made, train


class Late:  # closed with the run's events, when its block has been left
    def emit(self, event):
        pass

    def close(self):
        signal.raise_signal(signal.SIGTERM)
        print("closed", flush=True)


signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
model = made()
with diloco.connect({where!r}, model, "SGD", optimizer_options={{"lr": 0.01}}, attach={secret!r}) as run:
    run.events.attach(Late())
    signal.signal(signal.SIGUSR1, lambda *_: print("the loop's own handler", flush=True))
    for batch in run.batches(DATA, 4):
        run.step(loss=train(model, run.optimizer, batch))
        if run.step_count == 3:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            signal.raise_signal(signal.SIGUSR1)
print("finished", run.finished, flush=True)
"""


@pytest.mark.slow
def test_a_launched_loop_that_trains_has_its_own_signals_and_one_that_closes_is_not_disturbed(tmp_path: Path) -> None:
    with Attached(tmp_path, 1, inner={"steps": 12, "warmup": 0}) as run:
        text = SIGNALLED.format(where=str(run.config), secret=str(run.secret("island-0")))
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        loop = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env={**os.environ, **paths})
        printed = [line for line in loop.stdout.splitlines() if "takes part" not in line]
        assert printed == ["interrupted", "the loop's own handler", "closed", "finished True"], loop.stderr
        assert loop.returncode == 0


@pytest.mark.soak
def test_the_example_of_a_launched_loop_survives_sigterm_and_ends_with_equal_states(tmp_path: Path) -> None:
    tree = yaml.safe_load((ROOT / "examples" / "own_loop.yaml").read_text())
    tree["launch"] |= {"script": f"{sys.executable} {ROOT}/examples/own_loop.py", "port": free_ports(2)}
    path, run = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump({**tree, "checkpoint": {"dir": str(run)}}))

    def launch(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "diloco", "launch", *words], check=True, stdout=subprocess.DEVNULL)

    launch(str(path), "--islands", "2")
    try:
        assert wait_until(lambda: steps(run / "island-1") > 40)
        (pid,) = [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if is_loop_in(pid, run / "island-1")]
        os.kill(pid, signal.SIGTERM)
        log = run / "launch" / "logs" / "island-1.log"
        assert wait_until(lambda: log.read_text().count("takes part as island-1") == 2), log.read_text()
        assert wait_until(lambda: len(list(run.glob("launch/jobs/*/exit"))) == 2, 600), log.read_text()
        assert "rounds in all: accuracy" in log.read_text()
        ends = [
            [e for e in read_events(run / f"island-{k}" / "events.jsonl") if e["event"] == "agreed"][-1] for k in (0, 1)
        ]
        assert ends[0]["round"] == ends[1]["round"] and ends[0]["state"] == ends[1]["state"]
    finally:
        launch("--stop", str(run))


def is_loop_in(pid: str, folder: Path) -> bool:
    """Tell whether a process is the loop of the island in this folder: it was told so by a variable."""
    try:
        return (
            f'"dir": "{folder}"' in Path("/proc", pid, "environ").read_text()
            and "own_loop.py" in Path("/proc", pid, "cmdline").read_text()
        )
    except OSError:
        return False
