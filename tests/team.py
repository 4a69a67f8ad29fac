"""Islands in threads of one process that train together: real rounds over memory, addresses handed out."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from diloco.bench.team import Heard, driver_for
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.config.schema import Config
from diloco.elastic.runtime.driver import Driver, among_friends, open_island
from diloco.elastic.runtime.restoring import Origin
from diloco.island.mesh import ProcessMesh
from diloco.island.user_model import OwnModel
from diloco.report.sinks import Events
from diloco.run.genesis import Genesis
from diloco.run.join import options_for, run_of
from diloco.train.outer import apply_record, outer_vectors
from diloco.train.rounds import Rounds
from diloco.train.sync import SyncLoop
from diloco.train.trainer import Trainer

HERE = ProcessMesh(0, 1, torch.device("cpu"), None)
PATIENT = {"min_islands": 2, "straggler": 100.0, "silence_s": 2.0}  # every round has both islands


def own_folder(config: Config, name: str) -> Config:
    checkpoint = config.checkpoint.model_copy(update={"dir": f"{config.dir}/{name}"})
    return config.model_copy(update={"checkpoint": checkpoint})


@contextmanager
def introduced(drivers: Mapping[str, Driver]):
    """They know each other, and are closed in the end."""
    with ExitStack() as stack:
        for driver in drivers.values():
            stack.callback(driver.close)
        for driver in drivers.values():
            driver.know({name: PeerAddress(name) for name in drivers})
        yield


def side_by_side(drivers: Mapping[str, Driver], work: Callable[[str], Any]) -> dict[str, Any]:
    """`work(name)` in a thread for each. What goes wrong in one ends all: they would wait for each other."""

    def guarded(name: str) -> Any:
        try:
            return work(name)
        except BaseException as error:
            for driver in drivers.values():
                driver.failure = driver.failure or error
            raise

    with introduced(drivers), ThreadPoolExecutor(len(drivers)) as pool:
        found = {name: pool.submit(guarded, name) for name in drivers}
        failures = [error for future in found.values() if (error := future.exception())]
        if failures:
            raise min(failures, key=lambda error: error.__cause__ is not None)  # not one that was told of it
        return {name: future.result() for name, future in found.items()}


def own_loop_driver(name: str, names: tuple[str, ...], config: Config, model: OwnModel, network: MemoryNetwork):
    """The network side of an island that brings its own loop, as `diloco.connect` makes it."""
    genesis = Genesis.of(config, model.layout, None, names[0])
    vector = torch.empty(model.layout.size)
    model.shards.read(vector)
    origin = Origin(replace(genesis.state(), roster=names, admitted=()), outer_vectors(config.outer, vector))
    chain, options = run_of(genesis, config, model.fragments(config.sync)), replace(options_for(config), want=0)
    return open_island(chain, origin, options, among_friends(network.transport(name)))


def wait_until(condition: Callable[[], bool]) -> None:
    late = deadline(20)
    while not condition():
        assert not late()
        time.sleep(0.01)


def deadline(seconds: float) -> Callable[[], bool]:
    """For what would wait for ever if it were wrong."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


class Team:
    """Two built-in trainers. `outer` has the outer parameters after each update, `batches` what each island read,
    `rounds` the records that had contributions."""

    def __init__(self, config: Config, *, pauses_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """An inner step takes so much longer."""
        self.names, self.config, self.network = ("A", "B"), config, MemoryNetwork()
        self.pauses_s = dict(zip(self.names, pauses_s, strict=True))
        self.outer: list[torch.Tensor] = []
        self.batches: dict[str, list] = {name: [] for name in self.names}
        self.trainers = {name: Trainer(own_folder(config, name), HERE, Events([Heard()])) for name in self.names}

    def drivers(self) -> dict[str, Driver]:
        return {name: self._driver(name) for name in self.names}

    def run(self) -> None:
        drivers = self.drivers()
        side_by_side(drivers, lambda name: self._train(name, drivers[name]))
        assert len({driver.replica.digest() for driver in drivers.values()}) == 1
        self.rounds = [record.proposal for record in drivers["A"].records if record.proposal.contributions]

    def _driver(self, name: str) -> Driver:
        def apply(vectors, record, payload, fragments) -> None:
            apply_record(vectors, record, payload, fragments)
            if name == "A":
                self.outer.append(vectors["parameters"].clone())

        return driver_for(self.trainers[name], self.names, self.network.transport(name), apply=apply)

    def _train(self, name: str, driver: Driver) -> None:
        trainer, read = self.trainers[name], self.trainers[name].batches.read
        trainer.join(Rounds(driver, self.config, str))

        def recording(batch, upcoming=()):
            time.sleep(self.pauses_s[name])
            found = read(batch, upcoming)
            self.batches[name].append(found)
            return found

        trainer.batches.read = recording
        trainer.run()


def one_step_done(team: Team, drivers: Mapping[str, Driver], name: str, late: Callable[[], bool]) -> SyncLoop:
    """An island of the team that has its first samples, and has drawn a batch of them."""
    team.trainers[name].join(Rounds(drivers[name], team.config, str))
    membership = team.trainers[name].sync
    while not membership.draw(8, 8):
        membership.without_samples(8, late)
    return membership
