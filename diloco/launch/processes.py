"""Processes of this machine: an island as a child of this process, and how any `diloco` command is started.

A child never outlives its parent, and a Ctrl-C in the terminal does not reach it. `mesh_processes.py` has the processes
of one island's mesh.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from diloco.run.signals import PAUSE

PR_SET_PDEATHSIG = 1
REASON_BYTES = 4096
REFUSED = 2  # the exit code after an error that a person can meet


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


def end_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """Return what a child calls right after the fork, so that it is killed when its parent dies: this process, unless
    another one's number is given.

    What it needs is looked up before. Linux only: elsewhere there is no such signal, None is returned, and a parent
    that is killed leaves islands that continue by themselves.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, parent or os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was set
            os._exit(1)

    return prepare
