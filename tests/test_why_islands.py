"""`diloco why` and `diloco status` of real islands: what only their processes can measure, each as it comes about."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import SMALL
from disks import fill, small_disk
from launched import wait_until
from real_islands import Island, open_islands, together

# rounds that take a moment, so that who waits for whom can be seen, and speeds of now
CALM = {"model": {**SMALL["model"], "width": 128, "feed_forward": 512}, "sync": {"every": 30}, "log": {"every": 10}}


def diloco(*words: object) -> str:
    """What a command prints, on both ways; it may fail."""
    command = [sys.executable, "-m", "diloco", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def says(expected: str, *words: object) -> str:
    """Ask `diloco why` until it says that; the line that does."""
    found: list[str] = []

    def told() -> bool:
        found[:] = diloco("why", *words).splitlines()
        return any(re.search(expected, line) for line in found)

    assert wait_until(told, 120), found
    return next(line for line in found if re.search(expected, line))


def healthy(folder: Path, *islands: Island) -> str:
    assert wait_until(lambda: together(list(islands)), 120)
    return says(f"^nothing holds the run up: {len(islands)} islands at work, a round takes ", folder)


def row_of(island: str, folder: Path) -> str:
    """Its line of `diloco status`."""
    return next(line for line in diloco("status", folder).splitlines() if line.startswith(f"{island} "))


@contextmanager
def held_up(pid: int) -> Iterator[None]:
    """Let a process run for a fifth of the time: it is slow, and never silent for long."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.2)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.soak
def test_one_whose_processor_is_slow_and_one_whose_link_is_full_are_named_with_figures(tmp_path: Path) -> None:
    with open_islands(tmp_path, {**CALM, "sync": {"every": 10, "codec": "fp32"}}) as start:
        one, two = start(1), start(2, **{"max-up": "4mbit"})
        assert wait_until(lambda: together([one, two]), 120)
        full = r"^island-2's link is the bottleneck: its last exchange ran at [\d.]+ mbit/s of the 4 mbit/s that it may"
        says(full, tmp_path)
        says(full, two.folder, "island-2")
        slow = (
            r"^island-2 is slow: it trains \d+ tokens/s where the others have [\d.k]+, \d+\.\d times as many; its GPU"
        )
        with held_up(two.process.pid):
            says(slow, tmp_path)
            says(slow, one.folder)  # which asks it, as it would one on another machine


@pytest.mark.soak
def test_one_whose_disk_is_full_trains_on_and_is_healthy_when_there_is_space(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "island-2", "16m"),
        open_islands(tmp_path, CALM) as start,
    ):
        one, two = start(1), start(2)
        healthy(tmp_path, one, two)
        ballast = fill(two.folder)
        says(r"^island-2's disk takes nothing: .*\. It trains on, and a crash would lose it: make space", two.folder)
        says("^island-2's disk takes nothing: ", one.folder)  # from elsewhere
        assert "disk: " in row_of("island-2", tmp_path)
        since = time.time()
        assert wait_until(lambda: one.rounds_of(2, since), 60), "rounds go on with it"
        ballast.unlink()
        healthy(tmp_path, one, two)


@pytest.mark.soak
def test_the_one_whose_clock_is_wrong_is_named_and_not_those_whom_it_makes_late(tmp_path: Path) -> None:
    """The run's time is the latest of all, so that those with a good clock are behind it."""
    hour = r"(60:0\d|59:5\d) min"
    with open_islands(tmp_path, CALM) as start:
        first, second = start(1, ahead_s=3600.0), start(2)
        assert wait_until(lambda: together([first, second]), 120)
        says(rf"^the clocks of island-\d's and island-\d's machines are {hour} apart: set the one that", second.folder)
        third = start(3)
        assert wait_until(lambda: together([first, second, third]), 120)
        says(rf"^the clock of island-1's machine is {hour} ahead of the others': set the clock$", second.folder)
        assert "clock of island-2" not in diloco("why", second.folder)
        assert "nothing is wrong with it" in diloco("why", second.folder, "island-2")


@pytest.mark.soak
def test_one_whose_ticket_was_revoked_is_told_so_and_who_came_in_with_it_stays(tmp_path: Path) -> None:
    with open_islands(tmp_path, CALM) as start:
        founder, member = start(1), start(2)
        healthy(tmp_path, founder, member)
        ticket = diloco("ticket", "create", founder.folder, "--islands", "2").split()[0]
        assert ticket.startswith("diloco2-")
        (tmp_path / "guests").write_text(ticket)
        guest, watch = tmp_path / "guest", tmp_path / "watch"
        looking = diloco("ticket", "create", founder.folder, "--right", "watch").split()[0]
        watch.write_text(looking)
        assert '"island-2"' in diloco("status", watch, "--json")
        mine, *ours = (line.split()[0] for line in diloco("ticket", "list", founder.folder).splitlines())
        for each in (mine, *ours):
            assert "is revoked" in diloco("ticket", "revoke", founder.folder, each)
        assert wait_until(lambda: len(founder.events("amended")) == 3, 60)
        refused = diloco("join", tmp_path / "guests", "--name", "guest", "--dir", guest)
        assert "its ticket was revoked" in refused and not guest.exists()
        assert "its ticket was revoked" in diloco("status", watch)
        healthy(tmp_path, founder, member)


@pytest.mark.slow
def test_of_two_islands_with_one_key_the_one_that_came_later_ends_and_the_first_goes_on(tmp_path: Path) -> None:
    twin = r"another island has this one's key, and takes part as {} from [\d.]+:\d+"
    with open_islands(tmp_path, CALM) as start:
        founder, first = start(1), start(2)
        assert wait_until(lambda: together([founder, first]), 120)
        key = tmp_path / "moved.key"
        diloco("key", "export", first.folder, key)
        diloco("key", "import", key, tmp_path / "island-3")
        later = start(3)
        assert wait_until(lambda: later.process.poll() is not None, 120)
        *_, line = later.process.communicate()[1].splitlines()
        assert later.process.returncode == 2
        assert re.fullmatch(
            rf"error\[identity\]: {twin.format('island-2')}: stop it, or give this one a folder of its own .*", line
        )
        assert wait_until(lambda: first.told("twin"), 60)
        says(rf"^island-2: {twin.format('island-3')}\. Stop one of them", first.folder)
        since = time.time()
        assert wait_until(lambda: founder.rounds_of(2, since) and first.rounds_of(2, since), 120)
        assert first.process.poll() is None
