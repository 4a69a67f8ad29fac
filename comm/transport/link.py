"""What a network link does to traffic: rate, delay, jitter, stalls, cuts. Times are arguments; nothing here sleeps.

An island has one `Link` for all its streams. `Paths` says how far apart two peers are. shaped.py applies both.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

MIN_PIECE_BYTES = 8 * 1024  # smaller pieces would cost more than 1 % in headers
MAX_PIECE_BYTES = 2 * 1024 * 1024
PIECE_S = 0.016
# On a slow link a piece takes longer, up to this size: each wakes a thread on both sides, and takes time from training.
SLOW_PIECE_BYTES = 32 * 1024
SLOW_PIECE_S = 0.064
# A sleep that ends late must not lose rate for good. This much may be made up for, and sent at once after idling.
BURST_S = 0.008


class Line:
    """One direction of a link, shared by threads. A token bucket in its simplest form: until when it is busy."""

    def __init__(self, bits_per_s: float | None, *, burst_s: float = 0.0) -> None:
        self.bytes_per_s = math.inf if bits_per_s is None else bits_per_s / 8
        self.passed_bytes = 0  # so far
        self._burst_s, self._busy_until = burst_s, -math.inf
        self._lock = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """Small enough that streams take turns all the time."""
        slow = max(MIN_PIECE_BYTES, min(SLOW_PIECE_BYTES, self.bytes_per_s * SLOW_PIECE_S))
        return int(min(MAX_PIECE_BYTES, max(slow, self.bytes_per_s * PIECE_S)))

    def reserve(self, size: int, now: float) -> float:
        """When the last of `size` bytes that are ready at `now` is through."""
        with self._lock:
            self._busy_until = max(self._busy_until, now - self._burst_s) + size / self.bytes_per_s
            self.passed_bytes += size
            return max(self._busy_until, now)

    def change(self, bits_per_s: float) -> None:
        """The rate from now on. What was let through before keeps its time."""
        self.bytes_per_s = bits_per_s / 8

    def reserve_arriving(self, size: int, last_at: float) -> float:
        """For bytes of which the last arrives at `last_at`: the first ones have been passing through before it.

        Waiting for a whole piece first would add a piece's time to every transfer, which no real router does. That
        holds for pieces of this line's size; of a larger one, a faster line has sent all at nearly the same time.
        """
        passing_s = min(size, self.piece_bytes) / self.bytes_per_s
        return max(last_at, self.reserve(size, last_at - passing_s))


class PathPace:
    """How one stream waits for a line. What it overslept, the line could have been in use: that is made up for."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._overslept_s = 0.0

    def reserve(self, size: int, now: float) -> float:
        return self.line.reserve(size, now - self._overslept_s)

    def passed(self, finish: float, now: float, *, slept: bool) -> None:
        """Bytes that should have been through at `finish` go out at `now`."""
        behind_s = max(0.0, now - finish)
        self._overslept_s = behind_s if slept else min(self._overslept_s, behind_s)


class Link:
    """An island's access to the network. None: as fast as the machine goes."""

    def __init__(self, up_bits_per_s: float | None = None, down_bits_per_s: float | None = None) -> None:
        self.up = Line(up_bits_per_s, burst_s=BURST_S)
        self.down = Line(down_bits_per_s)

    @property
    def piece_bytes(self) -> int:
        return min(self.up.piece_bytes, self.down.piece_bytes)


@dataclass(frozen=True)
class Path:
    """One way between two peers. A lost piece shows as a stall, as under TCP: nothing behind it gets past it."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # on top of the delay, uniform
    loss: float = 0.0  # probability for each piece
    stall_s: float = 0.2

    @property
    def takes_time(self) -> bool:
        return bool(self.delay_s or self.jitter_s or self.loss)

    def arrival(self, sent: float, random: Random) -> float:
        stall = self.stall_s if self.loss and random.random() < self.loss else 0.0
        return sent + self.delay_s + random.uniform(0.0, self.jitter_s) + stall


class Paths:
    """The paths between all peers of this process, and which of them are cut."""

    def __init__(self, default: Path | None = None, *, seed: int = 0) -> None:
        self.default = default or Path()
        self.seed = seed
        self._paths: dict[frozenset[str], Path] = {}
        self._cut: set[frozenset[str]] = set()
        self._watchers: list[Callable[[frozenset[str]], None]] = []
        self._lock = threading.Lock()

    def set(self, one: str, other: str, path: Path) -> None:
        """For streams opened from now on."""
        self._paths[frozenset((one, other))] = path

    def between(self, one: str, other: str) -> Path:
        return self._paths.get(frozenset((one, other)), self.default)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def cut(self, one: str, other: str) -> None:
        """Their streams break, new ones fail, until heal()."""
        pair = frozenset((one, other))
        with self._lock:
            self._cut.add(pair)
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(pair)

    def heal(self, one: str, other: str) -> None:
        with self._lock:
            self._cut.discard(frozenset((one, other)))

    def watch(self, watcher: Callable[[frozenset[str]], None]) -> None:
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[frozenset[str]], None]) -> None:
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
