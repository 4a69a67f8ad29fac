"""Exact reads out of many files, of which only a few are open at a time.

Reads go through `pread`, not `mmap`: a file that is cut short, or a disk that goes away, is then an error with the
file's name in it. Under `mmap` it is a SIGBUS that kills the island without a word.
"""

import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.errors import DataError

KEPT_OPEN = 32
CHUNK = 4 * 2**20


class Files:
    """Files at their length of now. A later read of one that has another length is refused."""

    def __init__(self, paths: Sequence[Path], *, kept_open: int = KEPT_OPEN) -> None:
        self.paths = list(paths)
        self.sizes = [_size(path) for path in self.paths]
        self._kept_open = kept_open
        self._open: OrderedDict[int, int] = OrderedDict()  # file index -> descriptor, least recently used first
        self._lock = threading.Lock()  # eviction must not close what another thread is reading
        weakref.finalize(self, _close_all, self._open)

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of one file."""
        with self._lock:
            try:
                return self._read(index, start, stop)
            except OSError as error:
                raise DataError(f"cannot read {self.paths[index]}: {error.strerror}") from error

    def chunks(self, index: int, start: int = 0) -> Iterator[bytes]:
        """One file from `start` to its end, in pieces that fit in memory."""
        for position in range(start, self.sizes[index], CHUNK):
            yield self.read(index, position, min(position + CHUNK, self.sizes[index]))

    def close(self) -> None:
        with self._lock:
            _close_all(self._open)

    def _read(self, index: int, start: int, stop: int) -> bytes:
        descriptor = self._descriptor(index)
        self._check_length(index, os.fstat(descriptor).st_size)
        parts: list[bytes] = []
        while start < stop:
            part = os.pread(descriptor, stop - start, start)  # one call may return less than asked
            if not part:
                self._check_length(index, start)
                raise DataError(f"{self.paths[index]} ends before byte {stop}: restore it and start again")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def _descriptor(self, index: int) -> int:
        if index not in self._open:
            while len(self._open) >= self._kept_open:
                os.close(self._open.popitem(last=False)[1])
            self._open[index] = os.open(self.paths[index], os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(index)
        return self._open[index]

    def _check_length(self, index: int, size: int) -> None:
        if size != self.sizes[index]:
            raise DataError(
                f"{self.paths[index]} changed from {self.sizes[index]} to {size} bytes while in use: "
                "restore it, or start again with the new file"
            )


def content_digest(paths: Sequence[Path]) -> str:
    """SHA-256 over the files' lengths and bytes, in order; their names and places do not matter."""
    files = Files(paths)
    digest = hashlib.sha256()
    for index, size in enumerate(files.sizes):
        digest.update(size.to_bytes(8, "little"))
        for chunk in files.chunks(index):
            digest.update(chunk)
    files.close()
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file")
    return status.st_size


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
