"""Islands that a launcher starts: real processes and what they leave in their folders, or stand-ins for them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from conftest import SMALL, read_events

from diloco.comm.peers.identity import Identity
from diloco.launch.fleet import Plan, open_run
from diloco.report.watching import IslandsView
from diloco.run.folder import OWNER_KEY
from diloco.run.invites import keep_ticket, open_ticket

ONE, TWO = "island-1", "island-2"
TOGETHER = {  # rounds need two islands, so that none of them trains ahead while others start
    "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 40},
    "sync": {"every": 10},
    "elastic": {"min_islands": 2, "silence_s": 2},
}


def wait_until(condition, timeout_s: float = 300.0) -> bool:
    """Wait for a condition; the limit ends a test that hangs, it is no claim about speed."""
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

    def ask_to_stop(self) -> None:
        self.asked += 1

    def pause(self) -> None:
        self.paused += 1

    def kill(self) -> None:
        self.exit_code = -9

    def reason(self) -> str:
        return "exit code 1: it went wrong"


def founded(plan: Plan, view: IslandsView) -> Path:
    """The folder of an island that has founded the run."""
    open_run(plan, view, fresh=False)
    founder = plan.folder / ONE
    owner = Identity.load(founder / OWNER_KEY)
    keep_ticket(founder, open_ticket(founder, owner, []))
    (founder / "addresses").write_text(f"/ip4/127.0.0.1/tcp/1/p2p/{'1' * 52}\n")
    return founder


@contextmanager
def islands(tmp_path: Path, *changes: str, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """`diloco run --islands 2` as a person starts it; whatever happens, nothing of it stays."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **TOGETHER, "checkpoint": {"dir": str(tmp_path / "run")}}))
    sets = [word for change in changes for word in ("--set", change)]
    with started("run", str(path), "--islands", "2", *sets, *options) as process:
        yield process


@contextmanager
def started(*words: str, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A command as a process of its own, which does not outlive the block."""
    command = [sys.executable, "-m", "diloco", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
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


def events_of(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    path = tmp_path / "run" / name / "events.jsonl"
    return read_events(path) if path.exists() else []


def rounds_with(tmp_path: Path, teller: str, name: str) -> list[int]:
    events = events_of(tmp_path, teller)
    return [event["round"] for event in events if event["event"] == "round" and name in event["contributors"]]


def last_agreed(tmp_path: Path, name: str) -> tuple[int, str, str]:
    event = [event for event in events_of(tmp_path, name) if event["event"] == "agreed"][-1]
    return event["round"], event["chain"], event["state"]
