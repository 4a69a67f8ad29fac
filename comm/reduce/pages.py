"""Keep what an attempt at an all-reduce has received, so that the next attempt sends only what is missing.

Pages are kept by the name of the encoded vector they belong to. Equal names mean equal bytes: a contribution is encoded
once for a round, and a mean follows from its contributions and weights alone.
"""

import struct
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.comm.codec.base import Codec
from diloco.comm.codec.noise import PAGE
from diloco.comm.codec.rooms import CPU, ROOMS, room_for
from diloco.comm.reduce.spans import Span
from diloco.errors import FrameError

RANGE = struct.Struct("<II")  # pages
MAX_RANGES = 8192


class KeptPages(NamedTuple):
    """Say what is left of a member after a failed attempt."""

    spans: list[Span]  # that it was to reduce
    means: list[Span]  # of them, those whose mean is here
    whole: bool  # all of its contribution that is still needed here is here


class PageStore:
    """Hold pages of encoded vectors by name, those of one round at a time.

    It is used by one attempt at a time: `turn` is held while one runs.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._kept: dict[str, list[tuple[Span, Tensor]]] = {}
        self._lock = threading.Lock()
        self._spare: Tensor | None = None  # memory of the last room, once nothing that is kept lies in it
        self._room: Tensor | None = None
        self.age = 0  # how often it was cleared: an attempt that began before keeps nothing any more

    def clear(self) -> None:
        """Forget all pages: another round is next."""
        with self._lock:
            self._kept = {}
            self._spare, self._room = self._room if self._room is not None else self._spare, None
            self.age += 1
        ROOMS.next_turn()

    def room(self, size: int, near: torch.device = CPU) -> Tensor:
        """Return memory for so many bytes, which are copied to this device. That of an earlier round is used again:
        fresh pages of memory cost time.

        Only the attempt whose turn it is may ask: nobody else writes to that memory.
        """
        with self._lock:
            spare, self._spare = self._spare, None
            self._room = spare if spare is not None and size <= len(spare) <= 2 * size else room_for(size, near=near)
            return self._room[:size]

    def keep(self, name: str, span: Span, payload: Tensor, *, age: int) -> None:
        """Keep the bytes of a span of whole pages, unless the store was cleared since `age`."""
        with self._lock:
            if age == self.age and span.lo < span.hi:
                self._kept.setdefault(name, []).append((span, payload))

    def take(self, name: str) -> list[tuple[Span, Tensor]]:
        """Remove and return all that is kept of one vector."""
        with self._lock:
            return self._kept.pop(name, [])


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, joined where they touch."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.lo):
        if found and span.lo <= found[-1].hi:
            found[-1] = Span(found[-1].lo, max(found[-1].hi, span.hi))
        else:
            found.append(span)
    return found


def overlap(spans: Iterable[Span], chunk: Span) -> list[Span]:
    """Return the parts of the spans that lie in a chunk."""
    parts = (Span(max(span.lo, chunk.lo), min(span.hi, chunk.hi)) for span in spans)
    return [part for part in parts if part.lo < part.hi]


def without(chunk: Span, spans: Iterable[Span]) -> list[Span]:
    """Return the parts of a chunk that none of the spans covers, in order."""
    left, lo = [], chunk.lo
    for span in sorted(overlap(spans, chunk), key=lambda span: span.lo):
        if lo < span.lo:
            left.append(Span(lo, span.lo))
        lo = max(lo, span.hi)
    return [*left, Span(lo, chunk.hi)] if lo < chunk.hi else left


def whole_pages(chunk: Span, arrived: int, codec: Codec) -> Span:
    """Return the whole pages of a chunk of which so many bytes have arrived."""
    pages = arrived // codec.size(PAGE)
    return Span(chunk.lo, min(chunk.hi, chunk.lo + pages * PAGE))


def copy_parts(kept: Sequence[tuple[Span, Tensor]], chunk: Span, codec: Codec, room: Tensor) -> list[Span]:
    """Copy what is kept of a chunk to its room, and return which parts these are."""
    copied = []
    for span, payload in kept:
        for part in overlap([span], chunk):
            size = codec.size(part.hi - part.lo)
            to, source = ((part.lo - start) // PAGE * codec.size(PAGE) for start in (chunk.lo, span.lo))
            room[to : to + size] = payload[source : source + size]
            copied.append(part)
    return copied


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Return spans of whole pages as bytes, for a peer."""
    return b"".join(RANGE.pack(span.lo // PAGE, -(-span.hi // PAGE)) for span in spans)


def unpack_spans(raw: bytes, count: int) -> list[Span]:
    """Return the spans that a peer has packed; raise FrameError unless they are in order and in the vector."""
    if len(raw) % RANGE.size or len(raw) > MAX_RANGES * RANGE.size:
        raise FrameError("a list of spans was due")
    pages, spans, end = -(-count // PAGE), list[Span](), 0
    for lo, hi in RANGE.iter_unpack(raw):
        if not end <= lo < hi <= pages:
            raise FrameError("spans are not in order, or not in the vector")
        spans.append(Span(lo * PAGE, min(hi * PAGE, count)))
        end = hi
    return spans
