import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.samples import Samples
from diloco.errors import DataError


class Counting:
    """A source whose token at position p is p."""

    name = "counting"

    def __init__(self, length: int) -> None:
        self.vocab = self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.length
        return np.arange(start, stop, dtype=np.uint32)

    def fingerprint(self) -> str:
        return hashlib.sha256(str(self.length).encode()).hexdigest()


def test_a_row_is_a_sequence_and_its_next_token() -> None:
    samples = Samples(Counting(100), sequence=8, seed=0, validation_fraction=0)
    rows = samples.train(0, samples.train_count)
    assert rows.dtype == np.int64
    assert rows.shape == (12, 9)
    assert (np.diff(rows) == 1).all()
    assert sorted(rows[:, 0]) == list(range(0, 96, 8))


@given(length=st.integers(1, 500), sequence=st.integers(1, 50), fraction=st.floats(0, 0.99))
def test_the_split_shares_one_token_at_most(length: int, sequence: int, fraction: float) -> None:
    try:
        samples = Samples(Counting(length), sequence, seed=0, validation_fraction=fraction)
    except DataError:
        assert length < (2 if fraction > 0 else 1) * sequence + 1
        return
    train = set(samples.train(0, samples.train_count).flat)
    held_out = set(samples.validation(0, samples.validation_count).flat) if fraction > 0 else set()
    assert samples.train_count >= 1
    assert (samples.validation_count >= 1) == (fraction > 0)
    assert train & held_out == ({samples.train_count * sequence} if held_out else set())
    assert len(train | held_out) == (length - 1) // sequence * sequence + 1


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    samples = Samples(Counting(1001), sequence=10, seed=3, validation_fraction=0.1)
    epochs = [samples.train(epoch * 90, 90)[:, 0] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 900, 10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@given(position=st.integers(0, 300), count=st.integers(0, 200))
def test_a_batch_across_epochs_equals_its_samples_one_by_one(position: int, count: int) -> None:
    samples = Samples(Counting(211), sequence=5, seed=0, validation_fraction=0.2)
    single = [samples.train(p, 1)[0] for p in range(position, position + count)]
    assert np.array_equal(samples.train(position, count), np.reshape(single, (count, 6)))


def test_validation_keeps_its_order_and_wraps() -> None:
    samples = Samples(Counting(101), sequence=10, seed=0, validation_fraction=0.2)
    assert samples.validation(1, 4)[:, 0].tolist() == [90, 80, 90, 80]


def test_a_source_that_is_too_short_says_by_how_much() -> None:
    with pytest.raises(DataError, match=r"counting has 10 tokens; one sample of sequence=10 needs 11"):
        Samples(Counting(10), sequence=10, seed=0, validation_fraction=0)
    with pytest.raises(DataError, match=r"has 20 tokens; a training and a validation sample .* needs 21"):
        Samples(Counting(20), sequence=10, seed=0, validation_fraction=0.01)
    assert Samples(Counting(21), sequence=10, seed=0, validation_fraction=0.01).train_count == 1


def test_no_validation_without_a_fraction() -> None:
    with pytest.raises(DataError, match=r"raise data\.validation"):
        Samples(Counting(100), sequence=10, seed=0, validation_fraction=0).validation(0, 1)
