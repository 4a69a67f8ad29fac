"""What training reads: a long row of tokens, indexable by position. Nothing here loads it whole."""

import hashlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.data.files import Files
from diloco.errors import DataError

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class Source(Protocol):
    @property
    def vocab(self) -> int:
        """Every token is below this."""

    @property
    def name(self) -> str:
        """For messages to people."""

    def __len__(self) -> int:
        """Tokens."""

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop), in any unsigned type."""

    def fingerprint(self) -> str:
        """Equal on two machines if and only if they hold the same tokens."""


class ByteFiles:
    """Files one after the other, each byte a token."""

    vocab = 256

    def __init__(self, files: list[Path], name: str) -> None:
        self.name = name
        self._files = Files(files)
        self._ends = list(accumulate(self._files.sizes))
        if len(self) == 0:
            raise DataError(f"{name} has no data: {len(files)} files, 0 bytes")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> Tokens:
        check_range(self, start, stop)
        parts: list[bytes] = []
        while start < stop:
            index = bisect_right(self._ends, start)
            end = min(stop, self._ends[index])
            origin = self._ends[index] - self._files.sizes[index]
            parts.append(self._files.read(index, start - origin, end - origin))
            start = end
        return np.frombuffer(b"".join(parts), dtype=np.uint8)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for index in range(len(self._files.paths)):
            for chunk in self._files.chunks(index):
                digest.update(chunk)
        return seal(self.vocab, len(self), 1, digest.digest())


def seal(vocab: int, count: int, width: int, payload_digest: bytes) -> str:
    """The one form of a fingerprint, whatever the source."""
    header = f"diloco data 1: {count} tokens below {vocab} of {width} bytes: "
    return hashlib.sha256(header.encode() + payload_digest).hexdigest()


def check_range(source: Source, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= len(source):
        raise IndexError(f"tokens {start} to {stop} of {source.name}, which has {len(source)}")
