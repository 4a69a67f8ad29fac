"""The processes of one island's mesh, on this machine: started, watched, named when they fail, and restarted.

They are forked from this one, which has imported all that they need: imports take seconds of processor time, which each
process would spend anew, at the start and at each restart. Where there may be GPUs they start as new interpreters: CUDA
does not survive a fork once anything has asked it for devices. They find each other by torchrun's variables and a file;
signals are passed on to them, and none outlives another.

An island needs all its processes: if one dies or hangs (`island/hangs.py` says what that is), the others are ended and
the island is restarted, unless an error message says that it cannot work. An island over several machines is started by
torchrun, which does the same with `--max-restarts`; its processes then find a hang themselves (`island/signs.py`).
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from diloco.config.schema import IslandConfig
from diloco.errors import DeviceError
from diloco.island.hangs import HangDetector, doing, process_state
from diloco.island.signs import ENDED, FOLDER, HUNG, FolderSigns
from diloco.launch.devices import has_driver, usable_cores
from diloco.launch.processes import REFUSED, end_with_parent, killed_by, last_line
from diloco.run.signals import ASKED, LEFT, PAUSE, signals

LOOK_S = 0.1
KILLED_S = 60.0  # for the system to end a process that was killed
LAST_WORDS_S = 3.0  # for the leader to say by itself what went wrong
RESTARTS = 5  # in a row; an island that has lived for LONG_LIFE_S begins to count anew
LONG_LIFE_S = 600.0
FIRST_PAUSE_S = 1.0  # before the first restart; twice as long before each further one
LIVES = "TORCHELASTIC_RESTART_COUNT"  # how often the processes were restarted, as torchrun says it, too
SUPERVISED = "DILOCO_SUPERVISED"  # set by who restarts the whole island: then it is not restarted here
BEGAN = "DILOCO_BEGAN"  # when its first life did
NEEDED = ("diloco.run.start", "diloco.island.parallel", "torch.distributed.fsdp", "torch._dynamo", "numba")


@dataclass(frozen=True)
class Ending:
    """Describe how one life of an island ended: its exit code, and what is to be said about it."""

    code: int
    text: str = ""  # which process failed, and how; empty where the leader has said it
    final: bool = False  # it ended well, was asked to end, or has refused: no restart helps


def start_if_several(island: IslandConfig, main: Callable[[], None], *, restart: bool = True) -> None:
    """Run the same command, which `main` reads, once for each process of the mesh, if it has several that nobody has
    started; then exit with their code."""
    count = island.fsdp * island.tp
    if count > 1 and "RANK" not in os.environ:
        raise SystemExit(run_processes(count, main, island.hang_s, restart=restart))


def run_processes(count: int, main: Callable[[], None], hang_s: float, *, restart: bool = True) -> int:
    """Run this process's command as one island of so many processes until its end, and return its exit code."""
    restart = restart and SUPERVISED not in os.environ
    failures, life, text, first_began = 0, 0, "", time.time()
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(given) if given.isdecimal() and int(given) else usable_cores()
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // count))  # torch reads it when it is imported
    with signals() as heard:
        context = _context()
        if heard:  # in the seconds that took
            return 128 + heard[0]
        while True:
            began = time.monotonic()
            ending = _live(MeshCommand(context, count, main, hang_s, first_began, life, text), heard)
            failures = 1 if time.monotonic() - began > LONG_LIFE_S else failures + 1
            text, again = ending.text, restart and not ending.final and failures <= RESTARTS
            pause_s = FIRST_PAUSE_S * 2 ** (failures - 1)
            if text and not heard:
                outlook = f"the island restarts in {pause_s:.0f} s" if again else _no_restart(failures, restart)
                print(f"error[process]: {text}; {outlook}", file=sys.stderr, flush=True)
            if not again or not _pause(pause_s, heard):
                return ending.code
            life += 1


def _context() -> BaseContext:
    """Return how processes start: forked, where they may be, after importing what they need, which starts no thread."""
    if not sys.platform.startswith("linux") or has_driver():
        return multiprocessing.get_context("spawn")
    for module in NEEDED:
        import_module(module)
    gc.freeze()  # what is never collected is never copied, either
    return multiprocessing.get_context("fork")


def _run(main: Callable[[], None], environment: Mapping[str, str], log: Path | None, parent: int) -> None:
    """Run a command in a process that has just been started, and make it look like one of a shell."""
    if (prepare := end_with_parent(parent)) is not None:
        prepare()
    for number in ASKED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
    multiprocessing.set_start_method(None, force=True)  # a new interpreter has taken over ours
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if log is not None:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    main()


def _no_restart(failures: int, restart: bool) -> str:
    tried = restart and failures > RESTARTS
    return f"the island has failed {failures} times in a row and ends" if tried else "the island ends with it"


def _pause(seconds: float, heard: list[int]) -> bool:
    """Wait before a restart; return False if this process is asked to stop meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not heard:
        time.sleep(LOOK_S)
    return not heard


@dataclass(frozen=True)
class MeshCommand:
    """Specify what the processes of one life of an island run, and how they start."""

    context: BaseContext
    count: int
    main: Callable[[], None]
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
            mesh.end()


@dataclass
class _Mesh:
    """The processes of one life."""

    command: MeshCommand
    folder: Path
    processes: list[BaseProcess] = field(default_factory=list)

    def start(self) -> None:
        for rank in range(self.command.count):
            self.processes.append(self._start(rank))
        self.signs = FolderSigns(self.folder)
        pids = {rank: process.pid for rank, process in enumerate(self.processes) if process.pid is not None}
        self.detector = HangDetector(self.command.count, self.command.hang_s, time.monotonic(), pids)

    def _start(self, rank: int) -> BaseProcess:
        """Start one process. The leader speaks for all: what others print is kept aside. They share a process group,
        for whoever ends all of it."""
        command, count = self.command, str(self.command.count)
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
            "DILOCO_MEETING": f"file://{self.folder}/meeting", FOLDER: str(self.folder),
            LIVES: str(command.life), ENDED: command.ended, BEGAN: str(command.began),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        }  # fmt: skip
        arguments = command.main, environment, self._log(rank) if rank else None, os.getpid()
        process = command.context.Process(target=_run, args=arguments)  # type: ignore[attr-defined]
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKED)  # until it has handlers of its own
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
        return process

    def _log(self, rank: int) -> Path:
        return self.folder / f"process-{rank}.log"

    def watch(self, heard: list[int]) -> Ending:
        """Wait until all have ended well, or one has not, or hangs."""
        passed_on = 0
        while True:
            codes = [process.exitcode for process in self.processes]
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
                    if process.pid is not None and process.exitcode is None:
                        os.kill(process.pid, PAUSE if heard[-1] == PAUSE else signal.SIGTERM)
            time.sleep(LOOK_S)

    def _observe(self, now: float) -> None:
        self.detector.wake(now)
        for rank, process in enumerate(self.processes):
            if process.pid is not None and process.exitcode is None:
                self.detector.observe(rank, self.signs.get(rank), process_state(process.pid), now)

    def _failed(self, codes: list[int | None], *, asked: bool) -> Ending:
        """Say which process has failed. One that was killed says nothing itself; one that fails may do so because the
        leader has, which then says why."""
        code, failed = min((code, rank) for rank, code in enumerate(codes) if code not in (None, 0, LEFT))
        leader = self.processes[0]
        if code > 0:  # below it are signals
            leader.join(LAST_WORDS_S)
        # what was not refused at first may be taken again later
        final = asked or (REFUSED in (code, leader.exitcode) and not self.command.life)
        sign, name = self.detector.last_sign(failed), self.detector.name(failed)
        if code < 0:
            text = f"{name} was {killed_by(code)} at {time.strftime('%H:%M:%S')}{doing(sign)}"
        elif leader.exitcode == REFUSED and final:
            text = ""  # which the leader has said
        else:
            text = f"{name} ended{doing(sign)}: {last_line(self._log(failed)) if failed else 'its message is above'}"
        code = leader.exitcode or code
        return Ending(code if code > 0 else 128 - code, text, final=final)

    def end(self) -> None:
        """Kill what is left of it; raise DeviceError for a process that not even that ends."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(KILLED_S)
            if process.is_alive():
                raise DeviceError(f"the system does not end process {process.pid}: a device or a file system is stuck")
