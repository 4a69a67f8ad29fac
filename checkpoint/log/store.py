"""Where an island keeps its log, its snapshots and a download that is not complete. `Store` keeps nothing;
`diskstore.py` has the one that does."""

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.checkpoint.log.history import RoundHeader
from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.log.library import Item, ItemManifest
from diloco.checkpoint.log.room import FileRoom, Room, bytes_of
from diloco.checkpoint.log.segments import Ahead
from diloco.checkpoint.log.snapshot import SnapshotContents
from diloco.comm.codec.rooms import mapped
from diloco.comm.transport.frame import Buffer

log = logging.getLogger(__name__)


class PartialDownload:
    """Keep the chunks of a download of vectors in a folder, so that it resumes where it stopped, after a restart too.

    Nothing here is trusted when it is read again: only chunks that fit their digests count, so a file that is torn or
    stale costs no more than the chunks concerned. `about` says which download it is. A disk that refuses is no reason
    to fetch nothing: then it goes to memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._refused = folder, False
        self.bytes_come = 0  # while this process has run

    @property
    def about(self) -> bytes | None:
        """Return what `start` was given; None where there is no download, or its description is damaged."""
        with suppress(OSError):
            raw = (self._folder / "about").read_bytes()
            digest, about = raw[:32], raw[32:]
            if hashlib.sha256(about).digest() == digest:
                return about
        return None

    def start(self, about: bytes) -> None:
        """Begin a download, in place of an earlier one, and write down what it is about."""
        self.end()
        try:
            self._folder.mkdir(parents=True)
            (self._folder / "about").write_bytes(hashlib.sha256(about).digest() + about)
            self._refused = False
        except OSError as error:
            self._refused = True
            log.warning("%s: a download that breaks now begins anew: %s", self._folder, error)

    def room(self, name: str, manifest: ItemManifest) -> tuple[Room, set[int]]:
        """Return where an item goes, and the numbers of the chunks that are there and fit their digests."""
        if self._refused:  # what lies there may still be read as another state's
            return bytes_of(mapped(manifest.size)), set()
        path = self._folder / f"{name}.part"
        there = path.exists()
        room = FileRoom(path, manifest.size)
        have: set[int] = set()
        for number, digest in enumerate(manifest.digests if there else ()):
            with suppress(OSError):  # nothing was written so far back
                if hashlib.sha256(room[manifest.chunk(number)]).digest() == digest:
                    have.add(number)
        return room, have

    def end(self) -> None:
        """Remove the folder with everything that was kept."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Store:
    """Accept everything and keep none of it: nothing is durable, and nothing waits. `DiskStore` overrides it."""

    keeps = False  # snapshots
    download: PartialDownload | None = None  # a download of a whole state
    on_durable: Callable[[str], None] = staticmethod(lambda version: None)  # called with each head that becomes durable

    @property
    def wants_snapshot(self) -> bool:
        """Tell whether a snapshot is needed: without one, what is written now could not be replayed."""
        return False

    @property
    def readable(self) -> Path | None:
        """Return the folder from which everything that is durable can be read again; None: nothing is kept."""
        return None

    def put(self, payload: str, data: Buffer, ahead: Ahead | None = None) -> None:
        """Store the bytes of a result by their digest; nobody changes them any more."""

    def write_ahead(self, ahead: Ahead, offset: int, part: Buffer) -> None:
        """Write a part of a result that is not complete, so that `put` has less to do. Any thread may."""

    def remember(self, memory: bytes) -> None:
        """Store what a restart must not forget, such as promises, in place of what was remembered before."""

    def append(self, entry: Entry, *, rotate: bool = False) -> None:
        """Store a committed record, after the bytes of its result. `rotate`: a snapshot of it will follow."""

    def lacks_header(self, record: str) -> bool:
        """Tell whether the history is to have the header of a record, by its digest, and does not yet."""
        return False

    def keep_headers(self, headers: Sequence[RoundHeader]) -> None:
        """Add the headers of committed records to the history, which stay when the records are pruned."""

    def given_history(self) -> bytes | None:
        """Return the headers that are given to whoever joins; None where none are kept."""
        return None

    def mend(self, entry: Entry) -> None:
        """Write an old record that is damaged here a second time, after the bytes of its result."""

    def follow(self, version: str, round: int) -> None:
        """Continue the log after another head than that of its last record: a whole state was taken over."""

    def record_digest(self, version: str, digest: str) -> None:
        """Store the digest of all vectors at this head, which a later replay is compared with."""

    def await_durable(self, version: str) -> None:
        """Have `on_durable` called when the folder gives back this head after a crash, or never will."""
        self.on_durable(version)

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` when all before is durable, in order, on any thread; never wait for what cannot become so."""
        act()

    def snapshot(self, contents: SnapshotContents) -> None:
        """Write a snapshot in the background."""

    def entries(self) -> list[Entry]:
        """List all records that lead to the head, oldest first, as far back as the chain has no gap."""
        return []

    def has(self, payload: str) -> bool:
        """Tell whether the bytes of a result are stored, by their digest."""
        return False

    def knows(self, record: str) -> bool:
        """Tell whether a record is stored together with the bytes of its result, by its digest."""
        return False

    def item(self, payload: str) -> Item | None:
        """Return the bytes of a result as an item for peers, by their digest; None where they are not stored."""
        return None

    def broken_after(self) -> str | None:
        """Return the head after which a stored record or its result is missing; None where the log is whole."""
        return None

    def close(self) -> None:
        pass
