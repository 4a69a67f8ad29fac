"""An island of several processes on this machine: starts them, passes signals on, and lets none outlive another.

They find each other by torchrun's variables and a file. An island over several machines is started by torchrun.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diloco.config.schema import IslandConfig
from diloco.launch.child import killed_by, last_line, start_process
from diloco.run.signals import PAUSE, signals

LOOK_S = 0.1
LAST_WORDS_S = 3.0  # for the leader to say by itself what went wrong
REFUSED = 2  # the exit code after an error that a person can meet

Processes = list["subprocess.Popen[bytes]"]


def start_if_several(island: IslandConfig) -> None:
    """Where the mesh wants several processes and nobody has started them: the same command once for each of them."""
    count = island.fsdp * island.tp
    if count > 1 and "RANK" not in os.environ:
        raise SystemExit(run_processes(count, sys.argv[1:]))


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """`diloco ARGUMENTS…` as one island of so many processes; its exit code."""
    with tempfile.TemporaryDirectory(prefix="diloco-") as name, signals() as heard:
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
    """The leader speaks for all: what others print is kept aside. In one process group, for whoever ends all of it."""
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
    """Until all have ended well, or one has not: an island needs all its processes."""
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
    """A process that was killed says nothing. One that fails may do so because the leader has, which then says why."""
    leader, code = processes[0], processes[failed].returncode
    if code > 0:
        with suppress(subprocess.TimeoutExpired):
            leader.wait(LAST_WORDS_S)
    if failed and not quiet and (code < 0 or leader.returncode != REFUSED):
        how = f"was {killed_by(code)}" if code < 0 else f"ended: {last_line(_log(folder, failed))}"
        print(f"error[process]: process {failed} of {len(processes)} {how}; the island ends with it", file=sys.stderr)
    code = leader.returncode or code
    return code if code > 0 else 128 - code
