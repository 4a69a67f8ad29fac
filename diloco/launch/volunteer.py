"""An island of a volunteer: it trains while it may, leaves in good order when it must not, and comes back by itself.

The island is a child process, so that neither memory nor GPU are held while it is away.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from subprocess import Popen

from diloco.config.file import load_config
from diloco.errors import ConfigError, DeviceError
from diloco.launch.fleet import LEAVE_S, is_saving
from diloco.launch.processes import start_process
from diloco.run.allowance import Hours, IdleGpu, MonthlyBytes
from diloco.run.signals import signals

VOLUNTEER = "DILOCO_VOLUNTEER"  # says to the child that somebody heeds the limits
LOOK_S = 2.0
QUIET_S = 10.0  # for which nothing may object before the island comes back: others come and go on a GPU
ASK_S = 120.0  # for an island to leave, or what a fleet gives it if that is more; then it is killed, unless it saves
FAILURES = 5  # of a limit in a row, after which the island leaves: nobody knows any more whether it may train
Limit = Callable[[datetime], str]


def limits_of(
    folder: Path, hours: Hours | None, max_month: int | None, *, yield_gpu: bool, own: Callable[[int], bool]
) -> list[Limit]:
    """List the limits that were given."""
    limits: list[Limit] = [hours.reason] if hours is not None else []
    limits += [MonthlyBytes(folder, max_month).reason] if max_month is not None else []
    limits += [IdleGpu(own, visible_gpus()).reason] if yield_gpu else []
    return limits


def visible_gpus() -> frozenset[int] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number; None where it names none so."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return frozenset(map(int, names)) if names and all(name.isdigit() for name in names) else None


class PatientLimit:
    """Ask a limit; where it cannot be told, keep the last answer, until that has failed too often in a row."""

    def __init__(self, limit: Limit, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self._answer, self._told = "", ""
        self._failures = 0

    def __call__(self, now: datetime) -> str:
        """Say why an island must not train now; empty if it may."""
        try:
            self._answer, self._failures = self._limit(now), 0
        except DeviceError as error:
            self._failures += 1
            if self._failures >= FAILURES:
                self._answer = str(error)
            elif str(error) != self._told:
                self._told = str(error)
                self._say(f"{error}. Its last answer counts, until it has failed {FAILURES} times")
        return self._answer


class Volunteer:
    """Start an island while no limit objects, and ask it to leave when one does."""

    def __init__(self, arguments: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
        self._arguments, self._folder, self._say = arguments, folder, say
        self._process: Popen[bytes] | None = None
        self._told = ""

    def owns(self, pid: int) -> bool:
        """Tell whether a process is the island's, or one that it has started."""
        mine = {os.getpid()} | ({self._process.pid} if self._process is not None else set())
        while pid > 1:
            if pid in mine:
                return True
            try:
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return False
        return False

    def run(self, limits: Sequence[Limit]) -> int:
        """Heed the limits until the island ends by itself or a signal ends this; return its exit code."""
        quiet_since = -QUIET_S  # the first time it need not wait
        patient = [PatientLimit(limit, self._say) for limit in limits]
        with signals() as heard:
            try:
                while not heard:
                    if reason := next(filter(None, (limit(datetime.now()) for limit in patient)), ""):
                        quiet_since = time.monotonic()
                        self._leave(heard, reason)
                    elif self._process is None and time.monotonic() - quiet_since >= QUIET_S:
                        self._come()
                    if self._process is not None and (code := self._process.poll()) is not None:
                        return code if code >= 0 else 128 - code
                    self._pause(heard)
                return self._leave(heard, "")
            finally:
                self._kill()

    def _pause(self, heard: list[int]) -> None:
        deadline = time.monotonic() + LOOK_S
        while not heard and time.monotonic() < deadline:
            time.sleep(0.1)

    def _come(self) -> None:
        if self._told:
            self._say("the island comes back")
        self._told = ""
        self._process = start_process(self._arguments, {VOLUNTEER: "1"}, None, new_session=True)

    def _leave(self, heard: list[int], reason: str) -> int:
        """Ask the island to leave, and wait for it; a second signal, or too long, kills it. Return its exit code."""
        if reason and reason.partition(", back")[0] != self._told.partition(", back")[0]:
            self._say(f"the island {'leaves' if self._process is not None else 'waits'}: {reason} (Ctrl-C ends it)")
        self._told = reason
        process, signalled = self._process, len(heard)
        if process is None:
            return 0
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._given_s()
        while process.poll() is None:
            late = time.monotonic() > deadline and not is_saving(self._folder)
            if late or len(heard) > max(1, signalled):
                self._kill()
            time.sleep(0.1)
        self._process = None
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _given_s(self) -> float:
        """Return how long the island may take to leave."""
        try:
            return max(ASK_S, load_config(self._folder / "config.yaml").elastic.grace_s + LEAVE_S)
        except ConfigError:  # it is not in the run yet, and has nothing to hand over
            return ASK_S

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def volunteer(
    limits_for: Callable[[Callable[[int], bool]], list[Limit]], folder: Path, say: Callable[[str], None]
) -> int:
    """Run this process's own command as an island that heeds limits, in this folder; return its exit code."""
    island = Volunteer(sys.argv[1:], folder, say)
    return island.run(limits_for(island.owns))
