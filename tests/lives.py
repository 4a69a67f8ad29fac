"""Islands that live several times, in one folder each: what `diloco join` does at every start, without a directory."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from team import HERE, own_folder, side_by_side

from diloco.bench.speed import Heard
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.pooled import PooledTransport
from diloco.config.schema import Config
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Head
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, Network, Run
from diloco.elastic.runtime.restoring import restore
from diloco.island.mesh import Place
from diloco.report.events import Events
from diloco.run.join import options_for
from diloco.train.outer import apply_record
from diloco.train.resume import Earlier, find_earlier
from diloco.train.rounds import Rounds
from diloco.train.trainer import Trainer

DIGEST = "0" * 64  # of a genesis that nobody asks for


class Life:
    """`driver`, `store` and `together` are the leader's only."""

    driver: Driver
    store: DiskStore

    def __init__(
        self, name: str, roster: tuple[str, ...], config: Config, network: MemoryNetwork, place: Place = HERE
    ) -> None:
        self.name, self.config = name, own_folder(config, name)
        self.heard = Heard()
        self.trainer = Trainer(self.config, place, Events([self.heard]))
        self.together: Rounds | None = None
        self.earlier: Earlier | None = None
        if place.leader:
            self._enter(roster, network)
        self.earlier = place.share(self.earlier)

    def _enter(self, roster: tuple[str, ...], network: MemoryNetwork) -> None:
        run = Run(b"", DIGEST, self.trainer.fragments, apply_record, snapshot_every=3)
        store = self.store = DiskStore(Path(self.config.dir) / "outer", lambda what, text: None)
        own = restore(store.folder, store.journal, run, store.tell)
        state = own.state if own else RunState(Head(0, 0, DIGEST), roster, Ledger(self.trainer.samples.train_count))
        vectors = own.vectors if own else self.trainer.initial_vectors()
        store.begin(DIGEST, state.head.digest, state.head.round, known=own is not None)
        incarnation = 1 + state.head.round
        if own is not None:
            self.earlier = find_earlier(Path(self.config.dir), state.head, store.entries())
        if self.earlier is not None and self.earlier.incarnation is not None:
            incarnation = self.earlier.incarnation
            self.earlier.take()
        memory, options = own.memory if own else None, options_for(self.config)
        node = Node(self.name, state, options, now=time.monotonic(), incarnation=incarnation, memory=memory)
        plain = network.transport(self.name)
        peers = Network(plain, PooledTransport(plain), b"", lambda peer, greeting: None)
        self.driver = Driver(node, run, vectors, peers, lambda note: None, store)
        self.together = Rounds(self.driver, self.config, str)

    def train(self, asked: Callable[[int], bool], pausing: Callable[[], bool]) -> None:
        """`asked` to stop at a step?"""
        self.trainer.join(self.together, self.earlier)
        self.trainer.run(lambda: asked(self.trainer.step_count), pausing)

    @property
    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.heard.events if event["event"] == "step"}


def live(config: Config, stop_at: int = 1 << 30, *, pause: bool = True) -> dict[str, Life]:
    """Two islands of different weight, from where they are until one of them has come to that step: then both are
    asked, as a launcher does it."""
    names, network, stopping = ("A", "B"), MemoryNetwork(), threading.Event()
    half = config.island.model_copy(update={"batch": config.island.batch // 2})
    configs = {"A": config, "B": config.model_copy(update={"island": half})}
    lives = {name: Life(name, names, configs[name], network) for name in names}

    def asked(step: int) -> bool:
        if step >= stop_at:
            stopping.set()
        return stopping.is_set()

    def train(name: str) -> None:
        lives[name].train(asked, lambda: pause and stopping.is_set())

    try:
        side_by_side({name: life.driver for name, life in lives.items()}, train)
    finally:
        for life in lives.values():
            life.store.close()
    return lives
