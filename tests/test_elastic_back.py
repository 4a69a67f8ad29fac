"""Islands that have gone on alone and then hear of the owner's latch: they go back, in the run and at a start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from islands import SMALL, TestIsland, agree, introduce, wait_for

from diloco.bench.bare import DIGEST
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import Journal
from diloco.comm.transport.memory import MemoryNetwork
from diloco.elastic.protocol.record import Latch
from diloco.elastic.runtime.restoring import restore
from diloco.history.log import headers, newest_state
from diloco.simulate.virtual.world import owner

ROSTER = ("A", "B", "C")  # A, the founder, is never there
SETTING = replace(SMALL, partition="auto", snapshot_every=1000)


def latch() -> Latch:
    """Demand a quorum after the first record, which all have."""
    return Latch.sign(owner(), SETTING.beginning(ROSTER).state.head)


class Kept(TestIsland):
    def __init__(self, name: str, network: MemoryNetwork, folder: Path, life: int = 1) -> None:
        self.store = DiskStore(folder / name, lambda what, text: None)
        self.restored = restore(self.store.folder, self.store.journal, SETTING.run, self.store.report)
        first = SETTING.beginning(ROSTER)
        origin = self.restored or replace(first, state=replace(first.state, owner=owner().public_key.hex()))
        head = origin.state.head
        self.store.begin(DIGEST, head.digest, head.round, known=self.restored is not None)
        super().__init__(network.transport(name), origin, SETTING, incarnation=life, store=self.store)

    def obey(self) -> None:
        """Let it hear of the latch, and store that."""

        def step(now: float) -> list:
            self.driver.node.own.obey(latch())
            return self.driver.node.tick(now)

        self.driver.post(step)

    def close(self) -> None:
        super().close()
        self.store.close()


@contextmanager
def living(folder: Path, life: int = 1) -> Iterator[list[Kept]]:
    """B and C, which do not know of each other."""
    network = MemoryNetwork()
    team = [Kept(name, network, folder, life) for name in ("B", "C")]
    try:
        for island in team:
            island.start()
        yield team
    finally:
        for island in team:
            island.close()


def alone(team: list[Kept]) -> None:
    """Wait until each has some rounds of its own."""
    wait_for(lambda: all(island.state.head.round >= 4 for island in team), team, timeout_s=120)


def test_two_that_went_on_alone_go_back_and_decide_together(tmp_path):
    with living(tmp_path) as team:
        alone(team)
        for island in team:
            island.obey()
        wait_for(lambda: all(any(note.kind == "went back" for note in island.notes) for island in team), team)
        assert [island.driver.node.own.promise.term > 0 for island in team] == [True, True], "they have voted there"
        introduce(team)
        agree(team, after=4)
        assert {island.state.latch for island in team} == {latch().head.digest}
        assert all(island.state.mark(island.name, 1, 0) >= 4 for island in team), "what they did alone came late"
    journal = Journal.read(tmp_path / "B")
    assert [row.round for row in headers(tmp_path / "B")] == list(range(1, newest_state(tmp_path / "B").head.round + 1))
    assert len(journal.entries) > newest_state(tmp_path / "B").head.round, "the void records are still on the disk"


def test_a_log_that_is_read_at_a_start_ends_where_the_latch_makes_records_void(tmp_path):
    with living(tmp_path) as team:
        alone(team)
    assert newest_state(tmp_path / "B").head.round >= 4, "without the latch, all of it counts"
    with living(tmp_path, 2) as team:
        for island in team:
            island.driver.node.own.rules = replace(island.driver.node.own.rules, void_records_are_undone=False)
            island.obey()
        wait_for(lambda: all(island.driver.node.own.latch is not None for island in team), team)
    assert newest_state(tmp_path / "B").head.round == 0
    with living(tmp_path, 3) as team:
        assert [island.restored.state.head.round for island in team] == [0, 0]
        assert all(island.driver.node.own.is_latched for island in team)
        introduce(team)
        agree(team, after=4)
