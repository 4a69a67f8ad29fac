"""Real islands that train together without a directory: real trainers, drivers and transports, addresses handed out.

All start from the same seed, so that nobody has to fetch a state.
"""

import atexit
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from diloco.bench.peers import BenchPeer
from diloco.bench.speed import Heard
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.link import Link, Path, Paths
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Transport
from diloco.config.schema import Config
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Head, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, Network, Run
from diloco.elastic.runtime.fragments import Fragments
from diloco.island.mesh import Place, pick_device
from diloco.report.events import Events
from diloco.run.join import alone, options_for
from diloco.train.outer import apply_record
from diloco.train.rounds import Rounds
from diloco.train.trainer import Trainer

GENESIS = b"a run among friends"


@dataclass(frozen=True)
class Line:
    """What each island is connected by; None: as fast as the machine goes."""

    bits_per_s: float | None = None
    delay_s: float = 0.0


def driver_for(
    trainer: Trainer,
    roster: tuple[str, ...],
    transport: Transport,
    *,
    apply: Callable[[Mapping[str, Tensor], Record, Tensor, Fragments], None] = apply_record,
    owner: str = "",
) -> Driver:
    """The network side of an island that founds a run together with the rest of the roster."""
    digest = hashlib.sha256(GENESIS).hexdigest()
    epochs, count = trainer.config.data.epochs, trainer.samples.train_count
    state = RunState(Head(0, 0, digest), roster, Ledger(count, epochs and epochs * count), owner=owner)
    node = Node(transport.identity, state, options_for(trainer.config), now=time.monotonic(), incarnation=1)
    run = Run(GENESIS, digest, trainer.fragments, apply)
    network = Network(transport, PooledTransport(transport), b"", lambda peer, greeting: None)
    return Driver(node, run, trainer.initial_vectors(), network, lambda note: None)


def train_alone(config: Config) -> dict[str, Any]:
    config = in_folder(config)
    place = Place(0, 1, pick_device(config.island.device), None)
    heard = Heard()
    trainer = Trainer(config, place, Events([heard]))
    with alone(trainer):
        trainer.run()
    return {"bytes_sent": 0, **_seen(trainer, heard)}


def train_together(peer: BenchPeer, config: Config, line: Line) -> dict[str, Any]:
    """Called by all workers of a bench at once: each is one island. What this one saw."""
    config = in_folder(config)
    names = tuple(f"island-{index}" for index in range(peer.count))
    plain = DirectTransport(names[peer.index], "127.0.0.1")
    addresses = dict(zip(names, peer.exchange(plain.address("127.0.0.1")), strict=True))
    plain.allow(addresses.values())
    transport: Transport = plain
    if line.bits_per_s is not None or line.delay_s:
        shape = Link(line.bits_per_s, line.bits_per_s)
        transport = ShapedTransport(plain, shape, Paths(Path(delay_s=line.delay_s)))
    heard = Heard()
    trainer = Trainer(config, Place(0, 1, pick_device(config.island.device), None), Events([heard]))
    driver = driver_for(trainer, names, transport)
    try:
        driver.know(addresses)
        trainer.join(Rounds(driver, config, str))
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
    finally:
        driver.close()
        transport.close()


def _seen(trainer: Trainer, heard: Heard) -> dict[str, Any]:
    """Losses by the run's clock, when each inner step ended (log.every=1 tells of all), what was waited for rounds."""
    moments = [event["time"] for event in heard.events if event["event"] == "step"]
    start, end = (next(e["time"] for e in heard.events if e["event"] == kind) for kind in ("start", "end"))
    return {
        "losses": {e["step"]: e["validation_loss"] for e in heard.events if e["event"] == "validation"},
        "wall_s": end - start, "parameters": trainer.island.layout.size, "moments": moments,
        "waited_s": trainer.sync.waited_s, "steps": trainer.sync.exchange.steps,
    }  # fmt: skip


def in_folder(config: Config) -> Config:
    """With a folder that goes away with the process: a run saves at its end."""
    folder = mkdtemp(prefix="diloco-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"dir": folder})})


def one_thread() -> None:
    torch.set_num_threads(1)
