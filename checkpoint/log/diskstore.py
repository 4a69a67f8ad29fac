"""A log and snapshots in a folder of this island's own.

The guarantee: what was handed in before `then(act)` is on disk when `act` is called, unless the disk refuses, which is
reported at once. So a crash loses what was being written, and never what was announced to others. Nobody waits for the
disk: one thread writes all that has been handed in and syncs once for all of it, another one writes snapshots.

Records are durable when they are on disk together with a snapshot from which they can be replayed: the log's *anchor*.
After the disk has refused something, and after a move to another branch, there is none until the next snapshot.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.checkpoint.log.history import HistoryFile, Move, RoundHeader, end_of_history
from diloco.checkpoint.log.journal import NOTHING, Entry, Header, Journal, Kind, header_frame, record_frame
from diloco.checkpoint.log.library import StoredItem, payload_name
from diloco.checkpoint.log.segments import Ahead, SegmentWriter, cut, segment_paths
from diloco.checkpoint.log.snapshot import DAMAGED, SnapshotContents, clean, manifests, remove, write_snapshot
from diloco.checkpoint.log.store import PartialDownload, Store
from diloco.checkpoint.log.writing import WritePace, make_way
from diloco.comm.transport.frame import Buffer

KEEP = 2  # snapshots, and the log since the older one
SEGMENT_BYTES = 256 << 20
RETRY_S = 5.0  # after the disk has refused
CACHED = 16  # results whose digests are known: a peer asks for one chunk after the other

log = logging.getLogger(__name__)
Report = Callable[[str, str], None]  # what happened, in which words


@dataclass(frozen=True)
class Job:
    """Describe work for the writer thread: a frame, a head to move to, a call for when all before is durable."""

    kind: Kind | None = None
    head: bytes = b""
    body: Buffer = b""
    entry: Entry | None = None
    moves: tuple[str, int] | None = None
    rotate: bool = False
    act: Callable[[], None] | None = None
    headers: tuple[RoundHeader, ...] = ()
    branches: Move | None = None
    ahead: Ahead | None = None  # what of the body is written already


class DiskStore(Store):
    """Keep an island's log and snapshots in a folder, written by two threads. `durable` is the highest round that the
    folder gives back after a crash."""

    keeps = True

    def __init__(self, folder: Path, report: Report, *, keep: int = KEEP, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read the folder, cut off what a dying writer left torn, and report it; raise OSError where that fails."""
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        self.folder, self.report = folder, report
        self.download: PartialDownload = PartialDownload(folder / "download")
        self.journal = Journal.read(folder)
        for trouble in self.journal.troubles:
            if trouble.torn is not None:
                cut(trouble.path, trouble.torn)
            report("torn" if trouble.torn is not None else "damaged", str(trouble))
        self._history = HistoryFile(folder, self.journal.entries)
        self.durable = 0  # the highest round that this folder gives back after a crash
        self.failing = ""  # why nothing is durable at present
        self._keep, self._segment_bytes = keep, segment_bytes
        self._genesis, self._head = "", ("", 0)
        self._told = ""  # the last head that somebody who waits was told of
        self._anchored = False
        self._stretch: set[str] = set()  # without an anchor: heads from which on all records are here
        self._segment: SegmentWriter | None = None
        self._memory = self.journal.memory
        self._retry_at = 0.0
        self._changed = threading.Condition()
        self._items: dict[str, StoredItem] = {}
        self._jobs: list[Job] = []
        self._contents: SnapshotContents | None = None
        self._pace = WritePace()
        self._busy = self._writing_snapshot = self._closing = self._dead = False
        self._threads: list[threading.Thread] = []

    def begin(self, genesis: str, version: str, round: int, *, known: bool) -> None:
        """Start the writer threads, from this head on. `known`: what the folder holds leads to this head."""
        self._genesis, self._head, self._anchored = genesis, (version, round), known
        self.durable = round if known else 0
        try:
            self._open_segment()
        except OSError as error:
            self._fail(error)
        for name, work in (("store", self._write_all), ("snapshot", self._write_snapshots)):
            thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def readable(self) -> Path:
        return self.folder

    # what is handed in

    def put(self, payload: str, data: Buffer, ahead: Ahead | None = None) -> None:
        self._hand_in(Job(Kind.PAYLOAD, payload.encode(), data, ahead=ahead))

    def write_ahead(self, ahead: Ahead, offset: int, part: Buffer) -> None:
        if (segment := self._segment) is not None:
            with suppress(OSError):  # it comes up again when the frame is written, with this part and all after it
                segment.write_ahead(ahead, offset, part, len(NOTHING))

    def remember(self, memory: bytes) -> None:
        self._hand_in(Job(Kind.MEMORY, memory))

    def append(self, entry: Entry, *, rotate: bool = False) -> None:
        moves = entry.digest, entry.round
        self._hand_in(Job(Kind.RECORD, record_frame(entry), entry.header, entry, moves, rotate))

    def mend(self, entry: Entry) -> None:
        self._hand_in(Job(Kind.RECORD, record_frame(entry), entry.header, entry))

    def lacks_header(self, record: str) -> bool:
        return self._history.lacks(record)

    def keep_headers(self, headers: Sequence[RoundHeader]) -> None:
        self._hand_in(Job(headers=tuple(headers)))

    def given_history(self) -> bytes | None:
        return end_of_history(self.folder)

    def follow(self, version: str, round: int) -> None:
        self._hand_in(Job(branches=Move(version, round)))
        self._hand_in(Job(moves=(version, round), rotate=True))

    def record_digest(self, version: str, digest: str) -> None:
        self._hand_in(Job(Kind.STATE, f"{version} {digest}".encode()))

    def await_durable(self, version: str) -> None:
        with self._changed:
            no_wait = self._dead or version == self._told
        if no_wait:  # the writer was quicker than whoever asks
            self.on_durable(version)

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` on the writer thread when all before is on disk, or at once where nothing is left to write."""
        with self._changed:
            waits = bool(self._jobs or self._busy) and not self._dead
            if waits:
                self._jobs.append(Job(act=act))
        if not waits:
            act()

    def snapshot(self, contents: SnapshotContents) -> None:
        """Write a snapshot on a thread of its own; one that comes meanwhile replaces the one that waits."""
        with self._changed:
            waiting, self._contents = self._contents, contents
            self._changed.notify_all()
        if waiting is not None:
            waiting.release()

    @property
    def writing_snapshot(self) -> bool:
        """Tell whether a snapshot is being written or waits to be."""
        with self._changed:
            return self._contents is not None or self._writing_snapshot

    @property
    def wants_snapshot(self) -> bool:
        """Tell whether the log needs an anchor: none is on its way, and the disk has not just refused something."""
        with self._changed:
            possible = self._segment is not None and time.monotonic() > self._retry_at
            return possible and not self._anchored and not self.writing_snapshot

    def _hand_in(self, job: Job) -> None:
        with self._changed:
            if not self._dead:
                self._jobs.append(job)
                self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a thread's work; if it dies, that is reported, and nobody waits for it."""
        try:
            work()
        except Exception as error:
            log.exception("the store failed")
            self._say_failing(f"its writer failed ({error!r})")
            with self._changed:
                self._dead, jobs, self._jobs = True, self._jobs, []
            for job in jobs:
                if job.act is not None:
                    job.act()

    # what is asked for

    def entries(self) -> list[Entry]:
        with self._changed:
            return self.journal.leading_to(self._head[0])

    def has(self, payload: str) -> bool:
        with self._changed:
            return self.journal.has(payload)

    def knows(self, record: str) -> bool:
        with self._changed:
            entry = self.journal.entries.get(record)
            return entry is not None and self.journal.has(entry.payload)

    def item(self, payload: str) -> StoredItem | None:
        """Return a result, to be read from its file; None where it is missing, or damaged, which is reported."""
        with self._changed:
            item, place = self._items.get(payload), self.journal.payloads.get(payload)
        if item is not None or place is None:
            return item
        try:
            item = StoredItem(payload_name(payload), place)
        except OSError:
            item = None
        if item is None or item.sha256 != payload:
            with self._changed:
                self.journal.payloads.pop(payload, None)
            if place.path.exists():
                self.report("damaged", f"{place.path.name}: the bytes of result {payload[:12]} are damaged")
            return None
        with self._changed:
            self._items[payload] = item
            for oldest in list(self._items)[:-CACHED]:
                del self._items[oldest]
        return item

    def broken_after(self) -> str | None:
        versions = [manifest.version for manifest, _ in manifests(self.folder)]
        with self._changed:
            return self.journal.broken_after(versions, self._head[0])

    def close(self) -> None:
        """Write what was handed in, and a snapshot that has been begun or waits, then end the threads."""
        self._pace.hurry()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # the log

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.wait_for(lambda: self._jobs or self._closing)
                jobs, self._jobs = self._jobs, []
                self._busy = bool(jobs)
            if not jobs:
                break
            self._carry_out(jobs)
        if self._segment is not None:
            with suppress(OSError):  # all of it is synced
                self._segment.close()

    def _carry_out(self, jobs: list[Job]) -> None:
        """Write all these jobs with one sync, then make the calls that waited for it."""
        try:
            if self._segment is None and time.monotonic() > self._retry_at:
                self._lose_anchor()
                self._open_segment()
            for job in jobs:
                self._write(job)
            if self._segment is not None:
                self._segment.sync()
                self._note_durable()
        except OSError as error:
            self._fail(error)
            for job in jobs:
                self._keep_in_mind(job)
        if self._segment is None:  # it has been reported: nobody waits for a disk that refuses
            self._tell_durable(self._head[0])
        for job in jobs:
            if job.act is not None:
                job.act()

    def _write(self, job: Job) -> None:
        if job.branches is not None:
            self._history.move(job.branches)
        if job.headers:
            self._history.append(job.headers)
        if job.branches is not None or job.headers:
            return
        if self._segment is None:
            self._keep_in_mind(job)
            return
        if job.moves is not None and job.entry is None:  # the anchor will be lost: what came before still has it
            self._segment.sync()
            self._note_durable()
        place = None if job.kind is None else self._segment.write(job.kind, job.head, job.body, job.ahead)
        with self._changed:  # a head and its record at once: whoever asks between them would find the record missing
            self._keep_in_mind(job)
            if job.entry is not None:
                self.journal.add(job.entry)
            elif job.kind is not None and place is not None:
                self.journal.take(job.kind, job.head, place)
        # never between a result and its record: they are pruned together
        if job.rotate or (job.entry is not None and self._segment.size > self._segment_bytes):
            self._segment.close()
            self._open_segment()

    def _keep_in_mind(self, job: Job) -> None:
        if job.kind is Kind.MEMORY:
            self._memory = job.head
        if job.moves is not None:
            with self._changed:
                self._head = job.moves
                if job.entry is None:
                    self._lose_anchor()
                self._stretch.add(self._head[0])

    def _open_segment(self) -> None:
        self._segment = SegmentWriter(self.folder)
        header = header_frame(Header(self._genesis, *self._head))
        place = self._segment.write(Kind.HEADER, header)
        if self._memory is not None:
            self._segment.write(Kind.MEMORY, self._memory)
        self._segment.sync()
        with self._changed:
            self.journal.take(Kind.HEADER, header, place)
            self._stretch.add(self._head[0])

    def _lose_anchor(self) -> None:
        with self._changed:
            self._anchored = False
            self._stretch.clear()

    def _note_durable(self) -> None:
        with self._changed:
            if not self._anchored:
                return
            self._stretch.clear()
            version, self.durable = self._head
        self._tell_durable(version)
        if self.failing:
            self.failing = ""
            self.report("durable again", f"round {self.durable} is safe in {self.folder}")

    def _tell_durable(self, version: str) -> None:
        with self._changed:
            self._told = version
        self.on_durable(version)

    def _fail(self, error: OSError) -> None:
        if self._segment is not None:
            self._segment.abandon()
        self._segment, self._retry_at = None, time.monotonic() + RETRY_S
        self._lose_anchor()
        self._say_failing(f"{error.filename or self.folder} cannot be written ({error.strerror})")

    def _say_failing(self, reason: str) -> None:
        log.warning("%s: %s", self.folder, reason)
        if not self.failing:
            self.failing = reason
            lost = f"training goes on, but a crash now would lose what this island did after round {self.durable}"
            self.report("not durable", f"{reason}: {lost}")

    # snapshots

    def _write_snapshots(self) -> None:
        make_way()
        while True:
            with self._changed:
                self._writing_snapshot = False
                self._changed.wait_for(lambda: self._contents is not None or self._closing)
                contents, self._contents = self._contents, None
                self._writing_snapshot = contents is not None
            if contents is None:
                return
            try:
                self._write_snapshot(contents)
            finally:
                contents.release()

    def _rest(self) -> None:
        """Rest between pieces, but not while the log has no anchor: nothing is durable until there is one."""
        if self._anchored:
            self._pace.rest()
        else:
            self._pace.begin()

    def _write_snapshot(self, contents: SnapshotContents) -> None:
        self._pace.begin()
        try:
            write_snapshot(self.folder, contents, rest=self._rest)
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_S
            text = f"the snapshot of round {contents.round} could not be written ({error.strerror})"
            if self._anchored:
                self.report("snapshot failed", f"{text}: the log keeps everything since the one before")
            else:
                self._say_failing(text)
                self._tell_durable(self._head[0])
            return
        with self._changed:
            self._anchored = self._anchored or contents.version in self._stretch
        self._hand_in(Job())  # what was written since is durable from now on
        try:
            self._prune()
        except OSError as error:
            log.warning("%s: old snapshots and segments stay: %s", self.folder, error)

    def _prune(self) -> None:
        """Keep the last snapshots and the log since the oldest of them. Snapshots that cannot be read do not count."""
        found = manifests(self.folder)
        if not self._keep or len(found) < self._keep:  # 0 keeps everything
            return
        self._history.sync()  # before what it could be written from again is gone
        for path in [*(path for _, path in found[: -self._keep]), *self.folder.glob(f"snapshot-*{DAMAGED}")]:
            remove(path)
        oldest = found[-self._keep][0].version
        with self._changed:
            paths, headers = segment_paths(self.folder), self.journal.headers
            follows = [path in headers and headers[path].base == oldest for path in paths]
            for path in paths[: follows.index(True)] if any(follows) else []:
                path.unlink()
                self.journal.forget(path)
            for payload in [payload for payload in self._items if not self.journal.has(payload)]:
                del self._items[payload]
