"""What a process of an island is doing, and the signs of life by which others know it.

A thread of each process publishes a `Sign` every second (`signs.py`), so a process in a long computation still gives
signs, and one that is stopped does not. `Activity` counts the collective calls: all processes of an island make the
same ones in the same order, so who has made fewer is who the others wait for.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from types import FrameType

COLLECTIVES = os.path.join("torch", "distributed")  # in the path of the code that waits for other processes
SHOWN_FRAMES = 3  # innermost, in which the call of a collective is looked for


@dataclass(frozen=True)
class Sign:
    """Describe what a process was doing when it gave this sign of life."""

    number: int
    host: str
    pid: int
    calls: int = 0  # collectives entered so far
    text: str = "its start"
    where: str = ""  # the innermost line of the main thread
    in_collective: bool = False
    waits: bool = False  # for other islands, which may take hours
    long: bool = True  # a start, a compilation or a save: more patience than for a step
    done: bool = False  # it leaves, and gives no more signs

    def encode(self) -> bytes:
        """Return the bytes that are published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Sign | None":
        """Return what was published; None for bytes that are no sign, such as one that is half written."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None


class Activity:
    """Keep what this process is doing. Set on the main thread, read on that which gives signs of life."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._now = Sign(0, socket.gethostname(), os.getpid())

    def count(self) -> None:
        """Note that a collective call begins: every process of the island makes the same ones in the same order."""
        self._now = replace(self._now, calls=self._now.calls + 1)

    def begin(self, text: str, *, long: bool = False) -> None:
        """Note what is done from now on, such as `inner step 12`; `long`: it may take much longer than a step."""
        self._now = replace(self._now, text=text, long=long, waits=False)

    @contextmanager
    def during(self, text: str, *, waits: bool = False, long: bool = False) -> Iterator[None]:
        """Note what is done inside; `waits`: for other islands, however long that takes."""
        before = self._now
        self._now = replace(before, text=text, waits=waits, long=long)
        yield
        self._now = replace(self._now, text=before.text, waits=before.waits, long=before.long)

    @property
    def now(self) -> Sign:
        """Return what this process is doing, without giving a sign of life. Called on any thread."""
        return self._now

    def leave(self) -> None:
        """Note that this process gives no more signs, and that nobody is to wait for any."""
        self._now = replace(self._now, text="its end", done=True)

    def sign(self) -> Sign:
        """Return the next sign of life, with the line at which the main thread is. Called on any thread."""
        frames = frames_of(threading.main_thread())
        where = f"{frames[0].f_code.co_name} in {_short(frames[0])}" if frames else ""
        inside = any(COLLECTIVES in frame.f_code.co_filename for frame in frames)
        return replace(self._now, number=next(self._numbers), where=where, in_collective=inside)


def frames_of(thread: threading.Thread) -> list[FrameType]:
    """Return the innermost frames of a thread, the innermost first."""
    found: list[FrameType] = []
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and len(found) < SHOWN_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found


def _short(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
