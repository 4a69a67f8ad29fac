"""Copies between a device and host memory that training does not wait for. On a CPU there is nothing to wait for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Copies:
    """What is queued `beside` runs on a stream of its own: after what training had queued by then, and before whatever
    it queues after `settle`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: torch.cuda.Event | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield
            self._pending = self._side.record_event(torch.cuda.Event(blocking=True))

    def settle(self) -> None:
        """Training goes on behind all copies. The device waits for them, nobody here does."""
        if self._pending is not None:
            torch.cuda.current_stream(self._device).wait_event(self._pending)
            self._pending = None

    def mark(self) -> Callable[[], None]:
        """To be called by any thread that needs what was queued beside up to now."""
        return _nothing if self._pending is None else self._pending.synchronize

    def mark_training(self) -> Callable[[], None]:
        """The same for what training has queued up to now."""
        if self._side is None:
            return _nothing
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(blocking=True)).synchronize


def _nothing() -> None:
    pass
