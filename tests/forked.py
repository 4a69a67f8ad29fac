"""`diloco ...` as a process of its own that starts warm: forked from a server that has imported what trains.

It is a real process, with its own memory, threads, session, signals and exit code; all that it spares is five seconds
of imports. What a fresh interpreter does is shown by the tests that start one.
"""

import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path

FORKED = mp.get_context("forkserver")  # one server for all that forks: a second list of imports would replace this one
FORKED.set_forkserver_preload(["diloco.run.start", "diloco.simulate.real.network", "torch._dynamo", "numba"])


def _run(words: tuple[str, ...], log: Path, errors_only: bool, ahead_s: float, environment: dict[str, str]) -> None:
    os.setsid()
    real_time = time.time
    time.time = lambda: real_time() + ahead_s
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "r+b") as nothing, log.open("ab") as out:
        for theirs, own in ((nothing, 0), (nothing if errors_only else out, 1), (out, 2)):
            os.dup2(theirs.fileno(), own)
    sys.argv = ["diloco", *words]
    from diloco.cli import main

    main()


class ForkedCommand:
    """A command that was started, with those of Popen's methods that the tests need; its clock may be ahead."""

    def __init__(self, *words: str, log: Path, errors_only: bool = False, ahead_s: float = 0.0) -> None:
        environment, self._log = {**os.environ, "OMP_NUM_THREADS": "1"}, log
        self._process = FORKED.Process(target=_run, args=(words, log, errors_only, ahead_s, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        self._process.join(timeout_s)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[None, str]:
        """Wait for its end, and return what its log has."""
        self.wait()
        return None, self._log.read_text()
