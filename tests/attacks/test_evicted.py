"""An island that the owner takes out while it is away: the others stop calling it, and it ends when it comes back."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from launched import wait_until
from real_islands import Island, addresses_of, end, open_islands, ports_of, together

from diloco.comm.peers.identity import Identity
from diloco.history.log import newest_state
from diloco.run.folder import OUTER
from diloco.run.local import IDENTITY_KEY

QUIET_S = 20.0  # longer than the longest pause between two dials


class Listener:
    """Count who connects to a port where an island was, and say nothing to them."""

    def __init__(self, port: int) -> None:
        self.calls, self._server = 0, socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            try:
                self._server.accept()[0].close()
            except OSError:
                return
            self.calls += 1

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def evicted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Island], list[Listener]]]:
    """An island, and a second one that was killed and then taken out; and who listens where that was."""
    with ExitStack() as stack:
        start = stack.enter_context(open_islands(tmp_path_factory.mktemp("run")))
        two = [start(1), start(2)]
        assert wait_until(lambda: together(two), 600)
        ports = [int(addresses_of(two[1])[0].split("/")[4]), *ports_of(two[1].process.pid)]
        end(two[1].process)
        assert len(ports) > 1 and wait_until(lambda: all(is_free(port) for port in ports))
        listeners = [Listener(port) for port in ports]
        for listener in listeners:
            stack.callback(listener.close)
        assert wait_until(lambda: all(listener.calls for listener in listeners), 600), "who is lost is dialled"
        command = [sys.executable, "-m", "diloco", "evict", str(two[0].folder), "island-2"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        name = Identity.load(two[1].folder / IDENTITY_KEY).peer_id
        assert wait_until(lambda: name in newest_state(two[0].folder / OUTER).evicted, 600)
        yield two, listeners


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.soak
def test_who_was_taken_out_is_not_called_any_more(evicted) -> None:
    islands, listeners = evicted
    time.sleep(QUIET_S / 2)  # for calls that were under way
    calls, since = [listener.calls for listener in listeners], time.time()
    time.sleep(QUIET_S)
    assert [listener.calls for listener in listeners] == calls
    assert islands[0].rounds_of(1, since), "and rounds go on"


@pytest.mark.soak
def test_who_was_taken_out_while_it_was_away_ends_and_says_why(evicted) -> None:
    islands, listeners = evicted
    for listener in listeners:
        listener.close()
    command = [
        sys.executable, "-m", "diloco", "join", str(islands[0].folder / "ticket"), "--name", "island-2",
        "--dir", str(islands[1].folder),
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert re.search(r"^error\[evicted\]: the run's owner has taken this island out", said.stderr, re.M), said
    assert said.returncode != 0
