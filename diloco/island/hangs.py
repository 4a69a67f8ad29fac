"""Find the process of an island that hangs, from the signs of life of all. Pure: signs and the time come in.

| what is seen | what it means |
| --- | --- |
| signs come, calls are made | it works, however slowly |
| signs come, and nobody has made a call for `hang_s` | a collective that one did not enter, or that lost somebody |
| signs come, and one waits for other islands | it works: that may take hours |
| no signs, and the system says *stopped* | SIGSTOP: it does nothing until somebody continues it |
| no signs, but it uses the processor | one long call that lets no other thread run; after `hang_s` it hangs |
| no signs, nothing else known of it | it is stopped, its machine is gone, or cut off |

A start, the first step (which compiles) and a save get LONG times as long. Who watches may have been stopped itself:
what it did not see does not count.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from diloco.island.activity import Sign

SIGN_S = 1.0  # between two signs of a process
STOPPED_S = 8.0  # without a sign, of a process that the system calls stopped
SILENT_S = 30.0  # without a sign, of a process of which nothing else is known
LONG = 4  # times `hang_s`, for what may take long
SLEPT_S = 5.0  # between two looks: then who watches was not running


@dataclass(frozen=True)
class ProcessState:
    """Describe what the operating system says of a process."""

    stopped: bool
    cpu_s: float


@dataclass(frozen=True)
class Hang:
    """Name the process that hangs, and say what is known of it."""

    rank: int
    text: str


@dataclass
class _Seen:
    """Keep what was seen of one process, and since when it is so, by the clock of who watches."""

    since: float  # the last sign
    moved: float  # the last call, or the last change of what it does
    used: float  # when it last used the processor
    sign: Sign | None = None
    state: ProcessState | None = None


class HangDetector:
    """Watch the processes of one island, by the clock of who watches."""

    def __init__(self, world: int, hang_s: float, now: float, pids: Mapping[int, int] = MappingProxyType({})) -> None:
        """Watch from now on; `pids` are the numbers of those processes that run on this machine, where known."""
        self.world, self.hang_s, self._pids = world, hang_s, pids
        self._seen = [_Seen(now, now, now) for _ in range(world)]
        self._looked = now

    def wake(self, now: float) -> float:
        """Note that who watches looks now. If it has not for long, nothing that it did not see counts: return that
        time."""
        slept_s = now - self._looked
        self._looked = now
        if slept_s <= SLEPT_S:
            return 0.0
        for seen in self._seen:
            seen.since, seen.moved, seen.used = seen.since + slept_s, seen.moved + slept_s, seen.used + slept_s
        return slept_s

    def observe(self, rank: int, sign: Sign | None, state: ProcessState | None, now: float) -> None:
        """Take in the newest sign of a process, and what the system says of it, where that is known."""
        seen = self._seen[rank]
        if state is not None and (seen.state is None or state.cpu_s > seen.state.cpu_s):
            seen.used = now
        seen.state = state
        if sign is None or (seen.sign is not None and sign.number == seen.sign.number):
            return
        if seen.sign is None or (sign.calls, sign.text) != (seen.sign.calls, seen.sign.text):
            seen.moved = now
        seen.since, seen.sign = now, sign

    def last_sign(self, rank: int) -> Sign | None:
        """Return the newest sign that was seen of a process; None if it has never given one."""
        return self._seen[rank].sign

    def find(self, now: float, heard: float | None = None) -> Hang | None:
        """Return which process hangs; None while all work. `heard`: up to when signs could be heard at all."""
        heard = now if heard is None else heard
        return next(self._silent(now, heard), None) or self._stuck(heard)

    def _silent(self, now: float, heard: float) -> Iterator[Hang]:
        for rank, seen in enumerate(self._seen):
            silent_s = now - seen.since
            if seen.sign is not None and seen.sign.done:
                continue
            if seen.state is not None and seen.state.stopped:
                if silent_s >= STOPPED_S:
                    yield Hang(rank, f"{self.name(rank)} is stopped (SIGSTOP) {_since(silent_s)}{self._doing(rank)}")
                continue
            limit = SILENT_S if seen.sign is not None else LONG * self.hang_s
            if seen.state is not None and now - seen.used < SILENT_S:
                limit = max(limit, self.hang_s)
            if heard - seen.since >= limit:
                yield Hang(rank, f"{self.name(rank)} gives no sign of life {_since(silent_s)}{self._doing(rank)}")

    def _stuck(self, now: float) -> Hang | None:
        signs = {rank: seen.sign for rank, seen in enumerate(self._seen) if seen.sign is not None}
        present = {rank: sign for rank, sign in signs.items() if not sign.done}
        if len(signs) < self.world or not present or any(sign.waits for sign in present.values()):
            return None
        idle_s = now - max(seen.moved for seen in self._seen)
        if idle_s < self.hang_s * (LONG if any(sign.long for sign in present.values()) else 1):
            return None
        fewest = min(sign.calls for sign in present.values())
        late = {rank: sign for rank, sign in present.items() if sign.calls == fewest}
        outside = [rank for rank, sign in late.items() if not sign.in_collective]
        rank = min(outside or late)
        others = [f"process {each}{doing(sign)}" for each, sign in present.items() if each != rank]
        text = f"{self.name(rank)} has not moved on {_since(idle_s)}{self._doing(rank)}"
        return Hang(rank, "; ".join([text, *others]))

    def name(self, rank: int) -> str:
        """Name a process for people: its rank, and its host and number where they are known."""
        sign, pid = self._seen[rank].sign, self._pids.get(rank)
        host, pid = (sign.host, sign.pid) if sign is not None else (socket.gethostname(), pid)
        return f"process {rank} of {self.world}" + (f" (host {host}, pid {pid})" if pid is not None else "")

    def _doing(self, rank: int) -> str:
        return doing(self._seen[rank].sign)


def doing(sign: Sign | None) -> str:
    """Say what a process was doing at its last sign, to end a sentence with."""
    if sign is None:
        return ", before its first sign"
    return f", in {sign.text}" + (f" ({sign.where})" if sign.where else "")


def _since(seconds: float) -> str:
    return f"since {time.strftime('%H:%M:%S', time.localtime(time.time() - seconds))} ({seconds:.0f} s)"


def process_state(pid: int) -> ProcessState | None:
    """Return what this machine's kernel says of a process; None where it does not (another system, no such process)."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcessState(fields[0] == "T", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return None
