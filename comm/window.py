"""How the threads of one all-reduce wait for each other. Whatever stops the attempt wakes all of them."""

import threading

import torch
from torch import Tensor

WINDOW = 4  # chunks of one member in memory


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

    def __init__(self, chunk_bytes: int) -> None:
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8) for _ in range(WINDOW)]
        self._filled, self._freed = Count(), Count()

    def place(self, number: int, size: int) -> Tensor:
        """Room for chunk `number`, once there is some."""
        self._freed.reach(number - WINDOW + 1)
        return self._buffers[number % WINDOW][:size]

    def filled(self) -> None:
        self._filled.add_one()

    def take(self, number: int, size: int) -> Tensor:
        self._filled.reach(number + 1)
        return self._buffers[number % WINDOW][:size]

    def free(self) -> None:
        self._freed.add_one()

    def stop(self) -> None:
        self._filled.stop()
        self._freed.stop()
