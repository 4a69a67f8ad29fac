"""The processes of one island's mesh, on this machine: started, watched, named when they fail, and restarted.

They find each other by torchrun's variables and a file; signals are passed on to them, and none outlives another. An
island needs all its processes: if one dies or hangs (`island/hangs.py` says what that is), the others are ended and the
island is restarted, unless an error message says that it cannot work. An island over several machines is started by
torchrun, which does the same with `--max-restarts`; its processes then find a hang themselves (`island/signs.py`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diloco.config.schema import IslandConfig
from diloco.errors import DeviceError
from diloco.island.hangs import HangDetector, doing, process_state
from diloco.island.signs import ENDED, FOLDER, HUNG, FolderSigns
from diloco.launch.processes import REFUSED, killed_by, last_line, start_process
from diloco.run.signals import LEFT, PAUSE, signals

LOOK_S = 0.1
LAST_WORDS_S = 3.0  # for the leader to say by itself what went wrong
RESTARTS = 5  # in a row; an island that has lived for LONG_LIFE_S begins to count anew
LONG_LIFE_S = 600.0
FIRST_PAUSE_S = 1.0  # before the first restart; twice as long before each further one
LIVES = "TORCHELASTIC_RESTART_COUNT"  # how often the processes were restarted, as torchrun says it, too
SUPERVISED = "DILOCO_SUPERVISED"  # set by who restarts the whole island: then it is not restarted here
BEGAN = "DILOCO_BEGAN"  # when its first life did


@dataclass(frozen=True)
class Ending:
    """Describe how one life of an island ended: its exit code, and what is to be said about it."""

    code: int
    text: str = ""  # which process failed, and how; empty where the leader has said it
    final: bool = False  # it ended well, was asked to end, or has refused: no restart helps


def start_if_several(island: IslandConfig, *, restart: bool = True) -> None:
    """Run the same command once for each process of the mesh, if it has several that nobody has started; then exit with
    their code."""
    count = island.fsdp * island.tp
    if count > 1 and "RANK" not in os.environ:
        raise SystemExit(run_processes(count, sys.argv[1:], island.hang_s, restart=restart))


def run_processes(count: int, arguments: Sequence[str], hang_s: float, *, restart: bool = True) -> int:
    """Run `diloco ARGUMENTS…` as one island of so many processes until its end, and return its exit code."""
    restart = restart and SUPERVISED not in os.environ
    failures, life, text, first_began = 0, 0, "", time.time()
    with signals() as heard:
        while True:
            began = time.monotonic()
            ending = _live(MeshCommand(count, arguments, hang_s, first_began, life, text), heard)
            failures = 1 if time.monotonic() - began > LONG_LIFE_S else failures + 1
            text, again = ending.text, restart and not ending.final and failures <= RESTARTS
            pause_s = FIRST_PAUSE_S * 2 ** (failures - 1)
            if text and not heard:
                _report(text, f"the island restarts in {pause_s:.0f} s" if again else _no_restart(failures, restart))
            if not again or not _pause(pause_s, heard):
                return ending.code
            life += 1


def _no_restart(failures: int, restart: bool) -> str:
    tried = restart and failures > RESTARTS
    return f"the island has failed {failures} times in a row and ends" if tried else "the island ends with it"


def _report(text: str, what_now: str) -> None:
    print(f"error[process]: {text}; {what_now}", file=sys.stderr, flush=True)


def _pause(seconds: float, heard: list[int]) -> bool:
    """Wait before a restart; return False if this process is asked to stop meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not heard:
        time.sleep(LOOK_S)
    return not heard


@dataclass(frozen=True)
class MeshCommand:
    """Specify what the processes of one life of an island run."""

    count: int
    arguments: Sequence[str]
    hang_s: float
    began: float  # Unix time of the first life
    life: int  # 0 is the first
    ended: str = ""  # how the one before ended


def _live(command: MeshCommand, heard: list[int]) -> Ending:
    """Run the processes once, in a temporary folder of theirs; none is left at the end."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="diloco-")
    except OSError as error:
        raise DeviceError(f"no temporary folder can be made ({error.strerror}): set TMPDIR to another place") from None
    with temporary as name:
        mesh = _Mesh(command, Path(name))
        try:
            mesh.start()
            return mesh.watch(heard)
        finally:
            for process in mesh.processes:
                process.kill()
                process.wait()


@dataclass
class _Mesh:
    """The processes of one life."""

    command: MeshCommand
    folder: Path
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start(self) -> None:
        for rank in range(self.command.count):
            self.processes.append(self._start(rank))
        self.signs = FolderSigns(self.folder)
        pids = {rank: process.pid for rank, process in enumerate(self.processes)}
        self.detector = HangDetector(self.command.count, self.command.hang_s, time.monotonic(), pids)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        """Start one process. The leader speaks for all: what others print is kept aside. They share a process group,
        for whoever ends all of it."""
        command, count = self.command, str(self.command.count)
        log = None if rank == 0 else self._log(rank).open("wb")
        ours = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
            "DILOCO_MEETING": f"file://{self.folder}/meeting", FOLDER: str(self.folder),
            LIVES: str(command.life), ENDED: command.ended, BEGAN: str(command.began),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
            "OMP_NUM_THREADS": str(max(1, ours // command.count)),
        }  # fmt: skip
        return start_process(command.arguments, environment, log)

    def _log(self, rank: int) -> Path:
        return self.folder / f"process-{rank}.log"

    def watch(self, heard: list[int]) -> Ending:
        """Wait until all have ended well, or one has not, or hangs."""
        passed_on = 0
        while True:
            codes = [process.poll() for process in self.processes]
            now = time.monotonic()
            self._observe(now)
            if any(code not in (None, 0, LEFT) for code in codes):
                return self._failed(codes, asked=bool(heard))
            if None not in codes:
                return Ending(LEFT if LEFT in codes else 0, final=True)
            if (hang := self.detector.find(now)) is not None:
                return Ending(HUNG, hang.text, final=bool(heard))
            if len(heard) > passed_on:
                passed_on = len(heard)
                for process in self.processes:
                    process.send_signal(PAUSE if heard[-1] == PAUSE else signal.SIGTERM)
            time.sleep(LOOK_S)

    def _observe(self, now: float) -> None:
        self.detector.wake(now)
        for rank, process in enumerate(self.processes):
            if process.returncode is None:
                self.detector.observe(rank, self.signs.get(rank), process_state(process.pid), now)

    def _failed(self, codes: list[int | None], *, asked: bool) -> Ending:
        """Say which process has failed. One that was killed says nothing itself; one that fails may do so because the
        leader has, which then says why."""
        failed = min((code, rank) for rank, code in enumerate(codes) if code not in (None, 0, LEFT))[
            1
        ]  # below 0: signals
        leader, code = self.processes[0], self.processes[failed].returncode
        if code > 0:
            with suppress(subprocess.TimeoutExpired):
                leader.wait(LAST_WORDS_S)
        refused = REFUSED in (code, leader.returncode)
        sign, name = self.detector.last_sign(failed), self.detector.name(failed)
        if code < 0:
            text = f"{name} was {killed_by(code)} at {time.strftime('%H:%M:%S')}{doing(sign)}"
        elif leader.returncode == REFUSED:
            text = ""  # which the leader has said
        else:
            text = f"{name} ended{doing(sign)}: {last_line(self._log(failed)) if failed else 'its message is above'}"
        code = leader.returncode or code
        return Ending(code if code > 0 else 128 - code, text, final=refused or asked)
