"""This island's copy of the outer state's vectors, and pinned copies of it for peers that fetch them.

The vectors change by committed updates only, through a function that `apply` is given. `version` is the digest of the
chain of records that they contain.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from diloco.checkpoint.log.library import Library
from diloco.checkpoint.log.writing import PIECE, Rest, no_rest

PIN_S = 120.0  # after its last use, a pinned copy makes way
FRESH_S = 3.0  # so long, newcomers are given the copy that is there


class Replica:
    """Hold the outer state's vectors under a lock, and pin copies of them for peers."""

    def __init__(self, vectors: Mapping[str, Tensor], library: Library, version: str, meta: bytes) -> None:
        """`meta` is what else a fetcher needs to know of this version: opaque here."""
        self.vectors, self.library = dict(vectors), library
        self.version, self.meta = version, meta
        self._lock = threading.Condition()
        self._pins: dict[str, tuple[float, float, bytes]] = {}  # when made, when last asked for, and its meta

    def apply(self, change: Callable[[Mapping[str, Tensor]], None], version: str, meta: bytes) -> None:
        """Let `change` update the vectors in place, and set the version that they have then; readers wait meanwhile."""
        with self._lock:
            change(self.vectors)
            self.version, self.meta = version, meta
            self._unpin_old()
            self._lock.notify_all()

    def replace(self, vectors: Mapping[str, Tensor], version: str, meta: bytes) -> None:
        """Copy another state's vectors over these, all at once: one that was fetched whole from peers."""
        with self._lock:
            for name, vector in self.vectors.items():
                vector.copy_(vectors[name])
            self.version, self.meta = version, meta
            self._lock.notify_all()

    @contextmanager
    def reading(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the vectors under the lock: no update is applied until the block ends."""
        with self._lock:
            yield self.vectors

    def digest(self) -> str:
        """Return the SHA-256 of all bits of the vectors, in hex."""
        with self._lock:
            return vectors_digest(self.vectors)

    def pin(self, version: str = "") -> bytes | None:
        """Keep a copy of this version for others and return its meta; None where it is past. Without a version, a copy
        made in the last FRESH_S seconds will do, else the present one is copied."""
        with self._lock:
            now = time.monotonic()
            self._unpin_old()
            fresh = (pinned for pinned, (made, _, _) in self._pins.items() if now - made < FRESH_S)
            version = version or next(fresh, self.version)
            if version not in self._pins:
                if version != self.version:
                    return None
                for name, vector in self.vectors.items():
                    self.library.put(vector_name(version, name), memoryview(host_copy(vector).numpy()))  # type: ignore[arg-type]
                self._pins[version] = now, now, self.meta
            made, _, meta = self._pins[version]
            self._pins[version] = made, now, meta
            return meta

    def _unpin_old(self) -> None:
        for version, (_, used_at, _) in list(self._pins.items()):
            if time.monotonic() - used_at > PIN_S:
                del self._pins[version]
                for name in self.vectors:
                    self.library.drop(vector_name(version, name))


def vector_name(version: str, name: str) -> str:
    """Return the library's name for a vector of a pinned version."""
    return f"state/{version}/{name}"


def host_copy(vector: Tensor) -> Tensor:
    """Copy a vector to the CPU: it may lie on a device."""
    return vector.to("cpu", copy=True)


def vectors_digest(vectors: Mapping[str, Tensor], rest: Rest = no_rest) -> str:
    """Return the SHA-256 of all bits of these vectors, by name, in hex; `rest` is called between pieces."""
    views = {name: memoryview(vector.cpu().view(torch.uint8).numpy()) for name, vector in vectors.items()}  # type: ignore[arg-type]
    return bytes_digest(views, rest)


def bytes_digest(vectors: Mapping[str, memoryview], rest: Rest = no_rest) -> str:
    """Return the digest that `vectors_digest` gives, from vectors that are bytes already."""
    digest = hashlib.sha256()
    for name in sorted(vectors):
        for at in range(0, len(vectors[name]), PIECE):
            digest.update(vectors[name][at : at + PIECE])
            rest()
    return digest.hexdigest()
