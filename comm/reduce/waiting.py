"""How the threads of one all-reduce wait for each other. Whatever stops the attempt wakes all of them."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Progress:
    """Count the chunks that have passed between this member and another one, and note when the last one did."""

    sent_chunks: int = 0
    received_chunks: int = 0
    last_at: float = 0.0  # time.monotonic()

    def sent(self) -> None:  # each counter has one thread that writes it
        """Count one more chunk to the other member. Only the thread that sends to it calls this."""
        self.sent_chunks, self.last_at = self.sent_chunks + 1, time.monotonic()

    def received(self) -> None:
        """Count one more chunk from the other member. Only the thread that receives from it calls this."""
        self.received_chunks, self.last_at = self.received_chunks + 1, time.monotonic()


class Stopped(Exception):
    """Signal to a waiting thread that the attempt is over; the attempt's error says why."""


class Count:
    """Hold a number that only rises, and let threads wait for a value of it."""

    def __init__(self) -> None:
        self.value = 0
        self._stopped = False
        self._changed = threading.Condition()

    def add(self, more: int = 1) -> None:
        """Increase the number and wake all threads that wait."""
        with self._changed:
            self.value += more
            self._changed.notify_all()

    def reach(self, value: int, timeout_s: float | None = None) -> None:
        """Wait until the number is at least `value`, or for so long; raise Stopped once the attempt is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.value >= value or self._stopped, timeout_s)
            if self._stopped:
                raise Stopped

    def stop(self) -> None:
        """Make every wait raise Stopped, those that have begun and those to come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def reach_together(counts: Iterable[Count], value: int, within_s: float) -> None:
    """Wait until all these numbers are at least `value`, or for so long; raise Stopped once the attempt is over."""
    until = time.monotonic() + within_s
    for count in counts:
        count.reach(value, max(0.0, until - time.monotonic()))


class Window:
    """Hold the chunks of one member that wait to be added, in a ring of buffers."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self.filled, self.freed = Count(), Count()

    def place(self, number: int, size: int) -> Tensor:
        """Return room for chunk `number`, once the chunk that was in it has been added."""
        self.freed.reach(number - len(self._buffers) + 1)
        return self._buffers[number % len(self._buffers)][:size]

    def stop(self) -> None:
        """Wake the threads that fill the ring and that empty it, with Stopped."""
        self.filled.stop()
        self.freed.stop()
