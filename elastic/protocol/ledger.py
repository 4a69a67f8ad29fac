"""The ledger of samples: which are taken. A part of the replicated state, changed by committed records only.

Positions count through the epochs: position p is sample p mod `epoch`. Everything below `next` that is neither free,
lost nor leased has been consumed. What islands that are gone had leased is *lost*: it is handed out again when nothing
fresh is left in the epoch, so that one which comes back finds it as it was.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from diloco.elastic.protocol.ranges import Ranges, first, minus, normal, size

FAR_AHEAD = 2**40  # of what was handed out here: another branch is not


@dataclass(frozen=True)
class Ledger:
    """Keep count of sample positions: free, leased or consumed. Each change returns a new ledger."""

    epoch: int  # samples in one pass
    limit: int | None = None  # nothing is leased from here on: the run ends when all below is consumed
    next: int = 0
    free: Ranges = ()
    leases: tuple[tuple[str, Ranges], ...] = ()  # by holder, sorted
    lost: tuple[tuple[str, Ranges], ...] = ()  # leases of holders that are gone, the last to go last
    overlaps: Ranges = ()  # consumed more than once: two sides of a cut network, or an island thought dead

    def lease_of(self, holder: str) -> Ranges:
        """Return the positions that a holder has leased and not consumed; empty if it has none."""
        place = self._place(holder)
        return self.leases[place][1] if self._holds(place, holder) else ()

    def grant(self, holder: str, count: int) -> tuple["Ledger", Ranges]:
        """Lease `count` more positions to a holder, or fewer where the limit is near.

        Returns the new ledger and the positions: first what the holder had itself, then what is fresh in this epoch,
        then what others had, then the next epoch.
        """
        own = first(dict(self.lost).get(holder, ()), count)
        fresh = self._fresh(count - size(own), self.next + (-self.next) % max(1, self.epoch))
        ledger = replace(self, next=self.next + size(fresh))
        others = tuple(part for _, ranges in self.lost for part in ranges)
        used = first(minus(normal(self.free + others), own), count - size(own) - size(fresh))
        later = ledger._fresh(count - size(own) - size(fresh) - size(used))
        granted = normal(own + fresh + used + later)
        taken = normal(own + used)
        lost = tuple((who, rest) for who, ranges in self.lost if (rest := minus(ranges, taken)))
        ledger = replace(ledger, free=minus(self.free, taken), lost=lost, next=ledger.next + size(later))
        return ledger._lease(holder, normal(self.lease_of(holder) + granted)), granted

    def _fresh(self, count: int, end: int | None = None) -> Ranges:
        """Return so many positions that were never handed out, before `end` and the limit."""
        hi = min([self.next + count, *(bound for bound in (self.limit, end) if bound is not None)])
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
            lost=tuple((who, rest) for who, lease in ledger.lost if (rest := minus(lease, ranges))),
            overlaps=normal(self.overlaps + minus(ranges, ledger.unconsumed)),
        )

    def _reach(self, end: int) -> "Ledger":
        return self if end <= self.next else replace(self, next=end, free=normal((*self.free, (self.next, end))))

    def reaches(self, ranges: Ranges) -> bool:
        """Return whether positions can have been handed out on any branch: not beyond the limit, nor far ahead."""
        end = self.next + FAR_AHEAD if self.limit is None else max(self.limit, self.next)
        return not ranges or ranges[-1][1] <= end

    def release(self, holder: str) -> "Ledger":
        """Count a holder's whole lease as lost, because the holder is gone."""
        lease = normal(dict(self.lost).get(holder, ()) + self.lease_of(holder))
        others = tuple((who, ranges) for who, ranges in self.lost if who != holder)
        return replace(self, lost=(*others, *([(holder, lease)] if lease else [])))._lease(holder, ())

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
        """Return the positions below `next` that are free, lost or leased."""
        return normal(self.free + tuple(part for _, lease in (*self.leases, *self.lost) for part in lease))

    def exhausted(self, batch: int = 1) -> bool:
        """Return whether nothing is left to lease and no holder has enough for a batch; False without a limit."""
        if self.limit is None or self.next < self.limit or self.free or self.lost:
            return False
        return all(size(lease) < batch for _, lease in self.leases)
