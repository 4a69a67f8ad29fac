"""Where progress is measured from: no copy of the outer parameters, until an update comes that is not taken in yet."""

import pytest
import torch

from diloco.checkpoint.log.library import Library
from diloco.checkpoint.log.replica import Replica
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.work import Owed
from diloco.train.anchor import Anchor

TWO = Fragments((((0, 2), (5, 6)), ((2, 5),)))
OUTER = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]


@pytest.fixture
def replica() -> Replica:
    return Replica({"parameters": torch.tensor(OUTER)}, Library(), "", b"")


def update(replica: Replica, fragment: int) -> None:
    def change(vectors):
        for lo, hi in TWO.ranges[fragment]:
            vectors["parameters"][lo:hi] += 100

    replica.apply(change, "", b"", TWO.ranges[fragment])


def cut(anchor: Anchor, fragment: int, local: list[float], **how) -> list[float]:
    return torch.cat(list(anchor.cut(fragment, parts(fragment, local), **how))).tolist()


def parts(fragment: int, values: list[float]) -> list[tuple[int, int, torch.Tensor]]:
    left = torch.tensor(values)
    lengths = [hi - lo for lo, hi in TWO.ranges[fragment]]
    return [(*ends, part) for ends, part in zip(TWO.ranges[fragment], left.split(lengths), strict=True)]


def held(anchor: Anchor, fragment: int) -> list[float]:
    return [value for ends in TWO.ranges[fragment] for value in anchor.read(fragment, *ends).tolist()]


def test_where_training_waits_it_is_the_outer_parameters_themselves(replica):
    anchor = Anchor(replica, TWO, own=False)
    assert cut(anchor, 0, [9.0, 9.0, 9.0]) == [1.0, 2.0, 6.0]
    update(replica, 0)
    anchor.follow(0)
    assert held(anchor, 0) == [110.0, 111.0, 115.0] and held(anchor, 1) == [12.0, 13.0, 14.0]
    assert anchor.vector is None and not anchor.differs(replica.vectors["parameters"])


def test_an_update_that_is_not_taken_in_yet_leaves_the_anchor_where_it_was(replica):
    anchor = Anchor(replica, TWO, own=False)
    update(replica, 1)
    assert held(anchor, 1) == [12.0, 13.0, 14.0] and held(anchor, 0) == [10.0, 11.0, 15.0]
    assert anchor.differs(replica.vectors["parameters"])
    update(replica, 1)
    assert cut(anchor, 1, [2.0, 3.0, 4.0]) == [10.0, 10.0, 10.0]
    assert anchor.vector is None, "and what was copied is let go of"


def test_it_lags_behind_the_outer_parameters_by_what_they_do_not_contain(replica):
    anchor = Anchor(replica, TWO, own=False)
    update(replica, 0)
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    anchor.follow(0, Owed([lambda lo, hi: first[lo:hi], lambda lo, hi: second[lo:hi]]))
    assert held(anchor, 0) == [99.0, 89.0, 82.0] and anchor.vector is None, "worked out where it is read"
    assert anchor.differs(replica.vectors["parameters"])
    update(replica, 0)
    assert held(anchor, 0) == [99.0, 89.0, 82.0], "an update that is not taken in yet leaves it where it was"
    assert anchor.whole().tolist() == [99.0, 89.0, 12.0, 13.0, 14.0, 82.0]
    anchor.follow(0)
    assert held(anchor, 0) == [210.0, 211.0, 215.0] and anchor.vector is not None
    assert cut(anchor, 0, [0.0, 0.0, 0.0]) == [210.0, 211.0, 215.0]


def test_an_update_in_the_middle_of_a_cut_changes_nothing_of_it(replica):
    anchor = Anchor(replica, TWO, own=False)
    progress = anchor.cut(0, parts(0, [0.0, 0.0, 0.0]))
    first = next(progress)
    update(replica, 0)
    assert torch.cat([first, *progress]).tolist() == [10.0, 11.0, 15.0]


def test_what_the_island_holds_since_a_cut_is_kept_if_training_goes_on(replica):
    anchor = Anchor(replica, TWO, own=False)
    cut(anchor, 0, [1.0, 2.0, 3.0])
    anchor.fill(0, parts(0, [1.0, 2.0, 3.0]))
    update(replica, 0)
    assert held(anchor, 0) == [1.0, 2.0, 3.0]
    assert anchor.whole().tolist() == [1.0, 2.0, 12.0, 13.0, 14.0, 3.0]


def test_beside_training_each_cut_moves_it_to_what_the_island_holds(replica):
    anchor = Anchor(replica, TWO, own=True)
    assert cut(anchor, 1, [2.0, 2.0, 2.0]) == [10.0, 11.0, 12.0]
    update(replica, 1)
    assert cut(anchor, 1, [1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert cut(anchor, 1, [0.0, 0.0, 0.0], preview=lambda lo, progress: progress + lo) == [1.0, 1.0, 1.0]
    assert held(anchor, 1) == [3.0, 3.0, 3.0]
    anchor.follow(1)
    assert held(anchor, 1) == [112.0, 113.0, 114.0]


@pytest.mark.parametrize("own", [False, True])
def test_a_save_brings_it_back(replica, own):
    anchor, parameters = Anchor(replica, TWO, own=own), torch.tensor(OUTER)
    anchor.restore({"parameters": parameters})
    assert held(anchor, 0) == [10.0, 11.0, 15.0] and (anchor.vector is None) == (not own)
    anchor.restore({"parameters": parameters, "anchor": torch.arange(6.0)})
    assert held(anchor, 0) == [0.0, 1.0, 5.0] and held(anchor, 1) == [2.0, 3.0, 4.0]
