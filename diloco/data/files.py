"""Files: which ones a person means by a path, in which order, and exact reads out of them, a few open at a time.

Files of a folder come in an order that is fixed yet mixed, so that "the last 5 %" is a fair sample of the whole.

Reads go through `pread`, not `mmap`: a file that is cut short, or a disk that goes away, is then an error with the
file's name in it. Under `mmap` it is a SIGBUS that kills the island without a word.
"""

import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from diloco.errors import DataError

KEPT_OPEN = 32
CHUNK = 4 * 2**20
# Prose, markup and program text. Records (.jsonl, .csv, .parquet) hold text in a field: source `hf` reads those.
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".cs",
    ".js", ".jsx", ".ts", ".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".hs", ".ml", ".clj", ".lisp",
    ".sh", ".sql", ".toml", ".yaml", ".yml",
})  # fmt: skip


def text_files(paths: Sequence[Path]) -> list[Path]:
    """List files as named, whatever their suffix; of folders every file below that has one of TEXT_SUFFIXES.

    Hidden files and folders (.git) are left out. A file reached twice counts once: it must not be in training and in
    validation.
    """
    unique: dict[str, Path] = {}
    for path in paths:
        for file in _text_files_of(path.expanduser()):
            unique.setdefault(os.path.realpath(file), file)
    return list(unique.values())


def _text_files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    files = files_below(path, keep_folder=_is_visible, keep_file=_is_text)
    if not files:
        raise DataError(
            f"no text files below {path}: of a folder, suffixes such as .txt, .md and .py are read; "
            "name other files one by one, or set data.source=hf for .jsonl, .csv and .parquet"
        )
    return files


def files_below(folder: Path, *, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool]) -> list[Path]:
    """List the files below a folder in an order that is fixed yet mixed: by the hash of their relative path."""
    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = filter(keep_folder, folders)
        found += [Path(parent, file) for file in filter(keep_file, files)]
    return sorted(found, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(folder).as_posix())).digest())


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _is_text(name: str) -> bool:
    return _is_visible(name) and os.path.splitext(name)[1].lower() in TEXT_SUFFIXES


def _refuse(error: OSError) -> NoReturn:
    # os.walk would pass over a folder that it may not open: two islands would then train on different data.
    raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


@contextmanager
def refusing(deed: str, path: Path, after: str = "") -> Iterator[None]:
    """Turn an error of the operating system into one that names the file; `after` says how things are then."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot {deed} {path}: {error.strerror}{after}") from error


class Files:
    """Read parts of files, at the length that they have now. A later read of one that has another length is refused."""

    def __init__(self, paths: Sequence[Path], *, kept_open: int = KEPT_OPEN) -> None:
        self.paths = list(paths)
        self.sizes = [_size(path) for path in self.paths]
        self._kept_open = kept_open
        self._open: OrderedDict[int, int] = OrderedDict()  # file index -> descriptor, least recently used first
        self._lock = threading.Lock()  # eviction must not close what another thread is reading
        weakref.finalize(self, _close_all, self._open)

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of one file."""
        with self._lock, refusing("read", self.paths[index]):
            return self._read(index, start, stop)

    def chunks(self, index: int, start: int = 0) -> Iterator[bytes]:
        """Yield one file from `start` to its end, in pieces that fit in memory."""
        for position in range(start, self.sizes[index], CHUNK):
            yield self.read(index, position, min(position + CHUNK, self.sizes[index]))

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
    """Return the SHA-256 over the files' lengths and bytes, in order; their names and places do not matter."""
    files = Files(paths)
    digest = hashlib.sha256()
    for index, size in enumerate(files.sizes):
        digest.update(size.to_bytes(8, "little"))
        for chunk in files.chunks(index):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    with refusing("read", path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file")
    return status.st_size


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
