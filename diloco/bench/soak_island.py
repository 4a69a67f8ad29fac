"""Run one island of a soak as a process of its own, which nothing but the bench starts again."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.bench.soak_proc import Usage, daemons, descendants, sockets_of, usage_of
from diloco.bench.soak_process import CLOCK
from diloco.launch.processes import REFUSED, end_with_parent, killed_by
from diloco.report.events import Event, Start, of_kind
from diloco.report.sinks import EVENTS
from diloco.report.watching import Tail


@dataclass(frozen=True)
class Exit:
    """Describe how a process ended that nobody had ended."""

    refused: bool  # with an error message that a person can act on
    text: str


class SoakIsland:
    """Start, signal and watch one island."""

    def __init__(self, number: int, name: str, root: Path) -> None:
        self.number, self.name, self.folder = number, name, root / name
        self.temporary, self._output = root / "temporary" / name, root / "output" / f"{name}.log"
        self.life, self.sockets = 0, set[str]()
        self.start_at: float | None = None  # it is to be started then, or as soon after that as it has ended
        self.leaving_since: float | None = None
        self.up = self.stopped = self.gone = False
        self.clock_s = 0.0
        self._tail = Tail(self.folder / EVENTS)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_pids: list[int] = []
        self._output_begin = 0

    @property
    def running(self) -> bool:
        """Tell whether it has a process."""
        return self._process is not None

    @property
    def able(self) -> bool:
        """Tell whether it can take part in rounds: it trains, and nobody has stopped it or asked it to leave."""
        return self.running and self.up and not self.stopped and self.leaving_since is None

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start a new life by this command; what it prints is appended to its output file."""
        assert self._process is None
        for folder in (self.temporary, self._output.parent):
            folder.mkdir(parents=True, exist_ok=True)
        own = {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", CLOCK: str(self.clock_s)}
        with self._output.open("ab") as output:
            self._output_begin = output.tell()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **environment, **own}, preexec_fn=end_with_parent(),
            )  # fmt: skip
        self.life += 1
        self.start_at, self.leaving_since = None, None
        self.up = self.stopped = False

    def events(self) -> list[Event]:
        """Return what it reported since the last call; the first report of a life shows that it trains."""
        found = self._tail.read()
        if self.running and of_kind(found, Start):
            self.up = True
        return found

    def ended(self) -> Exit | None:
        """Return how its process ended if it did so just now and nobody had asked for it."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        asked, self._process, self.up, self.stopped = self.leaving_since is not None, None, False, False
        self.leaving_since = None
        if asked and code in (0, -signal.SIGTERM):  # or it had no handler yet
            return None
        how = killed_by(code) if code < 0 else f"exit code {code}"
        return Exit(code == REFUSED, f"{self.name}: {how}: {self._reason()}")

    def _reason(self) -> str:
        """Return the error message of this life; if there is none, its last line of output."""
        with self._output.open("rb") as output:
            output.seek(self._output_begin)
            lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
        return next((line for line in reversed(lines) if line.startswith("error[")), (lines or ["no output"])[-1])

    def kill(self) -> None:
        """End the process at once; its p2pd has to notice by itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process, self.up, self.stopped, self.leaving_since = None, False, False, None

    def close(self) -> None:
        """Let what was stopped continue, and kill it."""
        self.proceed()
        self.kill()

    def ask_to_leave(self, now: float) -> None:
        """Send SIGTERM: it contributes what it has, says goodbye and ends."""
        if self._process is not None:
            self._process.terminate()
            self.leaving_since = now

    def stop(self, *, daemon_too: bool) -> None:
        """Send SIGSTOP to the island, or to all processes that belong to it."""
        assert self._process is not None
        pid = self._process.pid
        self._stopped_pids = [pid, *(descendants(pid) if daemon_too else [])]
        self._signal_stopped(signal.SIGSTOP)
        self.stopped = True

    def proceed(self) -> None:
        """Let what was stopped continue."""
        if self.stopped:
            self._signal_stopped(signal.SIGCONT)
            self.stopped = False

    def _signal_stopped(self, number: signal.Signals) -> None:
        for pid in self._stopped_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_daemon(self) -> bool:
        """Kill its p2pd; return whether there was one."""
        found = daemons(self._process.pid) if self._process is not None else []
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def usage(self) -> Usage | None:
        """Measure what it uses; None if it does not train. Its sockets are noted, too."""
        if self._process is None or not self.up:
            return None
        self.sockets |= sockets_of(self._process.pid)
        return usage_of(self._process.pid, self.folder, self.temporary)


def diloco_command(prefix: Sequence[str], *words: str) -> list[str]:
    """Return the command that runs `diloco WORDS…` as an island of a soak."""
    return [*prefix, sys.executable, "-m", "diloco.bench.soak_process", *words]
