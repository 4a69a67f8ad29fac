"""Results of long ago, read back from the log for peers that ask for them, and checked."""

import threading
from collections import OrderedDict
from collections.abc import Callable

from diloco.checkpoint.log.entries import payload_name
from diloco.checkpoint.log.journal import Journal
from diloco.checkpoint.log.library import Item

CACHED = 4  # a peer asks for one chunk after the other


class Results:
    def __init__(self, journal: Journal, lock: threading.Condition, tell: Callable[[str, str], None]) -> None:
        """The lock is the journal's."""
        self._journal, self._lock, self._tell = journal, lock, tell
        self._items: OrderedDict[str, Item] = OrderedDict()

    def item(self, payload: str) -> Item | None:
        """None where it is not here, or no longer what was written; that is told."""
        with self._lock:
            item, place = self._items.get(payload), self._journal.payloads.get(payload)
        if item is not None or place is None:
            return item
        if (raw := self._journal.payload(payload)) is None:
            with self._lock:
                self._journal.payloads.pop(payload, None)
            if place.path.exists():
                self._tell("damaged", f"{place.path.name}: the bytes of result {payload[:12]} are damaged")
            return None
        item = Item(payload_name(payload), raw)
        with self._lock:
            self._items[payload] = item
            while len(self._items) > CACHED:
                self._items.popitem(last=False)
        return item
