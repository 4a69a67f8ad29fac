"""`diloco ...` as a process of its own that starts warm: forked from a server that has imported what trains.

It is a real process, with its own memory, threads, session, signals and exit code; all that it spares is five seconds
of imports. What a fresh interpreter does is shown by the tests that start one.
"""

import multiprocessing as mp
import os
import signal
import sys
from pathlib import Path

FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["diloco.run.start", "diloco.simulate.real.network", "torch._dynamo", "numba"])


def _run(words: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing, log.open("ab") as out:
        for theirs, own in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(theirs.fileno(), own)
    sys.argv = ["diloco", *words]
    from diloco.cli import main

    main()


class ForkedCommand:
    """A command that was started, with those of Popen's methods that the tests need."""

    def __init__(self, *words: str, log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = FORKED.Process(target=_run, args=(words, log, environment))
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
        os.kill(self.pid, number)
