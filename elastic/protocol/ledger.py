"""The ledger of samples: which are taken. A part of the replicated state, changed by committed records only.

Positions count through the epochs: position p is sample p mod `epoch`. Everything below `next` that is neither free nor
leased has been consumed. Leases of islands that are gone return to `free`, which is handed out first.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size


@dataclass(frozen=True)
class Ledger:
    """Keep count of sample positions: free, leased or consumed. Each change returns a new ledger."""

    epoch: int  # samples in one pass
    limit: int | None = None  # nothing is leased from here on: the run ends when all below is consumed
    next: int = 0
    free: Ranges = ()
    leases: tuple[tuple[str, Ranges], ...] = ()  # by holder, sorted
    overlaps: Ranges = ()  # consumed more than once: two sides of a cut network, or an island thought dead

    def lease_of(self, holder: str) -> Ranges:
        """Return the positions that a holder has leased and not consumed; empty if it has none."""
        place = self._place(holder)
        return self.leases[place][1] if self._holds(place, holder) else ()

    def grant(self, holder: str, count: int) -> tuple["Ledger", Ranges]:
        """Lease `count` more positions to a holder, or fewer where the limit is near.

        Returns the new ledger and the positions; those that other holders gave back come first.
        """
        returned = first(self.free, count)
        fresh = self._fresh(count - size(returned))
        granted = normal(returned + fresh)
        ledger = replace(self, free=minus(self.free, returned), next=self.next + size(fresh))
        return ledger._lease(holder, normal(self.lease_of(holder) + granted)), granted

    def _fresh(self, count: int) -> Ranges:
        hi = self.next + count if self.limit is None else min(self.next + count, self.limit)
        return ((self.next, hi),) if hi > self.next else ()

    def consume(self, holder: str, ranges: Ranges) -> "Ledger":
        """Take positions out of the holder's lease, or from wherever else they are.

        What was leased on another branch may be free, leased to another holder, or not handed out yet. A position that
        is in none of these has been consumed before, and is recorded as an overlap.
        """
        own = self.lease_of(holder)
        if not minus(ranges, own):
            return self._lease(holder, minus(own, ranges))
        ledger = self._reach(ranges[-1][1])
        return replace(
            ledger,
            free=minus(ledger.free, ranges),
            leases=tuple((who, rest) for who, lease in ledger.leases if (rest := minus(lease, ranges))),
            overlaps=normal(self.overlaps + minus(ranges, ledger.unconsumed)),
        )

    def _reach(self, end: int) -> "Ledger":
        return self if end <= self.next else replace(self, next=end, free=normal((*self.free, (self.next, end))))

    def release(self, holder: str) -> "Ledger":
        """Move a holder's whole lease back to the free positions, because the holder is gone."""
        return replace(self, free=normal(self.free + self.lease_of(holder)))._lease(holder, ())

    def _lease(self, holder: str, ranges: Ranges) -> "Ledger":
        place = self._place(holder)
        new = ((holder, ranges),) if ranges else ()
        rest = self.leases[place + self._holds(place, holder) :]
        return replace(self, leases=self.leases[:place] + new + rest)

    def _place(self, holder: str) -> int:
        """Return the index of a holder's lease, or the one at which it would be inserted."""
        return bisect_left(self.leases, (holder, ()))

    def _holds(self, place: int, holder: str) -> bool:
        return place < len(self.leases) and self.leases[place][0] == holder

    @property
    def unconsumed(self) -> Ranges:
        """Return the positions below `next` that are free or leased."""
        return normal(self.free + tuple(part for _, lease in self.leases for part in lease))

    def exhausted(self, batch: int = 1) -> bool:
        """Return whether nothing is left to lease and no holder has enough for a batch; False without a limit."""
        if self.limit is None or self.next < self.limit or self.free:
            return False
        return all(size(lease) < batch for _, lease in self.leases)
