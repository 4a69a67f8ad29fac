"""Four islands on this machine train one model over a slow link; one of them is killed, and comes back. Then two over a
slower one, with a report of what it cost.

    make demo     or     python examples/demo.py

Real processes, real connections (TLS over an emulated link of 50 Mbit/s and 20 ms), a real SIGKILL.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.report.events import Round
from diloco.report.watching import Tail

ROOT = Path(__file__).parent.parent
FOLDER = Path("runs/demo")
ISLANDS, VICTIM = 4, "island-3"
STEPS = 200 * max(1, (os.cpu_count() or 1) // 4)  # enough for an island to come back on a machine that trains faster
ALL_THERE = 2  # rounds with everybody, before one is killed
COMMAND = [
    sys.executable, "-m", "diloco", "run", str(ROOT / "examples" / "islands.yaml"), "--islands", str(ISLANDS),
    "--fresh", "--link", "50mbit,20ms", "--set", "run=demo", "--set", f"inner.steps={STEPS}",
    "--set", f"elastic.min_islands={ISLANDS - 1}",  # so that nobody trains ahead while the others start
]  # fmt: skip
SLOW_FOLDER = Path("runs/demo-slow-link")
SLOW_LINK = [
    sys.executable, "-m", "diloco", "simulate", str(ROOT / "examples" / "islands.yaml"), "--islands", "2",
    "--link", "5mbit,80ms", "--set", f"run={SLOW_FOLDER.name}", "--set", "inner.steps=64",
    "--set", "elastic.min_islands=2",
]  # fmt: skip


class Story:
    """Reads the founder's events and says what to notice."""

    def __init__(self) -> None:
        self.killed_after = 0  # the round
        self.without: list[int] = []
        self.back: list[int] = []
        self._all_there = 0
        self._tail = Tail(FOLDER / "island-1" / "events.jsonl")

    def look(self) -> None:
        for event in self._tail.read():
            if isinstance(event, Round) and event.contributors:
                self._round(event)

    def _round(self, event: Round) -> None:
        number, contributors = event.round, event.contributors
        if not self.killed_after:
            self._all_there += len(contributors) == ISLANDS
            if self._all_there == ALL_THERE:
                self._kill(number)
        elif VICTIM not in contributors:
            self.without.append(number)
            if len(self.without) == 1:
                notice(f"round {number} is complete without {VICTIM}: the others did not stop")
        elif self.without:
            self.back.append(number)
            if len(self.back) == 1:
                story = "it had its own disk, and fetched what it had missed"
                notice(f"{VICTIM} is back and contributed to round {number}: {story}")

    def _kill(self, number: int) -> None:
        pids = {entry["name"]: entry["pid"] for entry in json.loads((FOLDER / "islands.json").read_text())}
        pid = pids[VICTIM]
        notice(f"rounds with all {ISLANDS} islands; now kill -9 {pid}, which is {VICTIM}")
        os.kill(pid, signal.SIGKILL)
        self.killed_after = number

    @property
    def complete(self) -> bool:
        return bool(self.without and self.back)


def notice(text: str) -> None:
    print(f"\n>>> {text}\n", flush=True)


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Ctrl-C is passed on once; whatever happens here, the launcher ends, and its islands with it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
    try:
        yield process
    except KeyboardInterrupt:
        process.terminate()
        process.wait(60)
    finally:
        process.kill()


def follow(command: list[str], look: Callable[[], None] = lambda: None) -> int:
    print(f"$ diloco {' '.join(command[3:])}\n", flush=True)
    with started(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(shortened(line), end="", flush=True)
            look()
        return process.wait()
    return 1  # interrupted


def main() -> int:
    return four_islands() or slow_link()


def slow_link() -> int:
    notice("two islands over 5 Mbit/s and 80 ms: what does such a link cost?")
    code = follow(SLOW_LINK)
    if code == 0:
        notice(
            f"{SLOW_FOLDER}/report.html, for a browser: losses, what each island did and when, what its link carried"
        )
    return code


def four_islands() -> int:
    begun, story = time.monotonic(), Story()
    code = follow(COMMAND, story.look)
    seconds = time.monotonic() - begun
    if code == 0 and story.complete:
        missed, after = len(story.without), len(story.back)
        notice(
            f"{seconds:.0f} s. {VICTIM} missed {missed} rounds and was in {after} after that; all hold the same bits"
        )
        return 0
    notice(f"{seconds:.0f} s. This is not what should have happened: {FOLDER}/island-*/output.log says more")
    return 1


def shortened(line: str) -> str:
    return f"{line[:60]}…\n" if line.startswith("ticket: ") else line


if __name__ == "__main__":
    sys.exit(main())
