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


class SourceKind(ABC):
    """What a name in `SOURCES` (`diloco/config/schema.py`) stands for: how such data is opened, and facts about it that
    can be had without reading it."""

    @abstractmethod
    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source: ...

    def tokenizer(self, config: DataConfig, others: Iterable[str] = ()) -> str:
        """Say which one its tokens were made with, `others` being where one may lie, too."""
        return config.tokenizer

    def vocab(self, config: DataConfig) -> int:
        return load_tokenizer(self.tokenizer(config)).vocab

    def separated(self, config: DataConfig) -> bool:
        """Whether the tokenizer's end stands between two documents."""
        return True


def source_kind(config: DataConfig) -> SourceKind:
    kind: SourceKind = resolve_name(SOURCES[config.source])()
    return kind


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
