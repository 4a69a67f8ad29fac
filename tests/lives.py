"""Islands that live several times, in one folder each: what `diloco join` does at every start, without a directory."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from team import HERE, own_folder, side_by_side

from diloco.bench.team import Heard
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.schema import Config
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.record import Head
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, RunContext, among_friends, open_island
from diloco.elastic.runtime.restoring import Origin, restore
from diloco.island.mesh import ProcessMesh
from diloco.report.events import Step, of_kind
from diloco.report.sinks import Events
from diloco.run.join import options_for
from diloco.train.outer import apply_record
from diloco.train.resume import EarlierSave, find_earlier
from diloco.train.rounds import Rounds
from diloco.train.trainer import Trainer

DIGEST = "0" * 64  # of a genesis that nobody asks for


class Life:
    """`driver`, `store` and `together` are the leader's only."""

    driver: Driver
    store: DiskStore

    def __init__(
        self, name: str, roster: tuple[str, ...], config: Config, network: MemoryNetwork, place: ProcessMesh = HERE
    ) -> None:
        self.name, self.config = name, own_folder(config, name)
        self.heard = Heard()
        self.trainer = Trainer(self.config, place, Events([self.heard]))
        self.together: Rounds | None = None
        self.earlier: EarlierSave | None = None
        vectors = self.trainer.initial_vectors()  # all processes take part in reading them
        if place.leader:
            self._enter(roster, network, vectors)
        self.earlier = place.share(self.earlier)

    def _enter(self, roster: tuple[str, ...], network: MemoryNetwork, vectors: dict[str, torch.Tensor]) -> None:
        run = RunContext(b"", DIGEST, self.trainer.fragments, apply_record, snapshot_every=3)
        store = self.store = DiskStore(Path(self.config.dir) / "outer", lambda what, text: None)
        own = restore(store.folder, store.journal, run, store.report)
        beginning = RunState(Head(0, 0, DIGEST), roster, Ledger(self.trainer.samples.train_count))
        origin = own or Origin(beginning, vectors)
        head = origin.state.head
        store.begin(DIGEST, head.digest, head.round, known=own is not None)
        incarnation = 1 + head.round
        if own is not None:
            self.earlier = find_earlier(Path(self.config.dir), head, store.entries())
        if self.earlier is not None and self.earlier.incarnation is not None:
            incarnation = self.earlier.incarnation
            self.earlier.mark_taken()
        options, peers = options_for(self.config), among_friends(network.transport(self.name))
        self.driver = open_island(run, origin, options, peers, incarnation=incarnation, store=store)
        self.together = Rounds(self.driver, self.config, str)

    def train(self, asked: Callable[[int], bool], pausing: Callable[[], bool]) -> None:
        """`asked` to stop at a step?"""
        self.trainer.join(self.together, self.earlier)
        self.trainer.run(lambda: asked(self.trainer.step_count), pausing)

    @property
    def losses(self) -> dict[int, float]:
        return {event.step: event.loss for event in of_kind(self.heard.events, Step)}


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
