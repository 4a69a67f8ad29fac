"""A download of vectors that has begun, in a folder: it goes on where it stopped, after a restart too.

Nothing here is believed when it is read again: chunks count that fit their digests, so a file that is torn or stale
only costs the chunks concerned.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.checkpoint.log.library import Parcel

log = logging.getLogger(__name__)


class Begun:
    """`about` says which download it is. A disk that refuses is no reason to fetch nothing: then nothing is kept."""

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

    def load(self, name: str, parcel: Parcel, room: memoryview) -> set[int]:
        """Into the room; the chunks that are there."""
        have: set[int] = set()
        with suppress(OSError), self._path(name).open("rb") as file:
            for number, digest in enumerate(parcel.digests):
                part = room[parcel.chunk(number)]
                file.seek(parcel.chunk(number).start)
                if file.readinto(part) == len(part) and hashlib.sha256(part).digest() == digest:
                    have.add(number)
        return have

    def keeping(self, name: str, parcel: Parcel, room: memoryview, have: set[int]) -> Callable[[], None]:
        """To be called now and then: writes what has come since."""
        kept = set(have)

        def keep() -> None:
            new = sorted(have.copy() - kept)
            if self._failed or not new:
                return
            with self._unless_refused(), open(self._path(name), "r+b" if self._path(name).exists() else "wb") as file:
                for number in new:
                    os.pwrite(file.fileno(), room[parcel.chunk(number)], parcel.chunk(number).start)
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
