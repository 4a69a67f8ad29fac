"""A version of the outer state that stays readable while updates go on, without a copy of it.

What no update has changed yet is read from the vectors themselves, leaf by leaf. Before an update changes a leaf, its
bytes go to a file without a name, which is gone with its last reader. So a version costs memory for one leaf, and disk
only for what was overtaken by updates.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from errno import ENOSPC, ESTALE
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch
from torch import Tensor

from diloco.checkpoint.log.library import Item, chunk_count, usual_chunk_bytes
from diloco.checkpoint.log.writing import Pieces, Rest, no_rest
from diloco.comm.codec.streams import beside_training

LEAF = 1 << 20  # values that are read, copied and kept together
VALUE_BYTES = 4

Ranges = tuple[tuple[int, int], ...]  # of values


class PinnedState:
    """Read the vectors as they are when this is made, whatever is applied to them later.

    Whoever changes vectors holds their lock, and calls `keep` before. With `once`, each leaf is read once and in order,
    and need not be kept after that. A disk that refuses to keep a leaf fails those who read it, never an update.
    """

    def __init__(
        self, vectors: Mapping[str, Tensor], lock: threading.Condition, folder: Path | None, *, leaf: int = LEAF,
        once: bool = False, released: Callable[["PinnedState"], None] = lambda state: None,
    ) -> None:  # fmt: skip
        """Pin what the vectors hold now; the caller holds their lock. The file lies in `folder`, if there is one."""
        self._vectors, self._lock, self._folder, self._once, self._released = vectors, lock, folder, once, released
        self._leaf = leaf * VALUE_BYTES
        self.sizes = {name: len(vector) * VALUE_BYTES for name, vector in vectors.items()}
        self._places = dict(zip(vectors, accumulate(self.sizes.values(), initial=0), strict=False))
        self._kept: set[tuple[str, int]] = set()
        self._read_up_to = dict.fromkeys(vectors, 0)  # leaves
        self._file: IO[bytes] | None = None
        self._error: OSError | None = None
        self._digest, self._over = "", False

    @property
    def failed(self) -> bool:
        """Return whether the disk has refused to keep this version: it cannot be read any more."""
        return self._error is not None

    def keep(self, ranges: Ranges) -> None:
        """Keep the leaves in these ranges of values, which are about to change."""
        for lo, hi in ranges:
            for name, size in self.sizes.items():
                first, last = lo * VALUE_BYTES // self._leaf, -(-min(hi * VALUE_BYTES, size) // self._leaf)
                for number in range(max(first, self._read_up_to[name]), last):
                    self._keep_leaf(name, number)

    def _keep_leaf(self, name: str, number: int) -> None:
        if (name, number) in self._kept or self._error is not None:
            return
        lo = number * self._leaf
        left = _raw(self._vectors[name], lo, min(lo + self._leaf, self.sizes[name]))
        at = self._places[name] + lo
        try:
            if self._file is None:
                self._file = TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 -- as long as it is read
                disk = os.fstatvfs(self._file.fileno())
                if disk.f_bavail * disk.f_frsize < sum(self.sizes.values()):  # the log lies there, too
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
            while left:
                written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[written:], at + written
        except OSError as error:
            self._error = error
            self._close()
            return
        self._kept.add((name, number))

    def read(self, name: str, lo: int, hi: int) -> bytes:
        """Return some bytes of a vector; raise OSError where the disk has refused to keep them."""
        return b"".join(self.parts(name, lo, hi))

    def parts(self, name: str, lo: int = 0, hi: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a vector, or those from `lo` to `hi`, a leaf at a time."""
        hi = self.sizes[name] if hi is None else hi
        while lo < hi:
            number = lo // self._leaf
            end = min(hi, (number + 1) * self._leaf)
            with self._lock:
                if self._error is not None:
                    raise OSError(self._error.errno, self._error.strerror, str(self._folder))
                if (name, number) in self._kept:
                    assert self._file is not None
                    part = os.pread(self._file.fileno(), end - lo, self._places[name] + lo)
                else:
                    part = bytes(_raw(self._vectors[name], lo, end))
                if self._once and end == min((number + 1) * self._leaf, self.sizes[name]):
                    self._read_up_to[name] = number + 1
            yield part
            lo = end

    def digest(self, rest: Rest = no_rest) -> str:
        """Return the SHA-256 of all bits of the vectors, by name, in hex; it is worked out once."""
        if not self._digest:
            found = hashlib.sha256()
            for name in sorted(self.sizes):
                for part in self.parts(name):
                    found.update(part)
                    rest()
            self._digest = found.hexdigest()
        return self._digest

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of values of each vector."""
        return {name: size // VALUE_BYTES for name, size in self.sizes.items()}

    def part(self, name: str, start: int, count: int) -> Pieces:
        """Return a stretch of a vector, to be written."""
        lo, hi = start * VALUE_BYTES, (start + count) * VALUE_BYTES
        return Pieces(torch.float32, (count,), partial(self.parts, name, lo, hi))

    def release(self) -> None:
        """Let go of this version: nothing is kept for it any more, and it cannot be read."""
        with self._lock:
            if not self._over:
                self._over, self._error = True, self._error or OSError(ESTALE, "the version was released")
                self._close()
                self._released(self)

    def _close(self) -> None:
        self._kept.clear()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


class PinnedItem(Item):
    """Give a vector of a pinned state to peers, chunk by chunk."""

    def __init__(self, name: str, state: PinnedState, vector: str) -> None:
        self.name, self.size, self._state, self._vector = name, state.sizes[vector], state, vector
        self.chunk_bytes = usual_chunk_bytes(self.size)
        self.count = chunk_count(name, self.size, self.chunk_bytes)
        self._digests = [None] * self.count

    def chunk(self, number: int) -> memoryview:
        """Read a chunk; raise OSError where it could not be kept."""
        lo = number * self.chunk_bytes
        return memoryview(self._state.read(self._vector, lo, min(lo + self.chunk_bytes, self.size)))

    @property
    def data(self) -> memoryview:
        """Read all of it into memory."""
        return memoryview(self._state.read(self._vector, 0, self.size))


def _raw(vector: Tensor, lo: int, hi: int) -> memoryview:
    """Return some bytes of a vector: its own memory, unless it lies on a device."""
    first, last = lo // VALUE_BYTES, -(-hi // VALUE_BYTES)
    with beside_training(vector.device):
        part = vector[first:last].cpu()
    raw = memoryview(part.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return raw[lo - first * VALUE_BYTES : hi - first * VALUE_BYTES]
