"""What a peer keeps for others to fetch: names -> bytes that never change, cut into chunks with a digest each; and the
records whose results are among them.

An `ItemManifest` describes an item: whoever has the right one can take the chunks from any peer. It comes from peers,
so it is checked, and its sizes are bounded, before anything of that size is allocated.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.log.segments import ByteRange, read_part
from diloco.comm.peers import packing
from diloco.comm.peers.packing import Malformed, Reader
from diloco.comm.transport.frame import Buffer
from diloco.comm.transport.wire import as_bytes
from diloco.errors import ManifestRefused

CHUNK_BYTES, SMALLEST_CHUNK_BYTES = 1 << 20, 1 << 14  # as a rule
CHUNKS = 16  # at least, of an item that is not tiny: several donors can give parts of it
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 12, 1 << 22
MAX_CHUNKS = 1 << 17  # half a terabyte in the largest chunks, and a description of 4 MiB
MAX_NAME_BYTES = 255
DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 2 + MAX_NAME_BYTES + 8 + 4 + MAX_CHUNKS * DIGEST_BYTES
KEEP_PAYLOADS = 16  # results of the last records, where they are not stored
FRESH_PAYLOADS = 1  # where they are: what everybody may be asking for
KEEP_HEADERS = 10_000
MAX_AFTER = 4 << 20  # bytes of headers in one answer: who lacks more asks again


@dataclass(frozen=True)
class ItemManifest:
    """Describe an item: its size and the digests of its chunks. It is always consistent, else ManifestRefused is
    raised; only its user knows which size to expect."""

    name: str
    size: int
    chunk_bytes: int
    digests: tuple[bytes, ...]  # SHA-256 of each chunk

    def __post_init__(self) -> None:
        count = chunk_count(self.name, self.size, self.chunk_bytes)
        if len(self.digests) != count or any(len(digest) != DIGEST_BYTES for digest in self.digests):
            raise ManifestRefused(f"{self.name!r}: {len(self.digests)} digests for {count} chunks")

    def chunk(self, number: int) -> slice:
        """Return the slice of the item's bytes that this chunk covers; the last one may be shorter."""
        return slice(number * self.chunk_bytes, min((number + 1) * self.chunk_bytes, self.size))

    def encode(self) -> bytes:
        """Encode the manifest as donors send it: name, size, bytes of a chunk, then all digests."""
        head = packing.text(self.name, MAX_NAME_BYTES)
        return head + packing.integer(self.size, 8) + packing.integer(self.chunk_bytes, 4) + b"".join(self.digests)

    @classmethod
    def decode(cls, raw: Buffer) -> "ItemManifest":
        """Decode what a peer sent; raise ManifestRefused where it is too long, malformed or inconsistent."""
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ManifestRefused(f"a description of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES} are accepted")
        reader = Reader(bytes(raw))
        try:
            name, size, chunk_bytes = reader.text(MAX_NAME_BYTES), reader.integer(8), reader.integer(4)
            count = chunk_count(name, size, chunk_bytes)
            digests = tuple(reader.take(DIGEST_BYTES) for _ in range(count))
            reader.finish()
        except Malformed as bad:
            raise ManifestRefused(f"no description of an item: {bad}") from None
        return cls(name, size, chunk_bytes, digests)


def chunk_count(name: str, size: int, chunk_bytes: int) -> int:
    """Return how many chunks an item has; raise ManifestRefused for a name or a size that no item can have."""
    try:
        packing.text(name, MAX_NAME_BYTES)
    except Malformed as bad:
        raise ManifestRefused(f"no name of an item: {bad}") from None
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ManifestRefused(f"{name!r}: chunk_bytes={chunk_bytes} is not from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
    if not 0 <= size <= MAX_CHUNKS * chunk_bytes:
        raise ManifestRefused(f"{name!r}: {size} bytes are no {MAX_CHUNKS} chunks of {chunk_bytes}")
    return -(-size // chunk_bytes)


def usual_chunk_bytes(size: int) -> int:
    """Return the size of chunks for an item, such that also a small one has parts for several donors to give."""
    return min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, size // CHUNKS))


class Item:
    """Hold an item's bytes. A chunk's digest is computed when it is first asked for: gigabytes take seconds."""

    def __init__(self, name: str, data: Buffer, chunk_bytes: int | None = None) -> None:
        self.name, self._data = name, as_bytes(data).toreadonly()
        self.size = len(self._data)
        self.chunk_bytes = usual_chunk_bytes(self.size) if chunk_bytes is None else chunk_bytes
        self.count = chunk_count(name, self.size, self.chunk_bytes)
        self._digests: list[bytes | None] = [None] * self.count

    def digest(self, number: int) -> bytes:
        """Return the SHA-256 of a chunk, computed on first use; any thread may call it."""
        known = self._digests[number]
        if known is None:  # two threads may both work it out, and find the same
            known = self._digests[number] = hashlib.sha256(self.chunk(number)).digest()
        return known

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk, as a view of the item."""
        return self._data[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    @property
    def data(self) -> memoryview:
        """Return all of its bytes."""
        return self._data

    def description(self) -> ItemManifest:
        """Build the item's manifest; this computes every digest that is not known yet."""
        return ItemManifest(self.name, self.size, self.chunk_bytes, tuple(map(self.digest, range(self.count))))


class StoredItem(Item):
    """Stand for an item whose bytes lie in a file, and read no more of it than a chunk at a time."""

    def __init__(self, name: str, place: ByteRange) -> None:
        """Read the bytes once, for their digests; raise OSError where that fails."""
        self.name, self.size, self._place = name, place.length, place
        self.chunk_bytes = usual_chunk_bytes(self.size)
        self.count = chunk_count(name, self.size, self.chunk_bytes)
        self._digests, whole = [], hashlib.sha256()
        for number in range(self.count):
            part = self._read(number)
            whole.update(part)
            self._digests.append(hashlib.sha256(part).digest())
        self.sha256 = whole.hexdigest()

    def _read(self, number: int) -> bytes:
        begin = number * self.chunk_bytes
        return read_part(self._place, begin, min(self.chunk_bytes, self.size - begin))

    def chunk(self, number: int) -> memoryview:
        """Read a chunk; raise OSError where the file has other bytes by now."""
        part = self._read(number)
        if hashlib.sha256(part).digest() != self._digests[number]:
            raise OSError(f"{self._place.path.name} has other bytes than it had")
        return memoryview(part)

    @property
    def data(self) -> memoryview:
        """Read all of it into memory."""
        return memoryview(b"".join(map(self.chunk, range(self.count))))


class Library:
    """Hold items by name, for any thread. Data is not copied: nobody may change it while the item is here.

    `on_missing` makes an item, or its bytes, when a name is requested that is not here. It is called on the threads
    that serve peers, with whatever name a peer sent, once for each request; its result is not kept.
    """

    def __init__(self, on_missing: Callable[[str], Buffer | Item | None] | None = None) -> None:
        self._on_missing = on_missing
        self._items: dict[str, Item] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: Buffer | Item, *, chunk_bytes: int | None = None) -> Item:
        """Add an item, in place of one of that name: peers that are fetching the old one learn that it is gone."""
        item = data if isinstance(data, Item) else Item(name, data, chunk_bytes)
        with self._lock:
            self._items[name] = item
        return item

    def held(self, name: str) -> Item | None:
        """Return an item that is in the library; None where `on_missing` would have to make it."""
        with self._lock:
            return self._items.get(name)

    def get(self, name: str) -> Item | None:
        """Return an item, from the library or else from `on_missing`; None where neither has it."""
        item = self.held(name)
        if item is None and self._on_missing is not None:
            made = self._on_missing(name)
            return made if made is None or isinstance(made, Item) else Item(name, made)
        return item

    def drop(self, name: str) -> None:
        """Remove an item; it is no error if there is none of that name."""
        with self._lock:
            self._items.pop(name, None)

    def names(self) -> list[str]:
        """List the items that are in the library, sorted; what `on_missing` could make is not among them."""
        with self._lock:
            return sorted(self._items)


class OuterLog:
    """Keep the committed records of one branch in order, for any thread. The results of the last ones are in the
    library, those of older ones are stored."""

    def __init__(self, library: Library, stored: Callable[[str], bool] = lambda payload: False) -> None:
        """`stored` tells whether the bytes with this digest are kept elsewhere."""
        self._library, self._stored = library, stored
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    def append(self, entry: Entry) -> None:
        """Add a record, which must follow the last one; results that are too old leave the library."""
        with self._lock:
            assert not self._entries or self._entries[-1].digest == entry.parent, "a log is one chain"
            self._entries.append(entry)
            del self._entries[:-KEEP_HEADERS]
            self._drop_old_payloads()

    def replace(self, entries: list[Entry]) -> None:
        """Replace all records by those of another branch, or by none."""
        with self._lock:
            self._entries = list(entries)
            self._drop_old_payloads()

    def _drop_old_payloads(self) -> None:
        """Drop all but the last records' results from the library, those of failed attempts, too. What is stored is
        served from there."""
        last = self._entries[-KEEP_PAYLOADS:]
        older, fresh = last[:-FRESH_PAYLOADS], last[-FRESH_PAYLOADS:]
        kept = {payload_name(entry.payload) for entry in older if not self._stored(entry.payload)}
        kept |= {payload_name(entry.payload) for entry in fresh}
        for name in self._library.names():
            if name.startswith(payload_name("")) and name not in kept:
                self._library.drop(name)

    def after(self, digest: str) -> list[Entry] | None:
        """Return the records that follow this digest, or the first of them (MAX_AFTER bytes of headers in one answer);
        None where it is unknown or any of their results is gone."""
        with self._lock:
            entries = list(self._entries)
        index = next((i for i, entry in enumerate(entries) if entry.parent == digest), None)
        if index is None:
            return [] if entries and entries[-1].digest == digest else None
        in_memory = set(self._library.names())
        if not all(payload_name(e.payload) in in_memory or self._stored(e.payload) for e in entries[index:]):
            return None
        sizes = accumulate(len(entry.header) for entry in entries[index:])
        return [entry for entry, size in zip(entries[index:], sizes, strict=True) if size <= MAX_AFTER]

    def entries(self) -> list[Entry]:
        """List the records that are kept, oldest first."""
        with self._lock:
            return list(self._entries)


def payload_name(digest: str) -> str:
    """Return the library's name for the bytes of a result, given their SHA-256."""
    return f"payload/{digest}"
