"""Samples cut out of a source: the unit that islands lease, and that a batch is made of.

Sample i is tokens [i * sequence, i * sequence + sequence + 1): inputs and targets are that row without its last and
without its first token. Neighbours share one token, which is a target in one and an input in the other.
"""

import numpy as np
import numpy.typing as npt

from diloco.data.shuffle import over_epochs
from diloco.data.source import Source
from diloco.errors import DataError

Rows = npt.NDArray[np.int64]

OWN_LOOP = "own loop"  # instead of a fingerprint: the data of a user's own loop has no length before it is read


class Samples:
    """Cut a source into samples for training and validation.

    The first `train_count` samples are for training, the last `validation_count` for validation.
    """

    def __init__(self, source: Source, sequence: int, seed: int, validation_fraction: float) -> None:
        if sequence < 1:
            raise ValueError(f"a sequence of {sequence} tokens")
        if not 0 <= validation_fraction < 1:
            raise ValueError(f"validation_fraction={validation_fraction} must be at least 0 and below 1")
        self.source, self.sequence, self.seed = source, sequence, seed
        count = _count(source, sequence, needed=2 if validation_fraction > 0 else 1)
        self.validation_count = max(1, int(count * validation_fraction)) if validation_fraction > 0 else 0
        self.train_count = count - self.validation_count

    def train(self, position: int, count: int) -> Rows:
        """Return training samples, [count, sequence + 1].

        Positions continue over epochs; each epoch has an order of its own.
        """
        return self._rows(over_epochs(_positions(position, count), self.train_count, self.seed))

    def validation(self, position: int, count: int) -> Rows:
        """Return validation samples, [count, sequence + 1], in the source's order; the first one follows the last."""
        if self.validation_count == 0:
            raise DataError("there are no validation samples: raise data.validation")
        return self._rows(self.train_count + _positions(position, count) % self.validation_count)

    def _rows(self, indices: Rows) -> Rows:
        rows = np.empty((len(indices), self.sequence + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            start = index * self.sequence
            row[:] = self.source.read(start, start + self.sequence + 1)
        return rows


def _positions(position: int, count: int) -> Rows:
    if position < 0 or count < 0:
        raise IndexError(f"{count} samples from position {position}")
    return np.arange(position, position + count, dtype=np.int64)


def _count(source: Source, sequence: int, needed: int) -> int:
    count = max(0, len(source) - 1) // sequence
    if count < needed:
        purpose = "a training and a validation sample" if needed == 2 else "one sample"
        raise DataError(
            f"{source.name} has {len(source)} tokens; {purpose} of sequence={sequence} "
            f"needs {needed * sequence + 1}: use more data or a shorter sequence"
        )
    return count
