"""Processes of this machine that work on one bench, each with a pipe to the parent.

Each leads a process group of its own: whatever it starts ends with it, Ctrl-C reaches the parent only, and all of it
ends with the parent.
"""

import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn, Self

GRACE_S = 5.0  # to leave in good order

Work = Callable[..., Any]  # (pipe, *arguments) -> result; a function of a module, for it must be found by its name


class WorkerFailed(Exception):
    """A worker of the bench failed or died. All of them were ended; there is no result."""


@dataclass(frozen=True)
class Done:
    """Sent by a worker whose work has returned."""

    result: Any


@dataclass(frozen=True)
class Failed:
    """Sent by a worker whose work has raised."""

    report: str


@dataclass(frozen=True)
class Died:
    """Heard of a worker that has closed its pipe."""

    exit_code: int | None


class Processes:
    """The parent's side. Leaving the `with` statement ends them all."""

    def __init__(self) -> None:
        self.workers: dict[str, SpawnProcess] = {}
        self.pipes: dict[str, Connection] = {}  # of those that may still say something

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            _end(worker)

    def start(self, name: str, work: Work, *arguments: Any) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        worker = context.Process(target=_run, args=(theirs, work, arguments))
        with _inherited():
            worker.start()
        theirs.close()  # or its end would not show here
        self.workers[name], self.pipes[name] = worker, ours

    def hear(self, timeout_s: float | None = None) -> list[tuple[str, Any]]:
        """Wait until some have said something, and return what each of them said first; WorkerFailed if one failed."""
        ready = wait(list(self.pipes.values()), timeout_s)
        return [(name, self._receive(name)) for name, pipe in list(self.pipes.items()) if pipe in ready]

    def _receive(self, name: str) -> Any:
        try:
            message = self.pipes[name].recv()
        except (EOFError, ConnectionResetError):
            del self.pipes[name]
            self.workers[name].join(GRACE_S)
            return Died(self.workers[name].exitcode)
        if isinstance(message, Failed):
            raise WorkerFailed(f"{name} of the bench failed:\n{message.report}")
        return message


@contextmanager
def _inherited() -> Iterator[None]:
    """Workers inherit this: Ctrl-C is the parent's to deal with, and libraries below torch, which have threads of their
    own, heed only the variable."""
    in_main = threading.current_thread() is threading.main_thread()
    heeds = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    before = os.environ.pop("OMP_NUM_THREADS", None)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
        if in_main:
            signal.signal(signal.SIGINT, heeds)


def _run(parent: Connection, work: Work, arguments: tuple[Any, ...]) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch

        torch.set_num_threads(1)
        parent.send(Done(work(parent, *arguments)))
    except BaseException:  # noqa: BLE001 -- the process's outermost frame; the parent raises it
        parent.send(Failed(traceback.format_exc()))


def _end_with_parent() -> NoReturn:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is in the group it has ended")


def _end(worker: SpawnProcess) -> None:
    """And whatever it started: its group outlives it as long as one of those does."""
    assert worker.pid is not None
    with suppress(ProcessLookupError):  # not begun, or all gone
        os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    worker.join()
