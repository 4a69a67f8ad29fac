"""What tests of transports and of the directory share."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco.comm.transport.auto import AutoTransport
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.transport import Inbox, Stream

if TYPE_CHECKING:
    from diloco.comm.peers.directory import Directory

SOON = 10.0  # no test waits that long unless it fails
HERE = "127.0.0.1"


def until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


class Background:
    """A call in a thread: `result()` gives what it returned or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 -- handed to the waiting test
            self._error = error

    def blocked(self) -> bool:
        self._thread.join(0.1)
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "still blocked"
        if self._error:
            raise self._error
        return self._value


def until_stuck(stream: Stream) -> None:
    """Until what a thread sends over it gets no further."""
    seen = [0, 0]

    def stuck() -> bool:
        time.sleep(0.1)
        seen[:] = seen[1], stream.bytes_sent
        return seen[0] == seen[1] > 2**20

    until(stuck)


def out_of_threads(thread: threading.Thread) -> None:
    """In place of `Thread.start`."""
    raise RuntimeError("can't start new thread")


def auto_on(directory: "Directory") -> AutoTransport:
    inbox = Inbox()
    direct = DirectTransport(directory.identity.peer_id, HERE, inbox=inbox)
    return AutoTransport(direct, Libp2pTransport(directory, inbox=inbox))


def child_of(pid: int) -> int:
    """The only one, or 0."""
    return int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout or 0)


def guard_of(directory: "Directory") -> int:
    return int(directory.p2p._child.pid)


def kill_daemon(directory: "Directory") -> None:
    os.kill(child_of(guard_of(directory)), signal.SIGKILL)


def end_loop(directory: "Directory") -> None:
    def fail() -> None:
        raise SystemExit("the loop dies")

    directory.thread.loop.call_soon_threadsafe(fail)
