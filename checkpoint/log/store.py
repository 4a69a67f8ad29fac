"""Where an island keeps its log and its snapshots. This one keeps nothing; `diskstore.py` has the one that does."""

from collections.abc import Callable

from diloco.checkpoint.log.begun import Begun
from diloco.checkpoint.log.entries import Entry
from diloco.checkpoint.log.library import Item
from diloco.checkpoint.log.snapshot import Frozen
from diloco.comm.transport.frame import Buffer


class Store:
    """In memory: nothing is durable, and nothing waits."""

    keeps = False  # snapshots
    begun: Begun | None = None  # a download of a whole state

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

    def vouch(self, version: str, digest: str) -> None:
        """The digest of all vectors at this head."""

    def then(self, act: Callable[[], None]) -> None:
        """When all before is durable; in any thread, in order. What cannot be made durable is not waited for."""
        act()

    def snapshot(self, frozen: Frozen) -> None:
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
