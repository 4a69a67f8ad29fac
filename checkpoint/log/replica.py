"""This island's copy of the outer state's vectors, and versions of it that stay readable for peers and writers.

The vectors change by committed updates only, through a function that `apply` is given. `version` is the digest of the
chain of records that they contain.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from diloco.checkpoint.log.library import Library
from diloco.checkpoint.log.pinned import LEAF, PinnedItem, PinnedState, Ranges
from diloco.checkpoint.log.room import Room, fill
from diloco.checkpoint.log.writing import PIECE

PIN_S = 120.0  # after its last use, a version that peers have asked for makes way
FRESH_S = 3.0  # so long, newcomers are given the one that is there


@dataclass
class Pin:
    """Hold a version that is kept for peers."""

    made_at: float
    used_at: float  # last asked for
    meta: bytes
    state: PinnedState


class Replica:
    """Hold the outer state's vectors under a lock, and pin versions of them."""

    def __init__(
        self, vectors: Mapping[str, Tensor], library: Library, version: str, meta: bytes, *, folder: Path | None = None,
        leaf: int = LEAF,
    ) -> None:  # fmt: skip
        """`meta` is what else a fetcher needs to know of this version: opaque here. What pinned versions keep lies in
        `folder`, where there is one."""
        self.vectors, self.library = dict(vectors), library
        self.version, self.meta = version, meta
        self._folder, self._leaf = folder, leaf
        self._lock = threading.Condition()
        self._pinned: list[PinnedState] = []
        self._pins: dict[str, Pin] = {}  # of peers, by version
        self.before_change: Callable[[Ranges], None] = lambda ranges: None  # called with the lock

    def apply(self, change: Callable[[Mapping[str, Tensor]], None], version: str, meta: bytes, ranges: Ranges) -> None:
        """Let `change` update these ranges of the vectors in place, and set the version that they have then; readers
        wait meanwhile."""
        with self._lock:
            self._unpin_old()
            self._keep(ranges)
            change(self.vectors)
            self.version, self.meta = version, meta
            self._lock.notify_all()

    def replace(self, rooms: Mapping[str, Room], check: str, version: str, meta: bytes) -> None:
        """Copy the bytes of another state's vectors over these, all at once: one that was fetched whole from peers.

        Raise OSError if they are not what their check sum says: the vectors are useless then.
        """
        with self._lock:
            self._keep(((0, max(map(len, self.vectors.values()))),))
            if fill(self.vectors, rooms) != check:
                raise OSError("a fetched state was read back from the disk with other bytes: start this island again")
            self.version, self.meta = version, meta
            self._lock.notify_all()

    def _keep(self, ranges: Ranges) -> None:
        for state in self._pinned:
            state.keep(ranges)
        self.before_change(ranges)

    @contextmanager
    def reading(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the vectors under the lock: no update is applied until the block ends."""
        with self._lock:
            yield self.vectors

    def pin_now(self, *, once: bool = False) -> PinnedState:
        """Return the present version, which stays readable until it is released; with `once`, once and in order."""
        with self._lock:
            state = PinnedState(
                self.vectors, self._lock, self._folder, leaf=self._leaf, once=once, released=self._pinned.remove
            )
            self._pinned.append(state)
            return state

    def digest(self) -> str:
        """Return the SHA-256 of all bits of the vectors, in hex. Updates do not wait for it."""
        state = self.pin_now(once=True)
        try:
            return state.digest()
        finally:
            state.release()

    def pin(self, version: str = "") -> bytes | None:
        """Keep this version for others and return its meta; None where it is past. Without a version, one that was
        pinned in the last FRESH_S seconds will do, else it is the present one."""
        with self._lock:
            now = time.monotonic()
            self._unpin_old()
            fresh = (pinned for pinned, pin in self._pins.items() if now - pin.made_at < FRESH_S)
            version = version or next(fresh, self.version)
            if version not in self._pins:
                if version != self.version:
                    return None
                state = self.pin_now()
                for name in map(partial(vector_name, version), self.vectors):
                    self.library.put(name, PinnedItem(name, state, name.rpartition("/")[2]))
                self._pins[version] = Pin(now, now, self.meta, state)
            pin = self._pins[version]
            pin.used_at = now
            return pin.meta

    def pinned_digest(self, version: str) -> str | None:
        """Return the digest of a version that is kept for others; None where it is not."""
        with self._lock:
            pin = self._pins.get(version)
        return None if pin is None else pin.state.digest()

    def _unpin_old(self) -> None:
        for version, pin in list(self._pins.items()):
            if pin.state.failed or time.monotonic() - pin.used_at > PIN_S:
                del self._pins[version]
                pin.state.release()
                for name in self.vectors:
                    self.library.drop(vector_name(version, name))


def vector_name(version: str, name: str) -> str:
    """Return the library's name for a vector of a pinned version."""
    return f"state/{version}/{name}"


def vectors_digest(vectors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all bits of these vectors, by name, in hex."""
    digest = hashlib.sha256()
    for name in sorted(vectors):
        for piece in vectors[name].split(PIECE // 4):
            digest.update(piece.cpu().numpy())
    return digest.hexdigest()
