"""N processes on this machine that do the same work together: they meet at barriers and tell each other values."""

from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from diloco.bench.processes import GRACE_S, Died, Done, Processes, Work, WorkerFailed
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.link import Link, Path, Paths
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress, Transport

WAIT_S = 120.0  # for the slowest of the others, at a barrier


@dataclass(frozen=True)
class Line:
    """What each peer is connected by; None: as fast as the machine goes."""

    bits_per_s: float | None = None  # up and down
    delay_s: float = 0.0

    def shape(self, plain: Transport) -> Transport:
        if self.bits_per_s is None and not self.delay_s:
            return plain
        return ShapedTransport(plain, Link(self.bits_per_s, self.bits_per_s), Paths(Path(delay_s=self.delay_s)))


UNSHAPED = Line()


class BenchPeer:
    """What a worker knows of the others."""

    def __init__(self, index: int, count: int, parent: Connection) -> None:
        self.index = index
        self.count = count
        self._parent = parent

    def barrier(self, timeout_s: float = WAIT_S) -> None:
        """Wait until all are here."""
        self.exchange(None, timeout_s)

    def exchange(self, value: Any, timeout_s: float = WAIT_S) -> list[Any]:
        """Return everybody's value, in the order of their indices."""
        self._parent.send(Asks(value))
        if not self._parent.poll(timeout_s):
            raise TimeoutError(f"peer {self.index} waited {timeout_s:g} s for the others")
        return self._parent.recv()

    def connect(self, line: Line) -> tuple[Transport, dict[str, PeerAddress]]:
        """Return a transport over which all of them reach each other, and their addresses by name, in order."""
        plain = DirectTransport(f"peer-{self.index}", "127.0.0.1")
        addresses = {address.identity: address for address in self.exchange(plain.address("127.0.0.1"))}
        plain.allow(addresses.values())
        self.barrier()
        return line.shape(plain), addresses


@dataclass(frozen=True)
class Asks:
    value: Any


def run_peers(count: int, work: Work, *arguments: Any) -> list[Any]:
    """Return what `work(peer, *arguments)` returned in each of `count` processes, in the order of their indices."""
    with Processes() as processes:
        for index in range(count):
            processes.start(f"peer {index}", _work_as_peer, index, count, work, arguments)
        results = _Coordinator(processes).results()
        for worker in processes.workers.values():
            worker.join(GRACE_S)
        return results


def _work_as_peer(parent: Connection, index: int, count: int, work: Work, arguments: tuple[Any, ...]) -> Any:
    return work(BenchPeer(index, count, parent), *arguments)


class _Coordinator:
    """The parent's side: passes values around, notices who fails."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.names = processes, list(processes.pipes)
        self.asked: dict[str, Any] = {}
        self.done: dict[str, Any] = {}

    def results(self) -> list[Any]:
        while len(self.done) < len(self.names):
            for name, message in self.processes.hear():
                self._handle(name, message)
        return [self.done[name] for name in self.names]

    def _handle(self, name: str, message: Any) -> None:
        match message:
            case Asks(value):
                self.asked[name] = value
            case Done(result):
                self.done[name] = result
            case Died(exit_code) if name not in self.done:
                raise WorkerFailed(f"{name} of the bench died: exit code {exit_code}")
        if self.asked and self.done:
            raise WorkerFailed(f"{min(self.asked)} waits for {min(self.done)}, which has ended already")
        if len(self.asked) == len(self.names):
            self._answer()

    def _answer(self) -> None:
        values = [self.asked[name] for name in self.names]
        self.asked.clear()
        for pipe in self.processes.pipes.values():
            with suppress(BrokenPipeError):  # it died meanwhile: the next receive names it
                pipe.send(values)
