"""N processes on this machine that work on one bench together.

Each worker leads a process group of its own: whatever it starts ends with it, Ctrl-C reaches the parent only, and the
parent ends every group as soon as one worker fails.
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
from typing import Any, NoReturn

WAIT_S = 120.0  # for the slowest of the others, at a barrier
GRACE_S = 5.0  # to leave in good order


class PeerFailed(Exception):
    """A worker of the bench failed or died. All of them were ended; there is no result."""


class BenchPeer:
    """What a worker knows of the others."""

    def __init__(self, index: int, count: int, parent: Connection) -> None:
        self.index = index
        self.count = count
        self._parent = parent

    def barrier(self, timeout_s: float = WAIT_S) -> None:
        """Until all are here."""
        self.exchange(None, timeout_s)

    def exchange(self, value: Any, timeout_s: float = WAIT_S) -> list[Any]:
        """Everybody's value, in the order of their indices."""
        self._parent.send(Asks(value))
        if not self._parent.poll(timeout_s):
            raise TimeoutError(f"peer {self.index} waited {timeout_s:g} s for the others")
        return self._parent.recv()


@dataclass(frozen=True)
class Asks:
    value: Any


@dataclass(frozen=True)
class Done:
    result: Any


@dataclass(frozen=True)
class Failed:
    report: str


Work = Callable[..., Any]  # (peer, *arguments) -> result; a function of a module, for it must be found by its name


def run_peers(count: int, work: Work, *arguments: Any) -> list[Any]:
    """What `work` returned in each of `count` processes, in the order of their indices."""
    context = mp.get_context("spawn")
    workers: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        for index in range(count):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            workers.append(context.Process(target=_run_worker, args=(index, count, theirs, work, arguments)))
            with _deaf_to_interrupts(), _one_thread_each():  # inherited: Ctrl-C is the parent's to deal with
                workers[-1].start()
            theirs.close()  # or its end would not show here
        results = _Coordinator(workers, pipes).results()
        for worker in workers:
            worker.join(GRACE_S)
        return results
    finally:
        for worker in workers:
            _end(worker)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Some libraries below torch have threads of their own, and heed only this."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


class _Coordinator:
    """The parent's side: passes values around, notices who fails."""

    def __init__(self, workers: list[SpawnProcess], pipes: list[Connection]) -> None:
        self.workers = workers
        self.pipes = pipes
        self.asked: dict[int, Any] = {}
        self.done: dict[int, Any] = {}

    def results(self) -> list[Any]:
        while len(self.done) < len(self.pipes):
            for ready in wait([pipe for index, pipe in enumerate(self.pipes) if index not in self.done]):
                self._hear(self.pipes.index(ready))  # type: ignore[arg-type]
        return [self.done[index] for index in range(len(self.pipes))]

    def _hear(self, index: int) -> None:
        match self._receive(index):
            case Asks(value):
                self.asked[index] = value
            case Done(result):
                self.done[index] = result
            case Failed(report):
                raise PeerFailed(f"peer {index} of the bench failed:\n{report}")
        if self.asked and self.done:
            raise PeerFailed(f"peer {min(self.asked)} waits for peer {min(self.done)}, which has ended already")
        self._answer()

    def _receive(self, index: int) -> Any:
        try:
            return self.pipes[index].recv()
        except (EOFError, ConnectionResetError):
            self.workers[index].join(GRACE_S)
            raise PeerFailed(f"peer {index} of the bench died: exit code {self.workers[index].exitcode}") from None

    def _answer(self) -> None:
        if len(self.asked) < len(self.pipes):
            return
        values = [self.asked[index] for index in range(len(self.pipes))]
        self.asked.clear()
        for pipe in self.pipes:
            with suppress(BrokenPipeError):  # it died meanwhile: the next receive names it
                pipe.send(values)


def _run_worker(index: int, count: int, parent: Connection, work: Work, arguments: tuple[Any, ...]) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch

        torch.set_num_threads(1)
        parent.send(Done(work(BenchPeer(index, count, parent), *arguments)))
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
