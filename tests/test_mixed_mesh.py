"""Islands of different shapes in one run: real processes, started as people start them, over real sockets."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SMALL

from diloco.launch.mesh_processes import SUPERVISED

pytestmark = pytest.mark.slow

RUN = {
    **SMALL,
    "model": {"preset": "tiny", "blocks": 2, "width": 32, "heads": 2, "feed_forward": 64},
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 20},
    "sync": {"every": 5},
    "elastic": {"min_islands": 3, "silence_s": 5},  # nobody trains ahead while others start
    "evaluate": {"samples": 16},
    "log": {"every": 5},
}
STREAMING = {"every": 6, "fragments": 2, "delay": 2, "apply": "mix", "codec": "int4"}


class Crew:
    """Each island is one command; `folder/NAME` is where it lives."""

    def __init__(self, folder: Path, run: dict[str, object]) -> None:
        self.folder = folder
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "run.yaml").write_text(yaml.safe_dump({**run, "checkpoint": {"dir": str(folder / "founder")}}))

    def found(self, *options: str) -> None:
        self._start("founder", "run", str(self.folder / "run.yaml"), "--islands", "1", *options)
        wait_until(lambda: (self.folder / "founder" / "ticket").exists(), self)

    def join(self, name: str, *options: str) -> None:
        where = ["--name", name, "--dir", str(self.folder / name)]
        self._start(name, "join", str(self.folder / "founder" / "ticket"), *where, *options)

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", SUPERVISED: "1"}  # an island that fails ends
            command = [sys.executable, "-m", "diloco", *arguments]
            self.started[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / name / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in told if event["event"] == kind]

    def rounds(self, name: str) -> list[set[str]]:
        """Who contributed, as this island tells it; without those that only admit islands or hand out samples."""
        return [set(event["contributors"]) for event in self.events(name, "round") if event["contributors"]]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def processes(self, name: str) -> list[int]:
        """Those of an island, in the order of ranks, in which they were started."""
        launcher = self.started[name].pid
        return [*map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())]

    def wait(self, *names: str) -> None:
        for name in names:
            assert self.started[name].wait(120) == 0, self.log(name)


def wait_until(condition, crew: Crew, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        told = {name: crew.log(name)[-2000:] for name in crew.started}
        assert time.monotonic() < deadline, json.dumps(told, indent=1)
        time.sleep(0.1)


@contextmanager
def crew_at(folder: Path, run: dict[str, object]) -> Iterator[Crew]:
    """Whatever happens, no process of it stays."""
    crew = Crew(folder, run)
    try:
        yield crew
    finally:
        for process in crew.started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def digests(crew: Crew, *names: str) -> set[str]:
    return {event["state"] for name in names for event in crew.events(name, "agreed")}


@pytest.mark.soak
def test_one_process_fsdp_and_tensor_parallel_agree_bit_by_bit(tmp_path):
    with crew_at(tmp_path, RUN) as crew:
        crew.found()
        crew.join("cut", "--fsdp", "2")
        crew.join("split", "--tp", "2")
        crew.wait("founder", "cut", "split")
        for name in ("founder", "cut", "split"):
            assert len(crew.events(name, "agreed")) == 1
            assert len(crew.rounds(name)) == 4
            assert crew.rounds(name).count({"island-1", "cut", "split"}) >= 3  # a busy machine may keep one back once
        assert len(digests(crew, "founder", "cut", "split")) == 1
        assert [event["mesh"] for name in ("cut", "split") for event in crew.events(name, "start")] == [
            "fsdp 2 x tp 1", "fsdp 1 x tp 2"
        ]  # fmt: skip
        assert loss_falls(crew)


@pytest.mark.soak
def test_streaming_goes_on_when_a_process_of_one_island_is_killed(tmp_path):
    """The founder is one that is cut. The island that loses a process ends, though its leader was not touched."""
    run = {**RUN, "sync": STREAMING, "inner": {**RUN["inner"], "steps": 60}}
    with crew_at(tmp_path, run) as crew:
        crew.found("--set", "island.fsdp=2")
        crew.join("split", "--tp", "2")
        wait_until(lambda: crew.events("split", "start"), crew)
        crew.join("one")
        crew.join("two")
        wait_until(lambda: any({"island-1", "split"} <= contributors for contributors in crew.rounds("founder")), crew)
        os.kill(crew.processes("split")[1], signal.SIGKILL)
        assert crew.started["split"].wait(30) != 0
        line = next(line for line in crew.log("split").splitlines() if line.startswith("error[process]"))
        assert "process 1 of 2 (host " in line and "was killed by SIGKILL at " in line
        assert line.endswith("; the island ends with it")
        crew.wait("founder", "one", "two")
        assert len(crew.rounds("founder")) == 21  # every fragment, 10 times and once more
        assert "split" not in crew.rounds("founder")[-1]
        assert len(digests(crew, "founder", "one", "two")) == 1
        assert loss_falls(crew)


def loss_falls(crew: Crew) -> bool:
    """Of the outer parameters; whichever island is first in the roster tells it."""
    told = [event for name in crew.started for event in crew.events(name, "validation")]
    first, *_, last = [event["validation_loss"] for event in sorted(told, key=lambda event: event["time"])]
    return bool(last < first - 1.0)
