"""Processes of this machine: an island as a child of this process, and the processes of one island's mesh.

A child never outlives its parent, and a Ctrl-C in the terminal does not reach it. The processes of a mesh find each
other by torchrun's variables and a file; signals are passed on to them, and none outlives another. An island over
several machines is started by torchrun.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from diloco.config.schema import IslandConfig
from diloco.errors import DeviceError
from diloco.run.signals import PAUSE, signals

PR_SET_PDEATHSIG = 1
REASON_BYTES = 4096
LOOK_S = 0.1
LAST_WORDS_S = 3.0  # for the leader to say by itself what went wrong
REFUSED = 2  # the exit code after an error that a person can meet

Processes = list["subprocess.Popen[bytes]"]


class Child:
    """Run one island as a process of its own, and report how it ended."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """Run `diloco ARGUMENTS…`; all it prints goes to output.log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.log").open("ab") as log:
            self._process = start_process(arguments, environment, log, new_session=True)

    @property
    def pid(self) -> int | None:
        """Return the number of the process that was started last; None before."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, below zero for a signal; None while it runs or before it starts."""
        return None if self._process is None else self._process.poll()

    def ask_to_stop(self) -> None:
        """Ask it to contribute, say goodbye and leave."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)  # does nothing once it has ended

    def pause(self) -> None:
        """Ask it to finish its step, save, and leave without a goodbye."""
        if self._process is not None:
            self._process.send_signal(PAUSE)

    def kill(self) -> None:
        """End it at once, with whatever it has started in its session."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def reason(self) -> str:
        """Return why it ended, as far as its exit code and its last line of output say."""
        code = self.exit_code or 0
        how = killed_by(code) if code < 0 else f"exit code {code}"
        silent = code in (-signal.SIGKILL, -signal.SIGTERM)  # then its last line is not about that
        last = "" if silent else last_line(self.folder / "output.log")
        return f"{how}: {last}" if last else how


def start_process(
    arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO | None, *, new_session: bool = False
) -> "subprocess.Popen[bytes]":
    """Start `diloco ARGUMENTS…` as a process that does not outlive this one; without a log it prints where we do."""
    return subprocess.Popen(
        [sys.executable, "-m", "diloco", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **environment},
        start_new_session=new_session,
        preexec_fn=end_with_parent(),
    )


def killed_by(code: int) -> str:
    """Name the signal that ended a process, given its exit code below zero."""
    return f"killed by {signal.Signals(-code).name}"


def last_line(path: Path) -> str:
    """Return the last line of a file that is not blank, within its last REASON_BYTES; empty where there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - REASON_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls right after the fork, so that it is killed when its parent dies.

    What it needs is looked up before. Linux only: elsewhere there is no such signal, None is returned, and a parent
    that is killed leaves islands that continue by themselves.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was set
            os._exit(1)

    return prepare


def start_if_several(island: IslandConfig) -> None:
    """Run the same command once for each process of the mesh, if it has several that nobody has started; then exit with
    their code."""
    count = island.fsdp * island.tp
    if count > 1 and "RANK" not in os.environ:
        raise SystemExit(run_processes(count, sys.argv[1:]))


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """Run `diloco ARGUMENTS…` as one island of so many processes, and return its exit code."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="diloco-")
    except OSError as error:
        raise DeviceError(f"no temporary folder can be made ({error.strerror}): set TMPDIR to another place") from None
    with temporary as name, signals() as heard:
        folder = Path(name)
        processes: Processes = []
        try:
            for rank in range(count):
                processes.append(_start(rank, count, arguments, folder))
            return _watch(processes, heard, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start(rank: int, count: int, arguments: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    """Start one process of the mesh. The leader speaks for all: what others print is kept aside. They share a process
    group, for whoever ends all of it."""
    log = None if rank == 0 else _log(folder, rank).open("wb")
    ours = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "DILOCO_MEETING": f"file://{folder}/meeting",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "OMP_NUM_THREADS": str(max(1, ours // count)),
    }  # fmt: skip
    return start_process(arguments, environment, log)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"process-{rank}.log"


def _watch(processes: Processes, heard: list[int], folder: Path) -> int:
    """Wait until all have ended well, or one has not: an island needs all its processes. Return the exit code."""
    passed_on = 0
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            first = min((code, rank) for rank, code in enumerate(codes) if code)[1]  # below zero: by a signal
            return _end(processes, first, folder, quiet=bool(heard))
        if None not in codes:
            return 0
        if len(heard) > passed_on:
            passed_on = len(heard)
            for process in processes:
                process.send_signal(PAUSE if heard[-1] == PAUSE else signal.SIGTERM)
        time.sleep(LOOK_S)


def _end(processes: Processes, failed: int, folder: Path, *, quiet: bool) -> int:
    """Return the exit code after a process has failed, and print which. A process that was killed says nothing. One
    that fails may do so because the leader has, which then says why."""
    leader, code = processes[0], processes[failed].returncode
    if code > 0:
        with suppress(subprocess.TimeoutExpired):
            leader.wait(LAST_WORDS_S)
    if failed and not quiet and (code < 0 or leader.returncode != REFUSED):
        how = f"was {killed_by(code)}" if code < 0 else f"ended: {last_line(_log(folder, failed))}"
        print(f"error[process]: process {failed} of {len(processes)} {how}; the island ends with it", file=sys.stderr)
    code = leader.returncode or code
    return code if code > 0 else 128 - code
