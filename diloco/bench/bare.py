"""Run an island without a model: a driver, a vector, and a trainer that always offers the same displacement."""

import hashlib
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.node import Options
from diloco.elastic.protocol.ranges import first
from diloco.elastic.protocol.record import Contribution, Head, Settings
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, RunContext
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import Origin
from diloco.elastic.runtime.session import Session
from diloco.elastic.runtime.work import StepsDone
from diloco.train.outer import apply_record

GENESIS = b"a run without a model"
DIGEST = hashlib.sha256(GENESIS).hexdigest()
VECTORS = ("parameters", "momentum")
TOKENS = 1000  # of a phase


@dataclass(frozen=True)
class BareConfig:
    """Describe islands without a model: values in the vector, pace, samples, codec, link and log."""

    count: int = 25_000_000
    silence_s: float = 5.0
    pace_s: float = 0.3  # of a phase
    samples: int = 4  # of a phase
    limit: int | None = None  # of the whole run
    codec: str = "int8"
    bits_per_s: float | None = None  # of each island's link, both ways; None: as fast as the machine goes
    delay_s: float = 0.0  # one way, between any two
    partition: str = "merge"
    straggler: float = 1.5
    rejoin_s: float = 60.0
    folder: str = ""  # where islands keep their logs; none: in memory
    snapshot_every: int = 0

    @property
    def run(self) -> RunContext:
        """Return the run's fixed parts, the same for all islands: genesis, one fragment, the outer update."""
        return RunContext(GENESIS, DIGEST, Fragments.whole(self.count), apply_record, self.snapshot_every)

    @property
    def options(self) -> Options:
        """Return the protocol's options: fixed outer settings, and leases that last for two phases."""

        def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
            return Settings(0.7, 0.9, self.codec), state.step + bool(contributions)

        return Options(
            decide, silence_s=self.silence_s, straggler=self.straggler, partition=self.partition, want=2 * self.samples,
            rejoin_s=self.rejoin_s,
        )  # fmt: skip

    def beginning(self, roster: tuple[str, ...]) -> Origin:
        """Make the origin of a founder: round 0 with this roster, and zeros for vectors."""
        state = RunState(Head(0, 0, DIGEST), roster, Ledger(self.limit or 1 << 40, self.limit))
        return Origin(state, {name: torch.zeros(self.count) for name in VECTORS})


class BareIsland:
    """Train an island without a model: wait, offer, take part in the round, and apply its result."""

    def __init__(self, setting: BareConfig, driver: Driver) -> None:
        """Take a driver that was opened with the setting's run and options."""
        self.setting, self.driver = setting, driver
        self.session = Session(self.driver, setting.run.fragments, setting.codec)
        self.name = self.driver.node.me
        self.phases = self.contained = 0
        self.stopping = threading.Event()

    @property
    def state(self) -> RunState:
        """Return the state that the island's vectors contain."""
        return self.driver.applied

    def train(self) -> None:
        """Train until `stopping` is set; where samples are used up, offer what is owed, or wait for more."""
        base, displacement, session = torch.empty(self.setting.count), self._displacement(), self.session
        session.apply_result(0, base)
        while not self.stopping.is_set():
            batch = first(session.available(()), self.setting.samples)
            if batch or session.owes():
                self.stopping.wait(self.setting.pace_s)
                self.phases += bool(batch)
                session.start(0, displacement, StepsDone(TOKENS if batch else 0, batch))
                session.finish(0, self.stopping.is_set)
            else:
                session.wait(0.05)
            if self.state.head != session.state.head:
                self.contained += session.apply_result(0, base).owed is None

    def _displacement(self) -> Tensor:
        """Draw the vector that is offered each time, seeded by the island's name."""
        seed = int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16)
        return torch.randn(self.setting.count, generator=torch.Generator().manual_seed(seed))

    def report(self) -> dict[str, Any]:
        """Return its state and the digest of its vectors, both of one round: another one may be applied meanwhile."""
        state, digest = self.state, self.driver.replica.digest()
        while state.head != self.state.head:
            state, digest = self.state, self.driver.replica.digest()
        return {
            "head": state.head, "digest": digest, "phases": self.phases, "state": state,
            "incarnation": self.driver.node.incarnation,
            "records": [entry.header for entry in self.driver.log.entries()],
        }  # fmt: skip
