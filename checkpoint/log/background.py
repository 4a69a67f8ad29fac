"""How threads that write in the background make way for those that train."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable

NICE = 5  # enough that training gets a core before they do, and little enough that a busy machine does not starve them
REST = 9  # times as long as it has worked, a thread rests: what it takes of cores and memory is a tenth at most

Rest = Callable[[], None]  # called between pieces of work


def make_way() -> None:
    """Called by a thread, for itself."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Pace:
    """Of a thread that writes. Whoever waits for it makes it hurry; and it rests no more after `seconds`."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._hurry = threading.Event()
        self._until = time.monotonic() + seconds
        self._rested_at = 0.0

    def begin(self) -> None:
        """By the thread itself."""
        self._rested_at = time.thread_time()

    def rest(self) -> None:
        """Waiting for the disk is no work."""
        if time.monotonic() < self._until:
            self._hurry.wait(REST * (time.thread_time() - self._rested_at))
        self._rested_at = time.thread_time()

    def hurry(self) -> None:
        self._hurry.set()


def no_rest() -> None:
    """Of whoever writes while somebody waits."""
