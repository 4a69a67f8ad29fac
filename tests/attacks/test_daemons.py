"""A stranger ends p2pd of every address that it knows, again and again: whoever was invited gets in all the same."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from hivemind.p2p import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from launched import wait_until
from real_islands import Island, addresses_of, end, open_islands, together
from strangers import Outsider

from diloco.errors import DirectoryError

KILL_EVERY_S = 0.2
MORE_BYTES = 300 << 20
BEGUN = 300  # messages: each makes p2pd take 4 MiB of its 1 GiB


@contextmanager
def again_and_again(attack: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(KILL_EVERY_S):
            attack()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def has_address(island: Island) -> bool:
    return (island.folder / "addresses").exists()


def accepts(address: str) -> bool:
    """Whether somebody listens at a multiaddr: before that, no stranger can do anything to p2pd."""
    _, _, host, _, port, *_ = address.split("/")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


@contextmanager
def no_daemon_lives(islands: list[Island]) -> Iterator[list[int]]:
    """Kill p2pd of each of these as soon as a stranger could connect to it; the list grows with the kills."""
    killed: list[int] = []

    def kill() -> None:
        for island in filter(has_address, list(islands)):
            with suppress(AssertionError, OSError, ValueError):  # it has none now
                if (daemon := island.daemon) and all(map(accepts, addresses_of(island))):
                    os.kill(daemon, signal.SIGKILL)
                    killed.append(island.process.pid)

    with again_and_again(kill):
        yield killed


@contextmanager
def every_daemon_is_flooded(islands: list[Island], folder: Path) -> Iterator[list[int]]:
    """Have a stranger begin messages that it never ends, at each address; the list grows with the daemons it ended."""
    ended: list[int] = []

    def flood() -> None:
        for number, island in enumerate(filter(has_address, list(islands))):
            try:
                outsider = Outsider(folder / f"{number}.key", addresses_of(island))
            except (P2PDaemonError, RuntimeError, DirectoryError, StopIteration):
                continue  # its p2pd does not run now
            with closing(outsider):
                try:
                    outsider.begin_messages(BEGUN)
                except (P2PDaemonError, ControlFailure, OSError, EOFError, DirectoryError):
                    ended.append(island.process.pid)

    with again_and_again(flood):
        yield ended


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def gets_in(island: Island, islands: list[Island], since: float = 0.0) -> None:
    """Wait until all of these are in rounds together."""
    assert wait_until(lambda: island.process.poll() is not None or together(islands, since), 240)
    assert island.process.poll() is None, end(island.process)


def test_who_was_invited_gets_in_and_rounds_go_on_while_no_daemon_lives(tmp_path: Path) -> None:
    with open_islands(tmp_path) as start:
        islands = [start(1)]
        with no_daemon_lives(islands) as killed:
            assert wait_until(lambda: islands[0].process.pid in killed)
            islands.append(start(2))
            gets_in(islands[1], islands)
            since = time.time()
            assert wait_until(lambda: len(islands[0].rounds_of(2, since)) > 2)
            assert islands[1].process.pid in killed, "its own daemon was ended, too"


@pytest.mark.soak
@pytest.mark.parametrize("way", ["by bytes", "by kills"])
def test_islands_come_go_and_come_back_while_every_daemon_is_ended(tmp_path: Path, way: str) -> None:
    """For longer than records are valid: nobody is forgotten, and nothing piles up."""
    with open_islands(tmp_path) as start:
        islands = [start(1), start(2)]
        assert wait_until(lambda: together(islands), 120)
        before = memory_of(islands[0].process.pid)
        ending = no_daemon_lives(islands) if way == "by kills" else every_daemon_is_flooded(islands, tmp_path)
        with ending as ended:
            assert wait_until(lambda: {island.process.pid for island in islands} <= {*ended})
            islands.append(start(3))
            gets_in(islands[2], islands)
            end(islands[1].process)
            since = time.time()
            islands[1] = start(2)
            gets_in(islands[1], islands, since)
            time.sleep(90)
            since = time.time()
            assert wait_until(lambda: together(islands, since), 60), "records that were valid before have expired"
            assert memory_of(islands[0].process.pid) < before + MORE_BYTES
