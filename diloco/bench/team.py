"""Run real trainers in a bench: alone, or together with others without a directory.

Drivers and transports are real, addresses are handed out, and all start from the same seed, so that nobody has to fetch
a state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from diloco.bench.bare import DIGEST, GENESIS
from diloco.bench.processes import BenchPeer, LinkRate
from diloco.comm.transport.transport import Transport
from diloco.config.schema import Config
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.record import Head, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, RunContext, among_friends, open_island
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import Origin
from diloco.island.mesh import ProcessMesh, open_mesh
from diloco.report.events import End, Event, Start, Step, Validation, of_kind
from diloco.report.sinks import Events
from diloco.run.join import alone, options_for
from diloco.train.outer import apply_record
from diloco.train.rounds import Rounds
from diloco.train.trainer import Trainer


class Heard:
    """Keep all events in memory, as a sink."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append the event to the list."""
        self.events.append(event)

    def close(self) -> None:
        pass


@contextmanager
def trainer_of(config: Config, place: ProcessMesh | None = None) -> Iterator[tuple[Trainer, Heard]]:
    """Yield a trainer and its events, on a mesh that is open or on this process' own. Its folder is a temporary one,
    since a run saves at its end."""
    with (
        TemporaryDirectory(prefix="diloco-bench-", ignore_cleanup_errors=True) as folder,
        open_mesh(config.island) if place is None else nullcontext(place) as place,
    ):
        heard = Heard()
        checkpoint = config.checkpoint.model_copy(update={"dir": folder})
        trainer = Trainer(config.model_copy(update={"checkpoint": checkpoint}), place, Events([heard]))
        with closing(trainer.batches):
            yield trainer, heard


def driver_for(
    trainer: Trainer,
    roster: tuple[str, ...],
    transport: Transport,
    *,
    apply: Callable[[Mapping[str, Tensor], Record, Tensor, Fragments], None] = apply_record,
    owner: str = "",
) -> Driver:
    """Open the network side of an island that founds a run together with the rest of the roster."""
    epochs, count = trainer.config.data.epochs, trainer.samples.train_count
    state = RunState(Head(0, 0, DIGEST), roster, Ledger(count, epochs and epochs * count), owner=owner)
    origin = Origin(state, trainer.initial_vectors())
    run = RunContext(GENESIS, DIGEST, trainer.fragments, apply)
    return open_island(run, origin, options_for(trainer.config), among_friends(transport))


def train_alone(config: Config) -> dict[str, Any]:
    """Train one island without others until the run's end, and return what it saw."""
    with trainer_of(config) as (trainer, heard), alone(trainer):
        trainer.run()
        return _seen(trainer, heard)


def train_together(peer: BenchPeer, config: Config, line: LinkRate) -> dict[str, Any]:
    """Train as one island of several, and return what it saw. All workers of a bench call this at once."""
    transport, addresses = peer.connect(line)
    with (
        closing(transport),
        trainer_of(config) as (trainer, heard),
        driver_for(trainer, tuple(addresses), transport) as driver,
    ):
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


def _seen(trainer: Trainer, heard: Heard) -> dict[str, Any]:
    """Return losses by the run's clock, when each inner step ended, and how long rounds were waited for.

    Only log.every=1 reports all steps.
    """
    moments = [event.time for event in of_kind(heard.events, Step)]
    start, end = of_kind(heard.events, Start)[0].time, of_kind(heard.events, End)[0].time
    return {
        "losses": {e.step: e.validation_loss for e in of_kind(heard.events, Validation)},
        "wall_s": end - start, "parameters": trainer.island.layout.size, "moments": moments,
        "waited_s": trainer.sync.waited_s, "steps": trainer.sync.policy.steps,
    }  # fmt: skip
