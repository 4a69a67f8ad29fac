"""When and how much a volunteer lets an island use of their machine: hours of the day, bytes a month, an idle GPU.

Each limit says in words why the island must not train now, or nothing. `diloco.launch.volunteer` heeds them.
"""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from diloco.atomic import write_file
from diloco.comm.transport.link import Link
from diloco.errors import DeviceError
from diloco.units import format_bytes

TRAFFIC = "traffic.json"  # in an island's folder: the bytes of this month, if they are limited
WRITE_S = 1.0
RESERVE = 0.02  # of the month's bytes, for the goodbye
BUSY_PERCENT = 10.0  # of a GPU, by a process that draws: a desktop alone needs less
NVIDIA_SMI_S = 20.0
DAY = 24 * 60  # minutes


@dataclass(frozen=True)
class Hours:
    """Hold the hours of the day in which an island may train, in minutes of local time; a span may pass midnight."""

    spans: tuple[tuple[int, int], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Parse spans such as `22-7`, `22:30-6:15` or `0-6,20-24`; raise ValueError for others."""
        spans = tuple(_span(part) for part in text.split(","))
        return cls(spans, text)

    def reason(self, now: datetime) -> str:
        """Say why an island must not train now; empty if it may."""
        minute = 60 * now.hour + now.minute
        if any(start <= minute < end if start < end else minute >= start or minute < end for start, end in self.spans):
            return ""
        starts = sorted(start for start, _ in self.spans)
        back = next((start for start in starts if start > minute), starts[0])
        return f"it is outside of --hours {self.text}, back at {back // 60:02}:{back % 60:02}"


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,2})(?::([0-5]\d))?\s*-\s*(\d{1,2})(?::([0-5]\d))?\s*", text)
    start, end = (60 * int(found[at]) + int(found[at + 1] or 0) for at in (1, 3)) if found else (0, 0)
    if start == end or start >= DAY or end > DAY:
        raise ValueError("write hours of the day such as 22-7, 22:30-6:15 or 0-6,20-24")
    return start, end


@dataclass(frozen=True)
class MonthlyBytes:
    """Hold how many bytes an island may send and receive in a calendar month, of what its folder says it has."""

    folder: Path
    limit: int

    def reason(self, now: datetime) -> str:
        """Say why an island must not train now; empty if it may. It leaves a little before the limit."""
        used = read_traffic(self.folder, now)
        if used < (1 - RESERVE) * self.limit:
            return ""
        year, month = (now.year, now.month + 1) if now.month < 12 else (now.year + 1, 1)
        what = f"{format_bytes(used)} of --max-month {format_bytes(self.limit)} are used"
        return f"{what}, back on {year}-{month:02}-01"


def read_traffic(folder: Path, now: datetime) -> int:
    """Return the bytes that the island in this folder has moved this month; without a readable file, none."""
    try:
        told = json.loads((folder / TRAFFIC).read_text())
        return int(told["bytes"]) if told["month"] == f"{now:%Y-%m}" else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class TrafficMeter:
    """Add what passes an island's link to the bytes of this month, in its folder, every second."""

    def __init__(self, folder: Path, link: Link, clock: Callable[[], datetime] = datetime.now) -> None:
        self._folder, self._link, self._clock = folder, link, clock
        self._counted = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="traffic", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(WRITE_S):
            self.count()
        self.count()

    def count(self) -> None:
        """Write what has passed since the last call. On a disk that takes nothing it is written with the next."""
        passed, now = self._link.up.passed_bytes + self._link.down.passed_bytes, self._clock()
        if passed == self._counted:
            return
        used = read_traffic(self._folder, now) + passed - self._counted
        with suppress(OSError):
            write_file(self._folder / TRAFFIC, json.dumps({"month": f"{now:%Y-%m}", "bytes": used}) + "\n")
            self._counted = passed

    def close(self) -> None:
        """Write the last bytes, and end."""
        self._stop.set()
        self._thread.join(5)


@dataclass(frozen=True)
class IdleGpu:
    """Find processes of others on the GPUs, by `nvidia-smi`; `own` tells which processes are the island's."""

    own: Callable[[int], bool]
    gpus: frozenset[int] | None = None  # None: all of this machine

    def reason(self, now: datetime) -> str:
        """Say why an island must not train now; empty if it may."""
        others = [each for each in gpu_processes() if self.gpus is None or each.gpu in self.gpus]
        other = next((each for each in others if each.busy and not self.own(each.pid)), None)
        return "" if other is None else f"{other.command} (process {other.pid}) uses GPU {other.gpu}"


@dataclass(frozen=True)
class GpuProcess:
    """Describe a process on a GPU, as a line of `nvidia-smi pmon` does."""

    gpu: int
    pid: int
    computes: bool
    percent: float
    command: str

    @property
    def busy(self) -> bool:
        """Tell whether it counts: it computes, or draws a lot. One of another container cannot be told from ours."""
        return (self.computes or self.percent >= BUSY_PERCENT) and Path(f"/proc/{self.pid}").exists()


def gpu_processes() -> Iterator[GpuProcess]:
    """Yield the processes on this machine's GPUs; raise DeviceError where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "pmon", "-c", "1", "-s", "u"]
    if shutil.which(command[0]) is None:
        raise DeviceError("--yield-gpu asks nvidia-smi who uses the GPU, and it is not installed here: leave that out")
    try:
        done = subprocess.run(command, capture_output=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"nvidia-smi does not say who uses the GPU ({error}): mend that, or leave --yield-gpu out"
        ) from None
    for line in done.stdout.decode(errors="replace").splitlines():  # names of programs may be cut anywhere
        words = line.split()
        if len(words) >= 5 and words[0].isdigit() and words[1].isdigit():
            percent = float(words[3]) if words[3].replace(".", "").isdigit() else 0.0
            yield GpuProcess(int(words[0]), int(words[1]), "C" in words[2], percent, words[-1])
