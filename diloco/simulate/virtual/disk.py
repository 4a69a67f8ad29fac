"""Model an island's disk: what is on it outlives a crash, and what is still being written does not."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.elastic.protocol.messages import Memory
from diloco.elastic.protocol.record import Amendment, Record
from diloco.elastic.protocol.state import RunState


@dataclass
class Disk:
    """Hold an island's log as it sees it, and what of it outlives a crash. Writes end one after the other."""

    log: list[Record] = field(default_factory=list)
    states: list[RunState] = field(default_factory=list)
    safe: tuple[list[Record], list[RunState], int] = field(
        default_factory=lambda: ([], [], 0)
    )  # so many of its records
    written: int = 0  # records of `log` that are on the disk
    based: bool = True  # so is the snapshot that they follow
    first: int = 0  # the number of the first state that it can give back: that of the snapshot
    pending: deque[Callable[[], None]] = field(default_factory=deque)
    busy_until: float = 0.0  # with what it is writing
    next_until: float = 0.0  # and with all that has been queued meanwhile
    memory: Memory | None = None
    lives: int = 0
    own: set[str] = field(default_factory=set)  # records that it has appended itself
    quorums: dict[str, bool] = field(default_factory=dict)  # by record: whether a quorum had stored it
    amendments: list[Amendment] = field(default_factory=list)  # that were handed in here

    def copy(self, other: "Disk") -> None:
        """Replace the whole log, and its states, by another island's; a snapshot of it must be written."""
        self.log, self.states = list(other.log), list(other.states)
        self.quorums |= other.quorums
        self.written, self.based, self.first = len(self.log), False, len(self.log)

    def extend(self, other: "Disk", since: int) -> None:
        """Append another island's records, from this number on."""
        self.log += other.log[since:]
        self.states += other.states[since + 1 :]
        self.quorums |= other.quorums

    def lineage(self, most: int) -> dict[str, bool]:
        """Return whether each of the last records had a quorum, as far as the log reaches back."""
        states = self.states[max(self.first, len(self.states) - most) :]
        return {state.head.digest: self.quorums.get(state.head.digest, True) for state in states}

    def cut_off(self, digest: str) -> Record | None:
        """Cut the log off after a record, and return the one that came next; None if it does not reach back there."""
        found = [place for place, state in enumerate(self.states) if state.head.digest == digest]
        if not found or found[0] < self.first or found[0] >= len(self.log):
            return None
        undone = self.log[found[0]]
        self.log, self.states = self.log[: found[0]], self.states[: found[0] + 1]
        self.written = min(self.written, len(self.log))
        return undone

    def cut_off_void(self) -> Record | None:
        """Cut off what the owner's latch makes void, as one does that reads its log at a start; return the first."""
        latch = self.memory.latch if self.memory is not None else None
        if latch is None or self.states[-1].latch:
            return None
        valid, latched = "", False
        for digest, decided in self.lineage(len(self.states)).items():
            latched = latched or digest == latch.head.digest
            if latched and valid and not decided:
                return self.cut_off(valid)
            valid = digest if latched else ""
        return None

    def end_of_write(self, now: float, seconds: float) -> float:
        """Queue a write, and return when it is done: all that waits while the disk is busy is written at once."""
        if now >= self.busy_until:
            self.busy_until = self.next_until
        if now >= self.busy_until:
            self.busy_until = self.next_until = now + seconds
        elif self.next_until <= self.busy_until:
            self.next_until = self.busy_until + seconds
        return self.next_until

    def settle(self) -> None:
        """Note what a crash would leave by now."""
        if self.based:
            self.safe = self.log, self.states, self.written

    def lose(self) -> None:
        """Forget what was not written when the island crashed."""
        log, states, count = self.safe
        self.log, self.states = log[:count], states[: count + 1]
        self.written, self.based = len(self.log), True
        self.own &= {record.digest for record in self.log}
        self.pending.clear()
        self.settle()
