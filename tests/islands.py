"""Islands in one process for tests of the driver: real threads and streams over memory, a trainer of a few lines."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from diloco.bench.bare import BareConfig, BareIsland
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.messages import Note
from diloco.elastic.runtime.driver import among_friends, open_island
from diloco.elastic.runtime.restoring import Origin

SMALL = BareConfig(count=70_000, silence_s=0.5, pace_s=0.02, samples=8, snapshot_every=10)
NAMES = ("A", "B", "C", "D")


class TestIsland(BareIsland):
    """One that trains in a thread; `error` is what that came to, `notes` what its driver told."""

    __test__ = False

    def __init__(self, transport: Transport, origin: Origin, setting: BareConfig = SMALL, **more: Any) -> None:
        self.notes: list[Note] = []
        network, report = among_friends(transport), self.notes.append
        super().__init__(setting, open_island(setting.run, origin, setting.options, network, report=report, **more))
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _train(self) -> None:
        try:
            self.train()
        except BaseException as error:  # noqa: BLE001 -- a thread's outermost frame: wait_for raises it
            self.error = error

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(10)

    def close(self) -> None:
        self.stop()
        self.driver.close()


@contextmanager
def training(islands: Sequence[TestIsland]) -> Iterator[None]:
    """They know each other, train, and are closed in the end."""
    try:
        introduce(islands)
        for island in islands:
            island.start()
        yield
    finally:
        for island in islands:
            island.close()


def introduce(islands: Sequence[TestIsland]) -> None:
    for island in islands:
        island.driver.know({other.name: PeerAddress(other.name) for other in islands})


def wait_for(
    condition: Callable[[], bool], islands: Sequence[TestIsland], timeout_s: float = 30.0, pause_s: float = 0.01
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


@contextmanager
def team(
    names: tuple[str, ...] = NAMES, *, shape: Callable[[Transport], Transport] = lambda plain: plain, **options: Any
) -> Iterator[tuple[MemoryNetwork, list[TestIsland]]]:
    network, setting = MemoryNetwork(), replace(SMALL, **options)
    islands = [TestIsland(shape(network.transport(name)), setting.beginning(names), setting) for name in names]
    with training(islands):
        yield network, islands


def at_round(islands: list[TestIsland], number: int) -> None:
    wait_for(lambda: all(island.state.head.round >= number for island in islands), islands)


def stand_still(islands: list[TestIsland]) -> None:
    for island in islands:
        island.stop()
    wait_for(lambda: len({island.state.head for island in islands}) == 1, islands)


def assert_agreed(islands: list[TestIsland]) -> None:
    """At one head: what was offered last may still be committed while one looks."""
    found: list[set[str]] = []

    def looked() -> bool:
        before = {island.state.head for island in islands}
        found[:] = [{island.driver.replica.digest() for island in islands}]
        return len(before) == 1 and before == {island.state.head for island in islands}

    wait_for(looked, islands)
    assert len(found[0]) == 1


def agree(islands: list[TestIsland], *, after: int = 0) -> None:
    """Go on for so many rounds, stand still, and hold the same bits."""
    if after:
        at_round(islands, max(island.state.head.round for island in islands) + after)
    stand_still(islands)
    assert_agreed(islands)
