"""What a network link does to traffic: rate, delay, jitter, stalls, cuts. Times are arguments; nothing here sleeps.

An island has one `Link` for all its streams. `Paths` knows how far apart two peers are. shaped.py applies both.
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
    """Model one direction of a link, shared by threads.

    A token bucket in its simplest form: all it knows is until when the line is busy.
    """

    def __init__(self, bits_per_s: float | None, *, burst_s: float = 0.0) -> None:
        self.bytes_per_s = math.inf if bits_per_s is None else bits_per_s / 8
        self.passed_bytes = 0  # so far
        self._burst_s, self._busy_until = burst_s, -math.inf
        self._lock = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """Return the size of pieces, small enough that streams take turns all the time."""
        slow = max(MIN_PIECE_BYTES, min(SLOW_PIECE_BYTES, self.bytes_per_s * SLOW_PIECE_S))
        return int(min(MAX_PIECE_BYTES, max(slow, self.bytes_per_s * PIECE_S)))

    def reserve(self, size: int, now: float) -> float:
        """Take the line for `size` bytes that are ready at `now`; return when the last of them is through."""
        with self._lock:
            self._busy_until = max(self._busy_until, now - self._burst_s) + size / self.bytes_per_s
            self.passed_bytes += size
            return max(self._busy_until, now)

    def change(self, bits_per_s: float) -> None:
        """Set the rate from now on, in bits per second. What was let through before keeps its time."""
        self.bytes_per_s = bits_per_s / 8

    def reserve_arriving(self, size: int, last_at: float) -> float:
        """Take the line for bytes of which the last arrives at `last_at`; return when they are through.

        The first ones have been passing through before it. Waiting for a whole piece first would add a piece's time to
        every transfer, which no real router does. That holds for pieces of this line's size; of a larger one, a faster
        line has sent all at nearly the same time.
        """
        passing_s = min(size, self.piece_bytes) / self.bytes_per_s
        return max(last_at, self.reserve(size, last_at - passing_s))


class PathPace:
    """Make one stream wait for a line. While it overslept, the line could have been in use: that is made up for."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._overslept_s = 0.0

    def reserve(self, size: int, now: float) -> float:
        """Take the line for `size` bytes, as if they had been ready earlier by the time that was overslept."""
        return self.line.reserve(size, now - self._overslept_s)

    def passed(self, finish: float, now: float, *, slept: bool) -> None:
        """Note that bytes that should have been through at `finish` leave at `now`."""
        behind_s = max(0.0, now - finish)
        self._overslept_s = behind_s if slept else min(self._overslept_s, behind_s)


class Link:
    """Model an island's access to the network. A rate of None means as fast as the machine is."""

    def __init__(self, up_bits_per_s: float | None = None, down_bits_per_s: float | None = None) -> None:
        self.up = Line(up_bits_per_s, burst_s=BURST_S)
        self.down = Line(down_bits_per_s)

    @property
    def piece_bytes(self) -> int:
        """Return the size of pieces that suits both directions: the smaller one."""
        return min(self.up.piece_bytes, self.down.piece_bytes)


@dataclass(frozen=True)
class Path:
    """Describe the path between two peers.

    A lost piece shows as a stall, as under TCP: nothing behind it gets past it.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0  # on top of the delay, uniform
    loss: float = 0.0  # probability for each piece
    stall_s: float = 0.2

    @property
    def takes_time(self) -> bool:
        """Tell whether anything arrives later than it was sent: only then a thread has to take it in meanwhile."""
        return bool(self.delay_s or self.jitter_s or self.loss)

    def arrival(self, sent: float, random: Random) -> float:
        """Draw the time at which a piece arrives that was sent at `sent`: delay, jitter and perhaps a stall."""
        stall = self.stall_s if self.loss and random.random() < self.loss else 0.0
        return sent + self.delay_s + random.uniform(0.0, self.jitter_s) + stall


class Paths:
    """Hold the paths between all peers of this process, and which of them are cut."""

    def __init__(self, default: Path | None = None, *, seed: int = 0) -> None:
        self.default = default or Path()
        self.seed = seed
        self._paths: dict[frozenset[str], Path] = {}
        self._cut: set[frozenset[str]] = set()
        self._watchers: list[Callable[[frozenset[str]], None]] = []
        self._lock = threading.Lock()

    def set(self, one: str, other: str, path: Path) -> None:
        """Set the path between two peers, for streams opened from now on."""
        self._paths[frozenset((one, other))] = path

    def between(self, one: str, other: str) -> Path:
        """Return the path of two peers, the default where none was set."""
        return self._paths.get(frozenset((one, other)), self.default)

    def is_cut(self, one: str, other: str) -> bool:
        """Tell whether two peers cannot connect at present."""
        return frozenset((one, other)) in self._cut

    def cut(self, one: str, other: str) -> None:
        """Break the streams between two peers, and make new ones fail until heal()."""
        pair = frozenset((one, other))
        with self._lock:
            self._cut.add(pair)
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(pair)

    def heal(self, one: str, other: str) -> None:
        """Let two peers connect again. Streams that broke stay broken."""
        with self._lock:
            self._cut.discard(frozenset((one, other)))

    def watch(self, watcher: Callable[[frozenset[str]], None]) -> None:
        """Call the watcher with every pair of peers that is cut from now on."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[frozenset[str]], None]) -> None:
        """Stop calling this watcher, if it is known at all."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
