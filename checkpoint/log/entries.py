"""The outer log: what was committed, in order. In memory, with the bytes of the last records; older ones are stored.

Entries are opaque here: a digest that names its parent's, a header, and the digest of the result's bytes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from diloco.checkpoint.log.library import Library

KEEP_PAYLOADS = 16
KEEP_HEADERS = 10_000
MAX_AFTER = 4 << 20  # bytes of headers in one answer: who lacks more asks again


@dataclass(frozen=True)
class Entry:
    round: int
    digest: str
    parent: str
    header: bytes
    payload: str  # name of the bytes in the library: their SHA-256


class OuterLog:
    """One branch. For any thread."""

    def __init__(self, library: Library, stored: Callable[[str], bool] = lambda payload: False) -> None:
        """`stored`: whether the bytes with this digest are kept elsewhere."""
        self._library, self._stored = library, stored
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    def append(self, entry: Entry) -> None:
        with self._lock:
            assert not self._entries or self._entries[-1].digest == entry.parent, "a log is one chain"
            self._entries.append(entry)
            del self._entries[:-KEEP_HEADERS]
            self._drop_old_payloads()

    def replace(self, entries: list[Entry]) -> None:
        """Another branch."""
        with self._lock:
            self._entries = list(entries)
            self._drop_old_payloads()

    def _drop_old_payloads(self) -> None:
        """Those of attempts that came to nothing, too."""
        kept = {payload_name(entry.payload) for entry in self._entries[-KEEP_PAYLOADS:]}
        for name in self._library.names():
            if name.startswith(payload_name("")) and name not in kept:
                self._library.drop(name)

    def after(self, digest: str) -> list[Entry] | None:
        """What follows this entry, or the beginning of it, if its bytes are all still here; None where they are not."""
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
        with self._lock:
            return list(self._entries)


def payload_name(digest: str) -> str:
    return f"payload/{digest}"
