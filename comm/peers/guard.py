"""Run one command for a parent process and end it when that parent is gone, however it ended: even by SIGKILL.

Started as a script, `python guard.py PARENT_PID COMMAND…`, and needs nothing but Python. It watches for a changed
parent, which works on every POSIX system and, unlike Linux's parent-death signal, does not depend on the thread that
did the fork. That signal only guards the guard: if it is killed itself, the kernel ends the command.

The command gets so much memory and no more, and where the machine has none left, it is what the kernel ends first: p2pd
lets strangers make it allocate, and an island can start it again.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

LOOK_EVERY_S = 0.2
GRACE_S = 1.0
PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 1024**3  # p2pd takes about 70 MB
OOM_SCORE = "900"  # of -1000 to 1000: what is ended first where memory runs out
SOCKET_ARGUMENT = "-listen=/unix"


def main(arguments: Sequence[str]) -> int:
    """Run the command until it exits or the parent is gone.

    Returns the command's exit status, or 0 if the parent went first.
    """
    parent, command = int(arguments[0]), list(arguments[1:])
    die_with_guard = _parent_death_signal()
    # A Ctrl-C in the terminal is for the parent, which still needs the daemon to say goodbye.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, _exit)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_guard()
        _become(command, guard)
    return _watch(parent, child, command)


def _watch(parent: int, child: int, command: Sequence[str]) -> int:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while os.getppid() == parent:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(LOOK_EVERY_S)
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end(child)
        _remove_sockets(command)


def _become(command: list[str], guard: int) -> None:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _confine()
        if os.getppid() == guard:  # else the guard died before the death signal was set
            os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", flush=True)
    finally:
        os._exit(127)


def _confine() -> None:
    os.umask(0o077)  # its control socket is for this user
    with suppress(OSError, ValueError):  # a lower limit is in force, or this system knows none
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # Linux
        file.write(OOM_SCORE)


def _end(child: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _remove_sockets(command: Sequence[str]) -> None:
    """Remove hivemind's two sockets in /tmp, which it removes only when it ends in good order."""
    for argument in command:
        if argument.startswith(SOCKET_ARGUMENT):
            path = argument.removeprefix(SOCKET_ARGUMENT)
            for name in (path, path.replace("p2pd-", "p2pclient-")):
                with suppress(OSError):
                    os.remove(name)


def _parent_death_signal() -> Callable[[], object]:
    """Return a function that requests the signal. It is looked up before the fork: little is safe after it."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit(*_: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
