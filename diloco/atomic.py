"""Write files and folders so that they appear whole or not at all: under another name first, then renamed.

`durable` puts the content and the new name on the disk before the call returns; without it a crash of the machine (not
of the process) may lose the newest write. Of a folder it covers the names only, so its writer syncs the files in it.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

PART, ASIDE = ".part", ".aside"


def write_file(path: Path, data: bytes | str, *, mode: int | None = None, durable: bool = False) -> None:
    """Replace the file, or make it: at no time has it half of the content, or another mode than this."""
    with appearing(path, durable=durable) as draft:
        if mode is not None:
            draft.touch(mode)
            draft.chmod(mode)  # whatever the umask takes away
        draft.write_bytes(data.encode() if isinstance(data, str) else data)


def create_file(path: Path, data: bytes, *, mode: int | None = None, durable: bool = False) -> bool:
    """Make a new file; return False where there is one already, which stays as it is.

    `durable` covers its content here, but not its name.
    """
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever the umask takes away
            file.write(data)
        if durable:
            sync_path(draft)
        os.link(draft, path)  # unlike a rename it replaces nothing
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


@contextmanager
def appearing(path: Path, draft: Path | None = None, *, durable: bool = False) -> Iterator[Path]:
    """Yield where to write a file or make a folder that becomes `path` at the end; after an error nothing is left."""
    draft = draft or path.with_name(f".{path.name}{PART}")
    _remove(draft)  # of a writer that died
    try:
        yield draft
        publish(draft, path, durable=durable)
    finally:
        with suppress(OSError):
            _remove(draft)


def publish(draft: Path, path: Path, *, durable: bool = False) -> None:
    """Rename a draft to `path`, in place of what was there.

    A process that dies while it replaces a folder leaves the earlier one as `.aside`.
    """
    if durable:
        sync_path(draft)
    aside = draft.with_suffix(ASIDE)
    if path.is_dir() and any(path.iterdir()):
        _remove(aside)
        path.rename(aside)
    try:
        draft.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    if durable:
        sync_path(path.parent)
    _remove(aside)


def sync_path(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
