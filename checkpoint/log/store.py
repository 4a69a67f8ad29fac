"""Where an island keeps its log and its snapshots, and a download that has begun. `Store` keeps nothing; `diskstore.py`
has the one that does."""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.log.library import Item, ItemManifest
from diloco.checkpoint.log.snapshot import SnapshotContents
from diloco.comm.transport.frame import Buffer

log = logging.getLogger(__name__)


class PartialDownload:
    """A download of vectors that has begun, in a folder: it goes on where it stopped, after a restart too.

    Nothing here is believed when it is read again: chunks count that fit their digests, so a file that is torn or stale
    only costs the chunks concerned. `about` says which download it is. A disk that refuses is no reason to fetch
    nothing: then nothing is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._failed = folder, False

    @property
    def about(self) -> bytes | None:
        with suppress(OSError):
            raw = (self._folder / "about").read_bytes()
            digest, about = raw[:32], raw[32:]
            if hashlib.sha256(about).digest() == digest:
                return about
        return None

    def start(self, about: bytes) -> None:
        """In place of whatever was begun before."""
        self.end()
        with self._unless_refused():
            self._folder.mkdir(parents=True)
            (self._folder / "about").write_bytes(hashlib.sha256(about).digest() + about)

    def load(self, name: str, manifest: ItemManifest, room: memoryview) -> set[int]:
        """Into the room; the chunks that are there."""
        have: set[int] = set()
        with suppress(OSError), self._path(name).open("rb") as file:
            for number, digest in enumerate(manifest.digests):
                part = room[manifest.chunk(number)]
                file.seek(manifest.chunk(number).start)
                if file.readinto(part) == len(part) and hashlib.sha256(part).digest() == digest:
                    have.add(number)
        return have

    def keeping(self, name: str, manifest: ItemManifest, room: memoryview, have: set[int]) -> Callable[[], None]:
        """To be called now and then: writes what has come since."""
        kept = set(have)

        def keep() -> None:
            new = sorted(have.copy() - kept)
            if self._failed or not new:
                return
            with self._unless_refused(), open(self._path(name), "r+b" if self._path(name).exists() else "wb") as file:
                for number in new:
                    os.pwrite(file.fileno(), room[manifest.chunk(number)], manifest.chunk(number).start)
            kept.update(new)

        return keep

    def end(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.part"

    @contextmanager
    def _unless_refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            log.warning("%s: a download that breaks now begins anew: %s", self._folder, error)


class Store:
    """In memory: nothing is durable, and nothing waits."""

    keeps = False  # snapshots
    download: PartialDownload | None = None  # a download of a whole state

    @property
    def wants_snapshot(self) -> bool:
        """Without one, what is written now could not be replayed."""
        return False

    def put(self, payload: str, data: Buffer) -> None:
        """The bytes of a result, by their digest. Nobody changes them any more."""

    def remember(self, memory: bytes) -> None:
        """In place of what was remembered before."""

    def append(self, entry: Entry, *, rotate: bool = False) -> None:
        """A committed record, after the bytes of its result. `rotate`: a snapshot of it will follow."""

    def mend(self, entry: Entry) -> None:
        """A record of long ago that is damaged here, after the bytes of its result."""

    def follow(self, version: str, round: int) -> None:
        """The log goes on after another head than that of its last record."""

    def record_digest(self, version: str, digest: str) -> None:
        """The digest of all vectors at this head."""

    def then(self, act: Callable[[], None]) -> None:
        """When all before is durable; in any thread, in order. What cannot be made durable is not waited for."""
        act()

    def snapshot(self, contents: SnapshotContents) -> None:
        """In the background."""

    def entries(self) -> list[Entry]:
        """All records that lead to the head, as far back as there is one after the other."""
        return []

    def has(self, payload: str) -> bool:
        return False

    def knows(self, record: str) -> bool:
        """A record by its digest, with the bytes of its result."""
        return False

    def item(self, payload: str) -> Item | None:
        return None

    def broken_after(self) -> str | None:
        """The head after which a record that was here is missing, or its bytes are."""
        return None

    def close(self) -> None:
        pass
