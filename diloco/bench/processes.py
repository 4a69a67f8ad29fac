"""Run processes of this machine that work on one bench, each with a pipe to the parent (`Processes`).

Or N of them that do the same work together, meet at barriers and exchange values (`run_peers`).

Each leads a process group of its own: whatever it starts ends with it, Ctrl-C reaches the parent only, and all of it
ends with the parent.
"""

import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, NoReturn, Self

from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.link import Link, Path, Paths
from diloco.comm.transport.relay import Relay
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Accepting, PeerAddress, Stream, Transport

GRACE_S = 5.0  # to leave in good order
NOWHERE = 9  # a port at which nobody listens
WAIT_S = 120.0  # for the slowest of the others, at a barrier

# (pipe, *arguments) -> result; a function of a module, for it must be found by its name
WorkerFunction = Callable[..., Any]


class WorkerFailed(Exception):
    """Signal that a worker of the bench failed or died. All workers were ended; there is no result."""


@dataclass(frozen=True)
class WorkerMessage:
    """Carry what a worker sends to the parent.

    That is its value, when it asks for everybody's; its result, when it is done; or a traceback, when it has failed.
    For a worker that has closed its pipe the parent makes one itself: it died, with its exit code.
    """

    kind: Literal["asks", "done", "failed", "died"]
    value: Any


class Processes:
    """Start workers and hear what they send, on the parent's side; leaving the `with` statement ends them all."""

    def __init__(self) -> None:
        self.workers: dict[str, SpawnProcess] = {}
        self.pipes: dict[str, Connection] = {}  # of those that may still say something

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            _end(worker)

    def start(self, name: str, work: WorkerFunction, *arguments: Any) -> None:
        """Spawn a worker that runs `work(pipe, *arguments)`; its result is sent as a message."""
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        worker = context.Process(target=_run, args=(theirs, work, arguments))
        with _inherited():
            worker.start()
        theirs.close()  # or its end would not show here
        self.workers[name], self.pipes[name] = worker, ours

    def hear(self, timeout_s: float | None = None) -> list[tuple[str, Any]]:
        """Wait until some have sent something, and return the first message of each; WorkerFailed if one failed."""
        ready = wait(list(self.pipes.values()), timeout_s)
        return [(name, self._receive(name)) for name, pipe in list(self.pipes.items()) if pipe in ready]

    def _receive(self, name: str) -> Any:
        """Return the next message of a worker; that it died, once it has closed its pipe."""
        try:
            message = self.pipes[name].recv()
        except (EOFError, ConnectionResetError):
            del self.pipes[name]
            self.workers[name].join(GRACE_S)
            return WorkerMessage("died", self.workers[name].exitcode)
        if isinstance(message, WorkerMessage) and message.kind == "failed":
            raise WorkerFailed(f"{name} of the bench failed:\n{message.value}")
        return message


@contextmanager
def _inherited() -> Iterator[None]:
    """Set what workers inherit while they are started.

    They ignore Ctrl-C, which is the parent's to deal with, and use one thread: libraries below torch, which have
    threads of their own, heed only the variable OMP_NUM_THREADS.
    """
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


def _run(parent: Connection, work: WorkerFunction, arguments: tuple[Any, ...]) -> None:
    """Run a worker's function in its process, and send its result or its traceback."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch

        torch.set_num_threads(1)
        parent.send(WorkerMessage("done", work(parent, *arguments)))
    except BaseException:  # noqa: BLE001 -- the process's outermost frame; the parent raises it
        parent.send(WorkerMessage("failed", traceback.format_exc()))


def _end_with_parent() -> NoReturn:
    """Wait for the parent's end, then kill this worker's whole process group."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is in the group it has ended")


def _end(worker: SpawnProcess) -> None:
    """Kill a worker and whatever it started: its group outlives it as long as one of those does."""
    assert worker.pid is not None
    with suppress(ProcessLookupError):  # not begun, or all gone
        os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    worker.join()


@dataclass(frozen=True)
class LinkRate:
    """Describe each peer's link, the same up and down; a rate of None is as fast as the machine can."""

    bits_per_s: float | None = None  # up and down
    delay_s: float = 0.0

    def shape(self, plain: Transport) -> Transport:
        """Return the transport behind such a link; unchanged if there is neither a rate nor a delay."""
        if self.bits_per_s is None and not self.delay_s:
            return plain
        return ShapedTransport(plain, Link(self.bits_per_s, self.bits_per_s), Paths(Path(delay_s=self.delay_s)))


UNSHAPED = LinkRate()


@dataclass(frozen=True)
class BenchPeer:
    """Give a worker its index, the number of workers, and ways to meet the others."""

    index: int
    count: int
    parent: Connection

    def barrier(self, timeout_s: float = WAIT_S) -> None:
        """Wait until all workers have come to this point; TimeoutError if some do not come in time."""
        self.exchange(None, timeout_s)

    def exchange(self, value: Any, timeout_s: float = WAIT_S) -> list[Any]:
        """Return everybody's value, in the order of their indices, once all have called this."""
        self.parent.send(WorkerMessage("asks", value))
        if not self.parent.poll(timeout_s):
            raise TimeoutError(f"peer {self.index} waited {timeout_s:g} s for the others")
        return self.parent.recv()

    @contextmanager
    def timed(self) -> Iterator[dict[str, Any]]:
        """Time what this peer does, from a common start; the yielded dict gets wall and CPU seconds.

        It returns when all are done, so that nobody disturbs those whose time still runs.
        """
        row: dict[str, Any] = {}
        self.barrier()
        started, started_cpu = time.monotonic(), time.process_time()
        yield row
        row |= {"seconds": time.monotonic() - started, "cpu_s": time.process_time() - started_cpu}
        self.barrier()

    def connect(self, line: LinkRate, *, relayed: bool = False) -> tuple[Transport, dict[str, PeerAddress]]:
        """Return a transport over which all workers reach each other, and their addresses by name, in order.

        `relayed`: through the first of them, which alone can be dialled.
        """
        plain = DirectTransport(f"peer-{self.index}", "127.0.0.1")
        addresses = {address.identity: address for address in self.exchange(plain.address("127.0.0.1"))}
        plain.allow(addresses.values())
        self.barrier()
        if not relayed:
            return line.shape(plain), addresses
        first, *others = addresses.values()
        hidden = {other.identity: replace(other, port=NOWHERE, relay=first.identity) for other in others}
        through = ThroughRelay(plain, {first.identity: first, **hidden})
        if self.index and not through.relay.be_served_by(first):
            raise WorkerFailed(f"{first.identity} does not relay")
        self.barrier()
        return line.shape(through), {first.identity: first, **hidden}


class ThroughRelay(Accepting):
    """Reach peers that nobody can dial through the one that relays for them."""

    def __init__(self, direct: DirectTransport, addresses: dict[str, PeerAddress]) -> None:
        super().__init__(direct.identity, direct.inbox)
        self.direct, self.relay = direct, Relay(direct)
        self.relay.know(addresses)

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        return (self.relay if peer.relay else self.direct).connect(peer, channel, timeout_s=timeout_s)

    def close(self) -> None:
        self.relay.close()
        self.direct.close()


def run_peers(count: int, work: WorkerFunction, *arguments: Any) -> list[Any]:
    """Return what `work(peer, *arguments)` returned in each of `count` processes, in the order of their indices."""
    with Processes() as processes:
        for index in range(count):
            processes.start(f"peer {index}", _work_as_peer, index, count, work, arguments)
        results = _pass_values(processes)
        for worker in processes.workers.values():
            worker.join(GRACE_S)
        return results


def _work_as_peer(parent: Connection, index: int, count: int, work: WorkerFunction, arguments: tuple[Any, ...]) -> Any:
    return work(BenchPeer(index, count, parent), *arguments)


def _pass_values(processes: Processes) -> list[Any]:
    """Hand values around until all workers have ended; return their results."""
    names = list(processes.pipes)
    asked: dict[str, Any] = {}
    done: dict[str, Any] = {}
    while len(done) < len(names):
        for name, message in processes.hear():
            match message:
                case WorkerMessage("asks", value):
                    asked[name] = value
                case WorkerMessage("done", result):
                    done[name] = result
                case WorkerMessage("died", exit_code) if name not in done:
                    raise WorkerFailed(f"{name} of the bench died: exit code {exit_code}")
            if asked and done:
                raise WorkerFailed(f"{min(asked)} waits for {min(done)}, which has ended already")
        if len(asked) == len(names):
            values = [asked[name] for name in names]
            asked.clear()
            for pipe in processes.pipes.values():
                with suppress(BrokenPipeError):  # it died meanwhile: the next receive names it
                    pipe.send(values)
    return [done[name] for name in names]
