import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.shuffle import permute


def order(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return permute(np.arange(n), n, seed, epoch).tolist()


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_every_element_comes_exactly_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed, epoch)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 101, 127, 128, 1009, 65536, 65537, 99991])
def test_bijective_at_the_awkward_sizes(n: int) -> None:
    assert sorted(order(n)) == list(range(n))


@given(n=st.integers(1, 2**62), data=st.data())
def test_a_batch_equals_its_positions_one_by_one(n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    assert permute(positions, n, 1, 2).tolist() == [int(permute(p, n, 1, 2)) for p in positions]


def test_golden() -> None:
    """Every island on every platform must compute these: a change here reorders the data of running runs."""
    assert order(10) == [6, 1, 7, 8, 4, 5, 0, 2, 9, 3]
    assert order(10, epoch=1) == [1, 8, 9, 6, 3, 0, 5, 7, 4, 2]
    assert int(permute(5, 10**12, seed=7, epoch=3)) == 204808642577


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_each_element_comes_first_about_equally_often() -> None:
    first = [int(permute(0, 10, 0, epoch)) for epoch in range(2000)]
    counts = np.bincount(first, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi squared, 9 degrees of freedom, p = 0.001


def test_neighbours_are_torn_apart() -> None:
    gaps = np.abs(np.diff(order(10_000)))
    assert 3000 < gaps.mean() < 3700  # a third of n for a random order


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(IndexError):
        permute(position, 10, 0, 0)
