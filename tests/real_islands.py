"""Islands as real processes, each in a folder of its own: the first founds a run, the others join it by its ticket."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from conftest import SMALL, read_events
from forked import ForkedCommand
from launched import wait_until
from streams import child_of

Process = subprocess.Popen[str] | ForkedCommand
ENDLESS = {
    **SMALL,
    "inner": {**SMALL["inner"], "steps": 1_000_000},
    "elastic": {"silence_s": 3, "partition": "merge"},
    "log": {"every": 1000},
}


class Island:
    """A real island in a folder of its own, which does not outlive the test."""

    def __init__(self, folder: Path, process: Process) -> None:
        self.folder, self.process = folder, process

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        return [event for event in read_events(file) if event["event"] == kind] if file.exists() else []

    def rounds_of(self, islands: int, since: float = 0.0) -> list[float]:
        """When rounds of so many islands were applied here."""
        found = (event for event in self.events("round") if event["time"] >= since)
        return [event["time"] for event in found if event["islands"] >= islands]

    def told(self, what: str) -> list[str]:
        """What it has said of this kind about islands and disks."""
        return [event["text"] for event in self.events("elastic") if event["what"] == what]

    @property
    def daemon(self) -> int:
        """The process id of its p2pd."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in {pid for file in (children, *tasks) for pid in file.read_text().split()}:
            if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return child_of(int(pid))
        raise AssertionError("no p2pd")


# Rounds that wait for the network, as those of real runs do: else islands that train until a test has seen enough take
# all cores from whatever else is started.
LINK = "1gbit,20ms"
Start = Callable[..., Island]
AHEAD = """
import time
real = time.time
time.time = lambda: real() + {ahead_s}
from diloco.cli import main
main()
"""


@contextmanager
def open_islands(tmp_path: Path, settings: dict[str, Any] | None = None, *, founders: int = 1) -> Iterator[Start]:
    """Give a function that starts an island: the first one founds the run, the others join it.

    With several founders nobody trains until all of them are there, and they have a link.
    """
    waiting = {"elastic": {**ENDLESS["elastic"], "start_islands": founders}}
    shaped = {"link": LINK} if founders > 1 else {}
    config = tmp_path / "run.yaml"
    with ExitStack() as stack:

        def make(number: int, *, prefix: tuple[str, ...] = (), ahead_s: float = 0.0, **options: str) -> Island:
            folder = tmp_path / f"island-{number}"
            tree = {**ENDLESS, **waiting, **(settings or {}), "checkpoint": {"dir": str(tmp_path / "island-1")}}
            config.write_text(yaml.safe_dump(tree))
            ticket = tmp_path / "island-1" / "ticket"
            name = ("--name", folder.name, "--dir", str(folder))
            words = ("run", str(config), "--islands", "1") if number == 1 else ("join", str(ticket), *name)
            more = [word for option, value in {**shaped, **options}.items() for word in (f"--{option}", value) if word]
            process: Process
            if prefix:  # a command that runs it, elsewhere
                diloco = [*prefix, sys.executable, "-c", AHEAD.format(ahead_s=ahead_s)]
                pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
                process = subprocess.Popen([*diloco, *words, *more], text=True, **pipes)
            else:
                log = tmp_path / f"{folder.name}.log"
                process = ForkedCommand(*words, *more, log=log, errors_only=True, ahead_s=ahead_s)
            stack.callback(end, process)
            assert wait_until(ticket.exists), process.poll()
            return Island(folder, process)

        yield make


def addresses_of(island: Island) -> list[str]:
    """Where its libp2p node listens."""
    return (island.folder / "addresses").read_text().split()


def ports_of(pid: int) -> list[int]:
    """Where a process and its children listen."""
    told = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
    mine = [line for line in told if f"pid={pid}," in line]
    return [int(line.split()[3].rpartition(":")[2]) for line in mine]


def end(process: Process) -> str:
    """Kill it, and return what it has said of errors; nothing the second time, if it has a pipe for them."""
    process.kill()
    if isinstance(process, ForkedCommand):
        return process.communicate()[1]
    return process.communicate()[1] if process.stderr is not None and not process.stderr.closed else ""


def together(islands: list[Island], since: float = 0.0) -> bool:
    """Whether all of them have seen a round since then after which the roster has so many."""
    return all(island.rounds_of(len(islands), since) for island in islands)
