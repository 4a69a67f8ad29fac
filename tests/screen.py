"""A program in a real pseudo-terminal, and what a person would see of it."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pyte

SEEN_S = 120.0


class Screen:
    """Run a program in a terminal of its own; `lines` is what is on its screen now, `text` all that was written."""

    def __init__(
        self, command: Sequence[str], *, width: int = 120, height: int = 30, cwd: Path | None = None,
        environment: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        self._controller, terminal = pty.openpty()
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self._lock, self.text, self.frames = threading.Lock(), "", list[str]()
        self.resize(width, height)
        outside = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=cwd, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**outside, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other side is closed
            while chunk := os.read(self._controller, 65536):
                with self._lock:
                    self._stream.feed(chunk)
                    self.text += chunk.decode(errors="replace")
                    self.frames.append("\n".join(self.screen.display))

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without blanks at the ends."""
        with self._lock:
            return [line.rstrip() for line in self.screen.display if line.strip()]

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size, as by the corner of its window."""
        with self._lock:
            self.screen.resize(height, width)
            fcntl.ioctl(self._controller, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        """Type: \\x03 is Ctrl-C."""
        os.write(self._controller, keys.encode())

    def wait_for(self, condition: Callable[[list[str]], bool], limit_s: float = SEEN_S) -> list[str]:
        """Wait until the screen looks so, and return it; say what is there if it never does."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if condition(lines := self.lines):
                return lines
            if self.process.poll() is not None:
                self._reader.join(5)
                if condition(lines := self.lines):
                    return lines
                break
            time.sleep(0.05)
        raise AssertionError("it never looked so:\n" + "\n".join(self.lines))

    def end(self, limit_s: float = SEEN_S) -> int:
        """Wait for the program's end, and return its exit code."""
        code = self.process.wait(limit_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._controller)


def diloco(*arguments: object) -> list[str]:
    """The command line of diloco, as a list."""
    return [sys.executable, "-m", "diloco", *map(str, arguments)]
