"""Real islands that train together without a directory: real trainers, drivers and transports, addresses handed out.

All start from the same seed, so that nobody has to fetch a state.
"""

import atexit
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from tempfile import mkdtemp
from typing import Any

from torch import Tensor

from diloco.bench.bare import DIGEST, GENESIS
from diloco.bench.peers import BenchPeer, Line
from diloco.bench.speed import Heard
from diloco.comm.transport.transport import Transport
from diloco.config.schema import Config
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.record import Head, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, Run, among_friends, open_island
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import Origin
from diloco.island.mesh import Place, pick_device
from diloco.report.events import Events
from diloco.run.join import alone, options_for
from diloco.train.outer import apply_record
from diloco.train.rounds import Rounds
from diloco.train.trainer import Trainer


def driver_for(
    trainer: Trainer,
    roster: tuple[str, ...],
    transport: Transport,
    *,
    apply: Callable[[Mapping[str, Tensor], Record, Tensor, Fragments], None] = apply_record,
    owner: str = "",
) -> Driver:
    """The network side of an island that founds a run together with the rest of the roster."""
    epochs, count = trainer.config.data.epochs, trainer.samples.train_count
    state = RunState(Head(0, 0, DIGEST), roster, Ledger(count, epochs and epochs * count), owner=owner)
    origin = Origin(state, trainer.initial_vectors())
    run = Run(GENESIS, DIGEST, trainer.fragments, apply)
    return open_island(run, origin, options_for(trainer.config), among_friends(transport))


def train_alone(config: Config) -> dict[str, Any]:
    trainer, heard = _trainer(config)
    with alone(trainer):
        trainer.run()
    return {"bytes_sent": 0, **_seen(trainer, heard)}


def train_together(peer: BenchPeer, config: Config, line: Line) -> dict[str, Any]:
    """Called by all workers of a bench at once: each is one island. What this one saw."""
    transport, addresses = peer.connect(line)
    trainer, heard = _trainer(config)
    with closing(transport), driver_for(trainer, tuple(addresses), transport) as driver:
        driver.know(addresses)
        trainer.join(Rounds(driver, trainer.config, str))
        peer.barrier()
        trainer.run()
        rounds = [record for record in driver.records if record.proposal.contributions]
        full = sum(len(record.proposal.contributions) == peer.count for record in rounds)
        found = {
            "bytes_sent": driver.bytes_sent, "rounds": len(rounds), "full_rounds": full,
            "digest": driver.replica.digest(), **_seen(trainer, heard),
        }  # fmt: skip
        peer.barrier()  # nobody leaves while others still read
        return found


def _trainer(config: Config) -> tuple[Trainer, Heard]:
    """One with a folder that goes away with the process: a run saves at its end."""
    folder, heard = mkdtemp(prefix="diloco-bench-"), Heard()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"dir": folder})})
    place = Place(0, 1, pick_device(config.island.device), None)
    return Trainer(config, place, Events([heard])), heard


def _seen(trainer: Trainer, heard: Heard) -> dict[str, Any]:
    """Losses by the run's clock, when each inner step ended (log.every=1 tells of all), what was waited for rounds."""
    moments = [event["time"] for event in heard.events if event["event"] == "step"]
    start, end = (next(e["time"] for e in heard.events if e["event"] == kind) for kind in ("start", "end"))
    return {
        "losses": {e["step"]: e["validation_loss"] for e in heard.events if e["event"] == "validation"},
        "wall_s": end - start, "parameters": trainer.island.layout.size, "moments": moments,
        "waited_s": trainer.sync.waited_s, "steps": trainer.sync.exchange.steps,
    }  # fmt: skip
