"""`diloco ...`, or the processes of a mesh, as processes that start warm: forked from a server that has imported what
trains.

It is a real process, with its own memory, threads, session, signals and exit code; all that it spares is five seconds
of imports. What a fresh interpreter does is shown by the tests that start one.
"""

import multiprocessing as mp
import multiprocessing.connection
import os
import runpy
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

FORKED = mp.get_context("forkserver")  # one server for all that forks: a second list of imports would replace this one
FORKED.set_forkserver_preload(
    ["diloco.run.start", "diloco.simulate.real.network", "torch.distributed.fsdp", "torch._dynamo", "numba"]
)
HERE = "127.0.0.1"


def _begin(words: tuple[str, ...], log: Path, errors_only: bool, environment: dict[str, str]) -> None:
    """Make this process look like one that a shell has started."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "r+b") as nothing, log.open("ab") as out:
        for theirs, own in ((nothing, 0), (nothing if errors_only else out, 1), (out, 2)):
            os.dup2(theirs.fileno(), own)
    sys.argv = [*words]


def _run(words: tuple[str, ...], log: Path, errors_only: bool, ahead_s: float, environment: dict[str, str]) -> None:
    real_time = time.time
    time.time = lambda: real_time() + ahead_s
    _begin(("diloco", *words), log, errors_only, environment)
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


def _run_rank(program: Path, words: tuple[str, ...], log: Path, environment: dict[str, str]) -> None:
    _begin((str(program), *words), log, False, environment)
    os.chdir(log.parent)
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def run_ranks(program: Path, *words: str, count: int, log: Path) -> str:
    """Run a program in so many processes, which meet as under torchrun, in the folder of their log.

    All of them have to succeed; what they have printed is returned.
    """
    from torch.distributed import TCPStore

    meeting = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)  # torchrun keeps one, too
    shared = {"MASTER_ADDR": HERE, "MASTER_PORT": str(meeting.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = []
        for rank in map(str, range(count)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            environment = alone if count == 1 else {**alone, **shared, **place}
            process = FORKED.Process(target=_run_rank, args=(program, words, log, environment))
            process.start()
            stack.callback(process.kill)
            processes.append(process)
        while not any(process.exitcode for process in processes) and any(p.exitcode is None for p in processes):
            mp.connection.wait([process.sentinel for process in processes if process.exitcode is None])
        assert [process.exitcode for process in processes] == [0] * count, log.read_text()[-4000:]
    return log.read_text()
