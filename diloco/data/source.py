"""What training reads: a long row of tokens, indexable by position. Nothing here loads it whole."""

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.config.schema import SOURCES, DataConfig
from diloco.data.files import Files
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import DataError

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Progress = Callable[[int, int], None]  # bytes of text done, bytes in all (0: not known beforehand)


class Source(Protocol):
    """Provide a long row of tokens, indexable by position."""

    @property
    def vocab(self) -> int:
        """Return the number that every token is below."""

    @property
    def name(self) -> str:
        """Return what messages call this source."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop), in any unsigned type."""

    def fingerprint(self) -> str:
        """Return a digest that is equal on two machines if and only if they hold the same tokens."""


class SourceKind(ABC):
    """Open the kind of data that a name in `SOURCES` (`diloco/config/schema.py`) stands for, and give facts about it
    that can be had without reading it."""

    @abstractmethod
    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        """Open the configured data; if it has to be tokenised, that goes to the cache and is reported to `progress`."""

    def tokenizer(self, config: DataConfig, others: Iterable[str] = ()) -> str:
        """Return which tokenizer made its tokens; `others` are further places where that may lie."""
        return config.tokenizer

    def vocab(self, config: DataConfig) -> int:
        """Return the size of its tokenizer's vocabulary."""
        return load_tokenizer(self.tokenizer(config)).vocab

    def separated(self, config: DataConfig) -> bool:
        """Tell whether the tokenizer's end token stands between two documents."""
        return True


def source_kind(config: DataConfig) -> SourceKind:
    """Create the kind of source that the configuration names; its module is imported only here."""
    kind: SourceKind = resolve_name(SOURCES[config.source])()
    return kind


class ByteFiles:
    """Read files one after the other as one source, each byte a token."""

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
        """Hash the bytes of all files, which are read for it; where one file ends does not matter."""
        digest = hashlib.sha256()
        for index in range(len(self._files.paths)):
            for chunk in self._files.chunks(index):
                digest.update(chunk)
        return seal(self.vocab, len(self), 1, digest.digest())


def seal(vocab: int, count: int, width: int, payload_digest: bytes) -> str:
    """Build a fingerprint from a payload's digest, in the one form that all sources share."""
    header = f"diloco data 1: {count} tokens below {vocab} of {width} bytes: "
    return hashlib.sha256(header.encode() + payload_digest).hexdigest()


def check_range(source: Source, start: int, stop: int) -> None:
    """Raise IndexError unless the source has tokens [start, stop)."""
    if not 0 <= start <= stop <= len(source):
        raise IndexError(f"tokens {start} to {stop} of {source.name}, which has {len(source)}")
