"""Copies an island's snapshots and its log to a remote store, in the background, and back onto an empty disk.

Snapshots are the same bytes on every island, so all islands share them and whoever is first uploads one; a manifest
comes after its shards, so a snapshot that has one is whole. Each island's log lies in a folder of its own
(`URL/ISLAND/log-….seg`). Only segments that are closed are copied: what a remote store lacks is the log since the last
one. A history is copied with them in pieces, of which only the last one is copied again. The run's genesis
(`genesis.json`) lies beside them; keys never leave their machine.

Whoever can write to a store may not write to our disk: what is restored keeps inside its folder, so names there are
refused unless they are as plain as those that we give.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeVar

from diloco.atomic import appearing
from diloco.checkpoint.log.history import HISTORY
from diloco.checkpoint.log.journal import Header, Journal, Kind, header_frame, record_frame
from diloco.checkpoint.log.segments import SegmentWriter, segment_paths
from diloco.checkpoint.log.snapshot import MAX_MANIFEST, Manifest, part_of, read_manifest, read_vectors, snapshots
from diloco.errors import RemoteError, SnapshotDamaged, first_line

EVERY_S = 10.0
MANIFEST = "manifest.json"
GENESIS = "genesis.json"
TRIES = 5
FIRST_WAIT_S = 0.5  # doubled each time
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # each part of a name: neither hidden nor `..`
OF_SNAPSHOT = re.compile(rf"snapshot-[0-9]+-[0-9a-z]+/{re.escape(MANIFEST)}")
OF_LOG = re.compile(r"[^/]+/log-[0-9]+\.seg")
OF_HISTORY = re.compile(rf"([^/]+)/{re.escape(HISTORY)}(?:\.([0-9]{{1,9}}))?")
HISTORY_PIECE = 4 << 20  # of a history, in bytes: the first one is called as the file, the others have a number
OF_SHARD = re.compile(r"[A-Za-z0-9_]+-[0-9]+\.safetensors")
HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "NoSuchBucket", "InvalidAccessKeyId", "AccessDenied")

Report = Callable[[str, str], None]
Result = TypeVar("Result")


class Remote:
    """Read and write a folder at an fsspec URL: `s3://bucket/runs/mine`, `gs://…`, `file:///mnt/shared`, `memory://…`.

    Objects appear whole or not at all where the service guarantees it (S3, GCS). All that is read back has its own
    digests.
    """

    def __init__(
        self, url: str, *, tries: int = TRIES, wait: Callable[[float], object] = time.sleep, **options: Any
    ) -> None:
        """`wait` is called between two tries, with the seconds to wait; `options` go to the file system."""
        try:
            from fsspec.core import url_to_fs

            own_folders = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}  # others have none
            self._files, self._root = url_to_fs(url, **own_folders, **options)
        except ImportError as missing:
            extra = " (pip install 'diloco[s3]')" if url.startswith("s3:") else ""
            raise RemoteError(
                f"checkpoint.remote={url} needs a package that is not installed: {missing}{extra}"
            ) from None
        except ValueError as error:
            raise RemoteError(f"checkpoint.remote={url} is no address that fsspec knows: {error}") from None
        self.url = url.rstrip("/")
        self._tries, self._wait = tries, wait

    def check(self) -> None:
        """Ensure that the store can be written to and read: better now than after a day."""
        self._do("be written to", lambda: self._files.pipe_file(f"{self._root}/.check", b"diloco"))
        self.sizes()

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object, by name."""
        return {name: int(about["size"]) for name, about in self._do("be read", self._list).items()}

    def plain_sizes(self) -> dict[str, int]:
        """Return what `sizes` returns, for whoever writes files of these names; raise RemoteError if any name is one
        that no island has given, or if it is that of a link."""
        listed = self._do("be read", self._list)
        for name, about in listed.items():
            if about.get("islink") or not all(map(PLAIN.fullmatch, name.split("/"))):
                what = "a link" if about.get("islink") else "not a name that an island gives"
                raise RemoteError(f"{self.url} holds {name!r}, which is {what}: nothing was restored; remove it there")
        return {name: int(about["size"]) for name, about in listed.items()}

    def _list(self) -> dict[str, dict[str, Any]]:
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            bucket = self._root.split("/")[0]
            if bucket and not self._files.exists(bucket):
                raise
            return {}
        cut = len(self._root.rstrip("/")) + 1
        return {path[cut:]: about for path, about in found.items() if not path.endswith("/.check")}

    def push(self, local: Path, name: str) -> None:
        """Upload a file as this object, in several tries; raise RemoteError when they have all failed."""
        self._do(f"take {name}", lambda: self._files.put_file(str(local), f"{self._root}/{name}"))

    def push_bytes(self, data: bytes, name: str) -> None:
        """Upload these bytes as this object, as `push` does a file."""
        self._do(f"take {name}", lambda: self._files.pipe_file(f"{self._root}/{name}", data))

    def pull(self, name: str, local: Path) -> None:
        """Download an object to a file that appears at once."""
        with appearing(local) as part:
            self._do(f"give {name}", lambda: self._files.get_file(f"{self._root}/{name}", str(part)))

    def remove(self, name: str) -> None:
        """Delete an object; it is no error if it does not exist."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}")

        self._do(f"delete {name}", delete)

    def _do(self, what: str, act: Callable[[], Result]) -> Result:
        """Try something several times, and turn any service's exception into a RemoteError with it as the reason."""
        for tried in range(1, self._tries + 1):
            try:
                return act()
            except Exception as error:
                if _hopeless(error) or tried == self._tries:
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    advice = "create the bucket, or mend the address or the credentials"
                    raise RemoteError(f"{self.url} cannot {what} ({reason}): {advice}") from error
                self._wait(FIRST_WAIT_S * 2 ** (tried - 1))
        raise AssertionError("unreachable")


def _hopeless(error: Exception) -> bool:
    """Tell whether trying again would not help."""
    words = f"{type(error).__name__} {error}"
    return isinstance(error, PermissionError | FileNotFoundError) or any(sign in words for sign in HOPELESS)


class Mirror:
    """Copy a folder to a remote store every few seconds, on a thread; `island` names the folder of its log there."""

    def __init__(self, folder: Path, remote: Remote, island: str, report: Report, *, every_s: float = EVERY_S) -> None:
        self._folder, self._remote, self._island, self._report, self._every_s = folder, remote, island, report, every_s
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._try(finished=False)

    def _try(self, *, finished: bool) -> None:
        """Copy once; a store that fails is reported once, for training does not need it."""
        try:
            self.copy(finished=finished)
        except RemoteError as error:
            if finished:
                self._report("remote failing", f"{error}; the last of this island's log is not there")
            elif not self._failing:
                self._report("remote failing", f"{error}; trying again")
            self._failing = True
            return
        if self._failing:
            self._failing = False
            self._report("remote again", f"{self._remote.url} has everything again")

    def copy(self, *, finished: bool) -> None:
        """Upload what the store lacks, then remove what it need not keep. `finished`: nobody writes here any more, so
        the last segment is copied, too."""
        there = self._remote.sizes()
        here = snapshots(self._folder)
        if (self._folder / GENESIS).exists():
            self._push(self._folder / GENESIS, GENESIS, there)
        for snapshot in here:
            self._push_snapshot(snapshot, there)
        segments = segment_paths(self._folder)
        closed = segments if finished else segments[:-1]
        for path in closed:
            self._push(path, f"{self._island}/{path.name}", there)
        if finished or any(f"{self._island}/{path.name}" not in there for path in closed):
            self._push_history(there)
        self._prune(there, {path.name for path in here}, {path.name for path in segments})

    def _push_snapshot(self, snapshot: Path, there: dict[str, int]) -> None:
        if f"{snapshot.name}/{MANIFEST}" in there:
            return
        try:
            shards = read_manifest(snapshot).shards
        except SnapshotDamaged:
            if snapshot.exists():
                raise RemoteError(f"{snapshot} cannot be read: it was not copied to {self._remote.url}") from None
            return
        for file in [*(shard.file for shard in shards), MANIFEST]:
            self._push(snapshot / file, f"{snapshot.name}/{file}", there)

    def _push(self, path: Path, name: str, there: dict[str, int]) -> None:
        """Upload a file unless the store has one of that size; one that was pruned here meanwhile is skipped."""
        try:
            if there.get(name) != path.stat().st_size:
                self._remote.push(path, name)
        except RemoteError:
            if path.exists():
                raise
        except OSError:
            if path.exists():
                raise RemoteError(f"{path} cannot be read: it was not copied to {self._remote.url}") from None

    def _push_history(self, there: dict[str, int]) -> None:
        """Upload what the store lacks of the history: it only grows, so pieces of it that are whole stay."""
        path = self._folder / HISTORY
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for number, at in enumerate(range(0, size, HISTORY_PIECE)):
                    name = f"{self._island}/{HISTORY}" + f".{number}" * (number > 0)
                    length = min(HISTORY_PIECE, size - at)
                    if there.get(name) != length:
                        file.seek(at)
                        self._remote.push_bytes(file.read(length), name)
        except FileNotFoundError:
            return  # no round was committed yet
        except OSError:
            raise RemoteError(f"{path} cannot be read: it was not copied to {self._remote.url}") from None

    def _prune(self, there: dict[str, int], kept: set[str], segments: set[str]) -> None:
        """Remove snapshots older than all that are here, and segments that are gone here. A manifest goes first."""
        snapshot_names = {name.split("/")[0] for name in there if name.startswith("snapshot-")}
        oldest = min(kept, default="")
        for old in sorted(name for name in snapshot_names if name < oldest):
            for name in sorted((name for name in there if name.startswith(f"{old}/")), key=lambda n: MANIFEST not in n):
                self._remote.remove(name)
        for name in there:
            folder, _, file = name.partition("/")
            if folder == self._island and file.startswith("log-") and file not in segments:
                self._remote.remove(name)

    def close(self) -> None:
        """Stop the thread and copy the rest of the log, which has been closed by then."""
        self._closing.set()
        self._thread.join()
        self._try(finished=True)


def restore(folder: Path, remote: Remote, report: Report) -> Manifest | None:
    """Restore the newest state that the store holds into a folder that has none: a snapshot, and the log that leads
    furthest on from it. Return the manifest; None where nothing is whole."""
    there = remote.plain_sizes()
    folder.mkdir(parents=True, exist_ok=True)
    if GENESIS in there:
        remote.pull(GENESIS, folder / GENESIS)
    found = _manifests(folder, remote, there, report)
    for name, manifest in sorted(found.items(), key=lambda pair: pair[1].order, reverse=True):
        try:
            _pull_snapshot(folder / name, remote, manifest)
        except SnapshotDamaged as damaged:
            report("damaged", str(damaged))
            continue
        rounds = _pull_log(folder, remote, there, manifest)
        try:
            _pull_history(folder, remote, there)
        except RemoteError as error:  # a state without its past is still one
            report("remote failing", f"{error}; the headers of earlier rounds are not restored")
        report("restored", f"round {manifest.round + rounds} from {remote.url}: {name} and {rounds} rounds after it")
        return manifest
    return None


def _manifests(folder: Path, remote: Remote, there: dict[str, int], report: Report) -> dict[str, Manifest]:
    """Return all manifests that can be read, not only the newest: a heavier branch may have fewer rounds."""
    found, draft = {}, folder / "manifest.part"
    for name in sorted(filter(OF_SNAPSHOT.fullmatch, there)):
        draft.mkdir(exist_ok=True)
        try:
            if there[name] > MAX_MANIFEST:
                raise SnapshotDamaged(f"{name} is too long")
            remote.pull(name, draft / MANIFEST)
            found[name.split("/")[0]] = read_manifest(draft)
        except SnapshotDamaged:
            report("damaged", f"{remote.url}/{name} is not what was written")
    shutil.rmtree(draft, ignore_errors=True)
    return found


def _pull_snapshot(path: Path, remote: Remote, manifest: Manifest) -> None:
    with appearing(path, part_of(path)) as part:
        part.mkdir()
        (part / MANIFEST).write_bytes(manifest.encode())  # the very bytes that are there
        for shard in manifest.shards:
            if not OF_SHARD.fullmatch(shard.file):
                raise SnapshotDamaged(f"{path.name}/{MANIFEST} names a file outside of it: {shard.file!r}")
            remote.pull(f"{path.name}/{shard.file}", part / shard.file)
        read_vectors(part, manifest)


def _pull_log(folder: Path, remote: Remote, there: dict[str, int], manifest: Manifest) -> int:
    """Download the log that leads furthest on, and return by how many rounds. Its writer's promises stay behind."""
    segments = list(filter(OF_LOG.fullmatch, there))
    islands = sorted({name.split("/")[0] for name in segments})
    best, draft = 0, folder / "log.part"
    for island in islands:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for name in [name for name in segments if name.startswith(f"{island}/")]:
            remote.pull(name, draft / name.partition("/")[2])
        best = _take_over(folder, Journal.read(draft), manifest, best)
    shutil.rmtree(draft, ignore_errors=True)
    return best


def _pull_history(folder: Path, remote: Remote, there: dict[str, int]) -> None:
    """Download the longest history, piece after piece, as far as there is no gap."""
    pieces: dict[str, dict[int, str]] = {}
    for match in filter(None, map(OF_HISTORY.fullmatch, there)):
        pieces.setdefault(match[1], {})[int(match[2] or 0)] = match[0]
    if not pieces:
        return
    longest = max(pieces.values(), key=lambda parts: sum(there[name] for name in parts.values()))
    piece = folder / "history.part"
    try:
        with appearing(folder / HISTORY) as draft, draft.open("wb") as whole:
            for number in takewhile(longest.__contains__, count()):
                remote.pull(longest[number], piece)
                whole.write(piece.read_bytes())
    finally:
        piece.unlink(missing_ok=True)


def _take_over(folder: Path, journal: Journal, manifest: Manifest, best: int) -> int:
    """Write a journal's records here if it leads further than the best so far; return how far the best leads."""
    entries = list(takewhile(lambda e: journal.payload(e.payload) is not None, journal.chain(manifest.version)))
    if len(entries) <= best or not journal.headers:  # no header: damaged, and nobody can say which run it is of
        return best
    genesis = next(iter(journal.headers.values())).genesis
    for path in segment_paths(folder):
        path.unlink()
    writer = SegmentWriter(folder)
    writer.write(Kind.HEADER, header_frame(Header(genesis, manifest.version, manifest.round)))
    for entry in entries:
        payload = journal.payload(entry.payload)
        assert payload is not None, "it was looked at just now"
        writer.write(Kind.PAYLOAD, entry.payload.encode(), payload)
        writer.write(Kind.RECORD, record_frame(entry), entry.header)
    writer.close()
    return len(entries)
