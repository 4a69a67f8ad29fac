"""Memory on the host for encoded vectors, which one round after the other uses again.

The kernel hands out fresh memory page by page where it is touched first, slower than a link or a bus brings what goes
there. So memory that nobody looks at any more serves the next vector of about its size, and near a GPU its pages are
locked, once.
"""

import mmap as pages
import threading
from collections import deque
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from diloco.comm.codec.streams import lock_pages

CPU = torch.device("cpu")
WORTH_MAPPING = 1 << 20  # bytes
LOOSE = 2  # times what is asked for: so large may memory be that is used again
IDLE_TURNS = 4  # that unused memory is kept for: heads, some of them without a round
ROUND_ROOMS = 4  # that a round takes: what comes, its own vector, the result, and the last one that is still written
MARGIN = 50  # one of so many bytes is added: what comes lies in whole chunks
LOCKED_BYTES = 8 << 30  # of a process; with more of them, the rest stays pageable


class Rooms:
    """Hold memory that is not in use, and count what is: together never more than was in use at once."""

    def __init__(self) -> None:
        self.used = self._most = self._turn = 0  # the first two in bytes
        self._free: list[tuple[int, Tensor]] = []  # with the turn in which it came back, oldest first
        self._back = deque[Tensor]()  # came back, on any thread and within any call: no lock is taken there
        self._kept = 0  # bytes that stay here even if nobody uses them
        self._locks = True  # until the driver refuses
        self._lock = threading.Lock()

    def take(self, size: int, near: torch.device = CPU) -> Tensor:
        """Return memory for so many bytes with any values in it. It is given back when the last view of it is gone."""
        with self._lock:
            self._gather()
            fits = [at for at, (_, memory) in enumerate(self._free) if size <= len(memory) <= LOOSE * size]
            # of equals the last one that came back: what is too much is not used, then, and goes
            tightest = min(reversed(fits), key=lambda at: len(self._free[at][1]), default=None)
            memory = mapped(size) if tightest is None else self._free.pop(tightest)[1]
            self.used += len(memory)
            self._most = max(self._most, self.used)
            while self._free and self.used + sum(len(each) for _, each in self._free) > self._most:
                del self._free[0]
        if near.type == "cuda" and self._locks and self._most <= LOCKED_BYTES:
            self._locks = lock_pages(memory, near).is_pinned()
        view = np.frombuffer(memory.numpy(), np.uint8, size)  # every view of it, of tensors too, ends in this object
        finalize(view, self._back.append, memory).atexit = False
        return torch.from_numpy(view)

    def next_turn(self) -> None:
        """Let go of what was not in use for a while."""
        with self._lock:
            self._gather()
            self._turn += 1
            there = self.used + sum(len(memory) for _, memory in self._free)
            while self._free and self._turn - self._free[0][0] > IDLE_TURNS and there > self._kept:
                there -= len(self._free.pop(0)[1])

    def keep(self, size: int, count: int, near: torch.device = CPU) -> None:
        """Have memory for so many vectors of a size, and never let go of it."""
        made = [self.take(size, near) for _ in range(count)]
        self._kept = max(self._kept, sum(map(len, made)))

    def _gather(self) -> None:
        while self._back:
            memory = self._back.popleft()
            self.used -= len(memory)
            self._free.append((self._turn, memory))


ROOMS = Rooms()


def room_for(size: int, device: torch.device = CPU, *, near: torch.device = CPU) -> Tensor:
    """Return memory for an encoded vector, uninitialised, that was perhaps used before. `near`: the device that memory
    on the host is copied to and from."""
    if device.type != "cpu" or size < WORTH_MAPPING:
        return torch.empty(size, dtype=torch.uint8, device=device)
    return ROOMS.take(size, near)


def prepare(size: int, near: torch.device) -> None:
    """Have memory for a round's vectors that is locked already: locking holds up all work on the GPU."""
    if size >= WORTH_MAPPING:
        ROOMS.keep(size + size // MARGIN, ROUND_ROOMS, near)


def on_host(payload: Tensor) -> Tensor:
    """Return an encoded vector where links and files can have it: as it is, or copied from a device."""
    return payload if payload.device.type == "cpu" else room_for(len(payload), near=payload.device).copy_(payload)


def mapped(size: int) -> Tensor:
    """Return fresh memory, uninitialised. That of large sizes goes back to the operating system as soon as nobody uses
    it: what malloc has given and taken back, of all threads and sizes, stays with the process."""
    if size < WORTH_MAPPING:
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # pages of 2 MiB, where the kernel has them
        memory.madvise(pages.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
