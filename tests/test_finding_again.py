"""Islands find each other again: after long cuts, without their daemon, with wrong clocks. Real processes."""

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from launched import wait_until
from real_islands import Start, end, open_islands, together

from diloco.errors import ConfigError
from diloco.run.folder import LogFile
from diloco.simulate.real.netns import Namespaces, refuse_if_not_permitted


def permitted() -> bool:
    try:
        refuse_if_not_permitted()
    except ConfigError:
        return False
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with open_islands(tmp_path) as make:
        yield make


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
