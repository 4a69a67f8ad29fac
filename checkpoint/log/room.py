"""Where a download goes: memory, or a file that a restart finds again."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from diloco.checkpoint.log.writing import PIECE
from diloco.comm.codec.rooms import mapped
from diloco.comm.transport.wire import as_bytes

log = logging.getLogger(__name__)


class Room(Protocol):
    """Hold so many bytes, which are written and read in slices: a memoryview of bytes, or a `FileRoom`."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...

    def __setitem__(self, part: slice, data: memoryview, /) -> None: ...


class FileRoom:
    """Hold bytes in a file; once the disk refuses, in memory.

    Without a mapping: the page that a full disk cannot take would end the process without a word.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open the file with what it holds already."""
        self._path, self._size = path, size
        self._memory: memoryview | None = None
        try:
            self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115 -- as long as this
        except OSError as error:
            self._to_memory(error)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> memoryview:
        """Return a copy of these bytes; raise OSError where the file does not reach so far."""
        if self._memory is not None:
            return self._memory[part]
        start, stop, _ = part.indices(self._size)
        found = memoryview(bytearray(stop - start))
        if self._read(found, start) < len(found):
            raise OSError(f"{self._path} is shorter than it has to be")
        return found

    def __setitem__(self, part: slice, data: memoryview) -> None:
        """Write these bytes. Whoever writes makes sure to be alone in that."""
        start, _, _ = part.indices(self._size)
        if self._memory is None:
            try:
                self._write(data, start)
            except OSError as error:
                self._to_memory(error)
        if self._memory is not None:
            self._memory[part] = data

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, at)
            data, at = data[written:], at + written

    def _read(self, into: memoryview, at: int) -> int:
        """Read as much as there is, and return how much that was."""
        done = 0
        while done < len(into) and (count := os.preadv(self._file.fileno(), [into[done:]], at + done)):
            done += count
        return done

    def _to_memory(self, error: OSError) -> None:
        """Go on without the file, with what it holds."""
        log.warning("%s: a download that breaks now begins anew: %s", self._path, error)
        memory = bytes_of(mapped(self._size))
        if hasattr(self, "_file"):
            for at in range(0, self._size, PIECE):
                self._read(memory[at : at + PIECE], at)
        self._memory = memory  # the file stays open: another thread may be reading it


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a tensor in memory."""
    return as_bytes(memoryview(tensor.view(torch.uint8).numpy()))  # type: ignore[arg-type]


def check_of(rooms: Mapping[str, Room]) -> str:
    """Return a check sum of all bytes, by name: what `fill` finds in them, too."""
    check = xxhash.xxh3_64()
    for _, room in sorted(rooms.items()):
        for at in range(0, len(room), PIECE):
            check.update(room[at : at + PIECE])
    return check.hexdigest()


def fill(vectors: Mapping[str, Tensor], rooms: Mapping[str, Room]) -> str:
    """Copy the values of rooms into vectors on any device, piece by piece, and return the check sum of what was copied:
    a disk may give back other bytes than it gave when they were compared."""
    check = xxhash.xxh3_64()
    for name in sorted(vectors):
        vector, room = vectors[name], rooms[name]
        size = vector.element_size()
        for part in vector.split(PIECE // size):
            at = size * (part.storage_offset() - vector.storage_offset())
            raw = room[at : at + size * len(part)]
            check.update(raw)
            part.copy_(torch.frombuffer(raw, dtype=vector.dtype))
    return check.hexdigest()
