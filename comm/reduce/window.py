"""How the threads of one all-reduce wait for each other. Whatever stops the attempt wakes all of them."""

import threading
from collections.abc import Sequence

from torch import Tensor


class Stopped(Exception):
    """The attempt is over; its error says why."""


class Count:
    """A number that only rises, and whoever waits for it."""

    def __init__(self) -> None:
        self._value = 0
        self._stopped = False
        self._changed = threading.Condition()

    def add_one(self) -> None:
        with self._changed:
            self._value += 1
            self._changed.notify_all()

    def reach(self, value: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._value >= value or self._stopped)
            if self._stopped:
                raise Stopped

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Window:
    """The chunks of one member that wait to be added: a ring of buffers."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._filled, self._freed = Count(), Count()

    def place(self, number: int, size: int) -> Tensor:
        """Room for chunk `number`, once there is some."""
        self._freed.reach(number - len(self._buffers) + 1)
        return self._buffers[number % len(self._buffers)][:size]

    def filled(self) -> None:
        self._filled.add_one()

    def wait_for(self, number: int) -> None:
        self._filled.reach(number + 1)

    def free(self) -> None:
        self._freed.add_one()

    def stop(self) -> None:
        self._filled.stop()
        self._freed.stop()
