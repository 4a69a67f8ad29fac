"""Islands in one process for tests of the driver: real threads and streams over memory, a trainer of a few lines."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diloco.bench.bare import BareConfig, BareIsland
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.messages import Note
from diloco.elastic.runtime.driver import among_friends, open_island
from diloco.elastic.runtime.restoring import Origin

SMALL = BareConfig(count=70_000, silence_s=0.5, pace_s=0.02, samples=8, snapshot_every=10)


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
