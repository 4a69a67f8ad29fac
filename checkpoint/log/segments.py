"""Append-only files of checksummed frames: `log-00000001.seg`, `log-00000002.seg`, …

A frame is magic, kind, the lengths of head and body, the head, a checksum over all of that, the body, a checksum over
it. So damage in one frame hides no other, and a head can be trusted without reading its body. Bytes at the end of a
file that are no whole frame were being written when their writer died: a torn tail.
"""

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from diloco.atomic import sync_path
from diloco.comm.transport.frame import Buffer
from diloco.comm.transport.wire import as_bytes

MAGIC = b"dLog"
FIXED = struct.Struct("<4sBIQ")  # magic, kind, head bytes, body bytes
CHECK = struct.Struct("<Q")
MAX_HEAD = 64 << 20
READ_BYTES = 4 << 20

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter


@dataclass(frozen=True)
class ByteRange:
    """Locate a frame's body in its file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Frame:
    """Describe a frame whose head is whole. Its body stays in the file, and may not have been checked."""

    kind: int
    head: bytes
    start: int  # where the frame begins
    body: ByteRange

    @property
    def end(self) -> int:
        """Return the offset behind the frame, where the next one begins."""
        return self.body.offset + self.body.length + CHECK.size


@dataclass(frozen=True)
class Damage:
    """Describe bytes that are not what was written. `frame` is the one whose body they are, if its head is whole."""

    path: Path
    offset: int
    frame: Frame | None = None


@dataclass
class Scan:
    """Hold what a file contains. From `torn` on it was never completely written, or its last frame is damaged."""

    frames: list[Frame] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    torn: int | None = None


def segment_paths(folder: Path) -> list[Path]:
    """List the segments in a folder, oldest first."""
    return sorted(folder.glob("log-*.seg"))


def scan(path: Path) -> Scan:
    """Read a whole segment and check every byte; nothing is changed."""
    found = Scan()
    with path.open("rb") as file:
        size, position = path.stat().st_size, 0
        while position < size:
            frame = _frame_at(file.fileno(), path, position, size)
            if frame is not None and _body_is_whole(file.fileno(), frame.body):
                found.frames.append(frame)
                position = frame.end
                continue
            following = frame.end if frame is not None and frame.end < size else None
            if following is None or _frame_at(file.fileno(), path, following, size) is None:
                following = _next_frame(file.fileno(), path, position + 1, size)
            if following is None:
                found.torn = position
                break
            found.damages.append(Damage(path, position, frame))
            position = following
    return found


def _frame_at(file: int, path: Path, start: int, size: int) -> Frame | None:
    """Return the frame at this offset, if its head is whole and its body fits the file."""
    fixed = os.pread(file, FIXED.size, start)
    if len(fixed) < FIXED.size or not fixed.startswith(MAGIC):
        return None
    _, kind, head_bytes, body_bytes = FIXED.unpack(fixed)
    body_at = start + FIXED.size + head_bytes + CHECK.size
    if head_bytes > MAX_HEAD or body_at + body_bytes + CHECK.size > size:
        return None
    rest = os.pread(file, head_bytes + CHECK.size, start + FIXED.size)
    head = rest[:head_bytes]
    if len(rest) < head_bytes + CHECK.size or rest[head_bytes:] != _check([fixed, head]):
        return None
    return Frame(kind, head, start, ByteRange(path, body_at, body_bytes))


def _body_is_whole(file: int, place: ByteRange) -> bool:
    stored = os.pread(file, CHECK.size, place.offset + place.length)
    return stored == _check(_parts(file, place.offset, place.length))


def _parts(file: int, offset: int, length: int) -> Iterator[bytes]:
    end = offset + length
    while offset < end:
        part = os.pread(file, min(READ_BYTES, end - offset), offset)
        if not part:
            return  # the file is shorter by now
        yield part
        offset += len(part)


def _next_frame(file: int, path: Path, position: int, size: int) -> int | None:
    while position < size:
        window = os.pread(file, READ_BYTES, position)
        at = window.find(MAGIC)
        while at >= 0:
            if _frame_at(file, path, position + at, size) is not None:
                return position + at
            at = window.find(MAGIC, at + 1)
        if len(window) < READ_BYTES:
            return None
        position += len(window) - len(MAGIC) + 1
    return None


def read_body(place: ByteRange) -> bytes | None:
    """Read a frame's body; return None where the bytes are gone or not those that were written."""
    with suppress(OSError), place.path.open("rb") as file:
        raw = b"".join(_parts(file.fileno(), place.offset, place.length))
        if os.pread(file.fileno(), CHECK.size, place.offset + place.length) == _check([raw]):
            return raw
    return None


def read_part(place: ByteRange, offset: int, length: int) -> bytes:
    """Read a part of a frame's body; raise OSError where the file is shorter by now."""
    with place.path.open("rb") as file:
        part = b"".join(_parts(file.fileno(), place.offset + offset, length))
    if len(part) < length:
        raise OSError(f"{place.path.name} is shorter than it was")
    return part


class Ahead:
    """Count the bytes of a body that lie in a segment before their frame does, with the state of their checksum."""

    def __init__(self) -> None:
        self.count, self.check = 0, xxhash.xxh3_64()


class SegmentWriter:
    """Write the next segment of a folder. Any OSError ends its use: `abandon` then takes back what was not synced.

    The body of the next frame may be written before the rest of it, by another thread, as it becomes known: until the
    frame is written that is a torn tail, and another frame that is written first takes its place.
    """

    def __init__(self, folder: Path) -> None:
        number = max((int(path.stem.removeprefix("log-")) for path in segment_paths(folder)), default=0) + 1
        self.path = folder / f"log-{number:08}.seg"
        self.size = self._synced = 0
        self._ahead: Ahead | None = None
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            sync_path(folder)
        except OSError:
            self.abandon()
            raise

    def write(self, kind: int, head: bytes, body: Buffer = b"", ahead: Ahead | None = None) -> ByteRange:
        """Append a frame and return where its body lies; it is not durable before `sync`. `ahead`: what of the body may
        have been written by then."""
        view = as_bytes(body)
        fixed = FIXED.pack(MAGIC, kind, len(head), len(view))
        with self._lock:
            if ahead is None or ahead is not self._ahead:
                self._drop_ahead()
                ahead = Ahead()
            self._ahead = None
            self._write(fixed + head + _check([fixed, head]))
            place = ByteRange(self.path, self.size, len(view))
            self.size = os.lseek(self._file, ahead.count, os.SEEK_CUR)
            self._write(view[ahead.count :])
            ahead.check.update(view[ahead.count :])
            self._write(CHECK.pack(ahead.check.intdigest()))
        return place

    def write_ahead(self, ahead: Ahead, offset: int, part: Buffer, head_bytes: int) -> None:
        """Write a part of the body of the frame that comes next, whose head has so many bytes. Where another frame came
        first, another body was begun, or what is before this part is not there, nothing is written."""
        with self._lock:
            if self._file < 0 or offset != ahead.count or (self._ahead is not ahead and offset):
                return
            if self._ahead is not ahead:
                self._drop_ahead()
                self._ahead = ahead
            left, at = memoryview(part), self.size + FIXED.size + head_bytes + CHECK.size + offset
            while left:
                written = os.pwrite(self._file, left, at)
                left, at = left[written:], at + written
            ahead.count += len(part)
            ahead.check.update(part)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead = None
            os.ftruncate(self._file, self.size)

    def _write(self, data: Buffer) -> None:
        left = memoryview(data)
        while left:
            written = os.write(self._file, left)
            self.size += written
            left = left[written:]

    def sync(self) -> None:
        """Make all that was written durable."""
        if self.size > self._synced:
            _sync_data(self._file)
            self._synced = self.size

    def close(self) -> None:
        with self._lock:
            self._drop_ahead()
            self.sync()
            os.close(self._file)
            self._file = -1

    def abandon(self) -> None:
        """Close the file after an error, cut to what was synced, or remove it where nothing was."""
        if self._file < 0:
            return
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        with suppress(OSError):  # else a torn tail stays, which the next opening cuts off
            os.ftruncate(self._file, self._synced)
            if not self._synced:
                self.path.unlink()
        with suppress(OSError):
            os.close(self._file)
        self._file = -1


def cut(path: Path, length: int) -> None:
    """Truncate a segment to this many bytes, to remove a torn tail; durable when it returns."""
    with path.open("rb+") as file:
        file.truncate(length)
        os.fsync(file.fileno())


def _check(parts: Iterable[Buffer]) -> bytes:
    check = xxhash.xxh3_64()
    for part in parts:
        check.update(part)
    return CHECK.pack(check.intdigest())
