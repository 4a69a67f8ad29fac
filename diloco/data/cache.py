"""Token files made on demand, once: by one process while the others wait for it, found by all later."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.data.tokens import TokenFile
from diloco.errors import DataError


def cached(cache_dir: Path, key: str, build: Callable[[Path], object]) -> TokenFile:
    """The token file for `key`, which names everything that its content follows from."""
    path = cache_dir.expanduser() / f"{key[:40]}.tokens"
    if not path.exists():
        # The islands of one machine start together; without the lock each would tokenise the same text.
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _remove_partials(path)
                build(path)
    return TokenFile(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "ab")  # noqa: SIM115 (closed below, which also unlocks)
    except OSError as error:
        raise DataError(f"cannot write to the cache folder {path.parent}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            message = f"cannot lock files in {path.parent} ({error.strerror}): use a cache folder on a local disk"
            raise DataError(message) from error
        yield


def _remove_partials(path: Path) -> None:
    """What writers that were killed left behind; the lock says that none is at work."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        partial.unlink(missing_ok=True)
