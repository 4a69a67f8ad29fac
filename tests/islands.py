"""Islands in one process for tests of the driver: real threads and streams over memory, a trainer of a few lines."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from diloco.checkpoint.log.store import Store
from diloco.comm.codec.registry import CODECS
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.transport import PeerAddress
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Memory, Note
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.ranges import first
from diloco.elastic.protocol.record import Contribution, Head, Record, Settings
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, Network, Run
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.session import Session
from diloco.elastic.runtime.work import Trained

COUNT = 70_000
CODEC = "int8"
GENESIS = b"genesis of a test"
SAMPLES = 8  # of a phase
SNAPSHOT_EVERY = 10  # where there is a store


def apply(vectors: Mapping[str, Tensor], record: Record, payload: Tensor, fragments: Fragments) -> None:
    fragment = record.proposal.fragment
    mean = CODECS[CODEC].decode(payload, fragments.counts[fragment])
    for lo, hi, part in fragments.pieces(mean, fragment):
        vectors["parameters"][lo:hi].sub_(part)
    vectors["momentum"].add_(1)


def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
    return Settings(lr=1.0, codec=CODEC), state.step + bool(contributions)


def genesis_state(roster: tuple[str, ...], *, limit: int | None = None) -> RunState:
    digest = hashlib.sha256(GENESIS).hexdigest()
    return RunState(Head(0, 0, digest), roster, Ledger(epoch=10**6, limit=limit))


def run_of(snapshot_every: int = 0) -> Run:
    return Run(GENESIS, hashlib.sha256(GENESIS).hexdigest(), Fragments.whole(COUNT), apply, snapshot_every)


class TestIsland:
    """Trains by adding noise; `pace_s` is the time of a phase."""

    __test__ = False

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        state: RunState,
        *,
        vectors: dict[str, Tensor] | None = None,
        incarnation: int = 1,
        silence_s: float = 0.5,
        partition: str = "merge",
        pace_s: float = 0.02,
        transport: object = None,
        store: Store | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.name, self.pace_s = name, pace_s
        self.notes: list[Note] = []
        self.phases = 0
        self.contained = 0
        vectors = vectors or {"parameters": torch.zeros(COUNT), "momentum": torch.zeros(COUNT)}
        plain = transport or network.transport(name)
        options = Options(decide, silence_s=silence_s, partition=partition, want=2 * SAMPLES)
        node = Node(name, state, options, now=time.monotonic(), incarnation=incarnation, memory=memory)
        run = run_of(snapshot_every=SNAPSHOT_EVERY)
        self.driver = Driver(
            node,
            run,
            vectors,
            Network(plain, PooledTransport(plain), b"", lambda peer, greeting: None),
            self.notes.append,
            store,
        )
        self.session = Session(self.driver, run.fragments, CODEC)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.error: BaseException | None = None
        self._base = torch.zeros(COUNT)

    def start(self) -> None:
        self.thread.start()

    def _train(self) -> None:
        try:
            self.session.take(0, self._base)
            noise = torch.Generator().manual_seed(int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16))
            while not self.stopping.is_set():
                batch = first(self.session.available(()), SAMPLES)
                if batch or self.session.owes():
                    self.stopping.wait(self.pace_s)
                    self.phases += bool(batch)
                    progress = torch.randn(COUNT, generator=noise)
                    self.session.start(0, progress, Trained(100 if batch else 0, batch))
                    if not self.session.finish(0, self.stopping.is_set):
                        return
                else:
                    self.stopping.wait(0.01)
                if self.session.poll():
                    self.contained += self.session.take(0, self._base).owed is None
        except BaseException as error:  # noqa: BLE001 -- a thread's outermost frame: wait_for raises it
            self.error = error

    @property
    def state(self) -> RunState:
        return self.driver.applied

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(10)

    def close(self) -> None:
        self.stop()
        self.driver.close()


def introduce(islands: list[TestIsland]) -> None:
    for island in islands:
        island.driver.know({other.name: PeerAddress(other.name) for other in islands})


def wait_for(
    condition: Callable[[], bool], islands: list[TestIsland], timeout_s: float = 30.0, pause_s: float = 0.01
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        for island in islands:
            if island.error is not None:
                raise island.error
            if island.driver.failure is not None:
                raise island.driver.failure
        if time.monotonic() > deadline:
            raise TimeoutError([(i.name, i.state.head.round, i.notes[-3:]) for i in islands])
        time.sleep(pause_s)
