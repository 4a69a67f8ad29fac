"""Islands find each other again: after long cuts, without their daemon, with wrong clocks. Real processes."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SMALL, read_events
from launched import wait_until
from streams import child_of

from diloco.errors import ConfigError
from diloco.run.folder import LogFile
from diloco.simulate.real.netns import Namespaces, refuse_if_not_permitted

ENDLESS = {
    **SMALL,
    "inner": {**SMALL["inner"], "steps": 1_000_000},
    "elastic": {"silence_s": 3, "partition": "merge"},
    "log": {"every": 1000},
}


def permitted() -> bool:
    try:
        refuse_if_not_permitted()
    except ConfigError:
        return False
    return True


class Island:
    """A real island in a folder of its own, which does not outlive the test."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder, self.process = folder, process

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        return [event for event in read_events(file) if event["event"] == kind] if file.exists() else []

    def rounds_of(self, islands: int, since: float = 0.0) -> list[float]:
        """When rounds of so many islands were applied here."""
        found = (event for event in self.events("round") if event["time"] >= since)
        return [event["time"] for event in found if event["islands"] >= islands]

    @property
    def daemon(self) -> int:
        """The process id of its p2pd."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in {pid for file in (children, *tasks) for pid in file.read_text().split()}:
            if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return child_of(int(pid))
        raise AssertionError("no p2pd")


Start = Callable[..., Island]
AHEAD = """
import time
real = time.time
time.time = lambda: real() + {ahead_s}
from diloco.cli import main
main()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an island: the first one founds the run, the others join it by the ticket that is in its folder."""
    config = tmp_path / "run.yaml"
    with ExitStack() as stack:

        def make(number: int, *, prefix: tuple[str, ...] = (), ahead_s: float = 0.0, **options: str) -> Island:
            folder = tmp_path / f"island-{number}"
            config.write_text(yaml.safe_dump({**ENDLESS, "checkpoint": {"dir": str(tmp_path / "island-1")}}))
            ticket = tmp_path / "island-1" / "ticket"
            name = ("--name", folder.name, "--dir", str(folder))
            words = ("run", str(config), "--islands", "1") if number == 1 else ("join", str(ticket), *name)
            more = [word for option, value in options.items() for word in (f"--{option}", value) if word]
            diloco = [sys.executable, "-c", AHEAD.format(ahead_s=ahead_s)]
            process = subprocess.Popen(
                [*prefix, *diloco, *words, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            stack.callback(end, process)
            assert wait_until(ticket.exists), process.poll()
            return Island(folder, process)

        yield make


def end(process: "subprocess.Popen[str]") -> str:
    """Kill it, and return what it has said of errors; nothing the second time."""
    process.kill()
    return process.communicate()[1] if process.stderr is not None and not process.stderr.closed else ""


def together(islands: list[Island], since: float = 0.0) -> bool:
    return all(island.rounds_of(len(islands), since) for island in islands)


@pytest.mark.soak
@pytest.mark.skipif(not permitted(), reason="NO NETWORK NAMESPACES: no cut was made; it needs Linux, root, ip and tc")
def test_a_cut_that_outlasts_every_record_heals(start: Start) -> None:
    with Namespaces(3).opened() as namespaces:
        islands = [
            start(number, prefix=("ip", "netns", "exec", namespaces.name(number)), host=namespaces.host(number))
            for number in namespaces.islands
        ]
        assert wait_until(lambda: together(islands))
        namespaces.cut_exactly({frozenset((1, 2)), frozenset((1, 3))})
        cut_at = time.time()
        time.sleep(90)  # the records of the other side live for 60 s
        assert islands[0].rounds_of(1, cut_at + 45) and not islands[0].rounds_of(2, cut_at + 45)
        assert islands[1].rounds_of(2, cut_at + 45) and not islands[1].rounds_of(3, cut_at + 45)
        namespaces.cut_exactly(set())
        healed_at = time.time()
        assert wait_until(lambda: together(islands, healed_at))
        print(f"together {min(islands[0].rounds_of(3, healed_at)) - healed_at:.1f} s after the cut had healed")


@pytest.mark.soak
def test_a_killed_daemon_is_started_again(start: Start) -> None:
    islands = [start(number) for number in (1, 2)]
    assert wait_until(lambda: together(islands))
    for island in islands:
        addresses, daemon = (island.folder / "addresses").read_text(), island.daemon
        os.kill(daemon, signal.SIGKILL)
        log = island.folder / "diloco.log"
        assert wait_until(lambda log=log: log.exists() and "was started again" in log.read_text())
        assert island.daemon != daemon and (island.folder / "addresses").read_text() == addresses
    killed_at = time.time()
    islands.append(start(3))  # finds its way in through daemons that were started again
    assert wait_until(lambda: together(islands, killed_at))


@pytest.mark.soak
@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_clock_an_hour_off_bars_nobody(start: Start, ahead_s: float) -> None:
    """Neither when it joins, nor when its clock has been set right and it starts again."""
    islands = [start(1), start(2, ahead_s=ahead_s)]
    assert wait_until(lambda: together(islands))
    assert f"3600 s {'ahead of' if ahead_s > 0 else 'behind'} the run's, which is used" in end(islands[1].process)
    again = time.time()
    islands[1] = start(2)
    assert wait_until(lambda: islands[0].rounds_of(2, again + 1))


@pytest.mark.soak
def test_a_founder_that_was_killed_before_its_first_snapshot_begins_again(start: Start) -> None:
    island = start(1)  # until its ticket is there
    end(island.process)
    state = [path for path in (island.folder / "outer").glob("*") if not path.name.startswith(("genesis", "log-"))]
    assert not state, state
    begun = start(1, resume="")
    assert wait_until(lambda: begun.rounds_of(1)), begun.process.poll()
    end(begun.process)
    for snapshot in [*(begun.folder / "outer").glob("snapshot-*"), *begun.folder.glob("save-*")]:
        shutil.rmtree(snapshot) if snapshot.is_dir() else snapshot.unlink()  # as if it had been killed before them
    begun_at = time.time()
    again = start(1, resume="")
    assert wait_until(lambda: again.rounds_of(1, begun_at)), again.process.poll()


def test_a_log_file_on_a_full_disk_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    full = LogFile("/dev/full")
    full.handle(logging.LogRecord("diloco", logging.WARNING, "", 0, "lost", (), None))
    with suppress(OSError):
        full.close()
    assert capfd.readouterr() == ("", "")
