"""Declare `diloco demo`: four islands on this machine train one model over a slow link; one of them is killed, and
comes back. Then two over a slower one, with a report of what it cost.

Real processes, real connections (TLS over an emulated link of 50 Mbit/s and 20 ms), a real SIGKILL. It brings its own
configuration, which is what examples/islands.yaml is in a checkout.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import SaveError
from diloco.units import counted

if TYPE_CHECKING:
    from diloco.report.events import Round

CONFIG = """\
# diloco demo wrote this: small enough for four islands on two CPU cores. What there is to see are the rounds.
run: demo
model: {preset: tiny}
data: {source: stdlib, sequence: 64}
island: {batch: 4}
inner: {lr: 3e-3, warmup: 20, schedule: cosine, steps: 200}
outer: {optimizer: nesterov, lr: auto, momentum: auto}
sync: {every: 8, codec: int8}
elastic: {silence_s: 3, straggler: 3}       # patient: islands that share two cores are not equally fast
evaluate: {samples: 32}
log: {every: 4}
"""
FILE, FOLDER = Path("runs/demo.yaml"), Path("runs/demo")
ISLANDS, VICTIM = 4, "island-3"
STEPS = 200 * max(1, (os.cpu_count() or 1) // 4)  # enough for an island to come back on a machine that trains faster
ALL_THERE = 2  # rounds with everybody, before one is killed
COMMAND = [
    sys.executable, "-m", "diloco", "run", str(FILE), "--islands", str(ISLANDS),
    "--fresh", "--link", "50mbit,20ms", "--set", f"inner.steps={STEPS}",
    "--set", f"elastic.min_islands={ISLANDS - 1}",  # so that nobody trains ahead while the others start
]  # fmt: skip
SLOW_FOLDER = Path("runs/demo-slow-link")
SLOW_LINK = [
    sys.executable, "-m", "diloco", "simulate", str(FILE), "--islands", "2",
    "--link", "5mbit,80ms", "--set", f"run={SLOW_FOLDER.name}", "--set", "inner.steps=64",
    "--set", "elastic.min_islands=2",
]  # fmt: skip


def demo() -> None:
    """Watch four islands train; one is killed and comes back.

    Takes about three minutes on two cores, in runs/ below this folder, and needs neither a GPU nor a network. Then two
    islands train over a slow link, which ends with a report. Ctrl-C ends it.
    """
    try:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(CONFIG)
    except OSError as error:
        raise SaveError(f"{FILE} cannot be written ({error.strerror}): run the demo in a folder of yours") from None
    sys.exit(four_islands() or slow_link())


class Story:
    """Read the founder's events, and say what to notice."""

    def __init__(self) -> None:
        from diloco.report.watching import Tail

        self.killed_after = 0  # the round
        self.without: list[int] = []
        self.back: list[int] = []
        self._all_there = 0
        self._tail = Tail(FOLDER / "island-1" / "events.jsonl")

    def look(self) -> None:
        """Read what has happened since the last call; kill an island when all have trained together for a while."""
        from diloco.report.events import Round

        for event in self._tail.read():
            if isinstance(event, Round) and event.contributors:
                self._round(event)

    def _round(self, event: "Round") -> None:
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
        """Tell whether rounds went on without the island, and it has come back."""
        return bool(self.without and self.back)


def notice(text: str) -> None:
    """Print a remark that stands out."""
    print(f"\n>>> {text}\n", flush=True)


def follow(command: list[str], look: Callable[[], None] = lambda: None) -> int:
    """Show a command and what it prints, look at each line, and return its exit code; 130 after Ctrl-C.

    Ctrl-C is passed on once; whatever happens here, the command ends, and its islands with it.
    """
    print(f"$ diloco {' '.join(command[3:])}\n", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            # the ticket is long, and a secret
            print(f"{line[:60]}…\n" if line.startswith("ticket: ") else line, end="", flush=True)
            look()
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait(60)
        return 130
    finally:
        process.kill()


def slow_link() -> int:
    """Train two islands over a slow link, and say where the report is; without plotly there is none."""
    if find_spec("plotly") is None:
        notice("with plotly this goes on with a slow link and a report: pip install 'diloco[plots]'")
        return 0
    notice("two islands over 5 Mbit/s and 80 ms: what does such a link cost?")
    code = follow(SLOW_LINK)
    if code == 0:
        notice(
            f"{SLOW_FOLDER}/report.html, for a browser: losses, what each island did and when, what its link carried"
        )
    return code


def four_islands() -> int:
    """Train four islands, kill one, and return 0 if the others went on and it came back."""
    begun, story = time.monotonic(), Story()
    code = follow(COMMAND, story.look)
    seconds = time.monotonic() - begun
    if code == 0 and story.complete:
        missed, after = len(story.without), len(story.back)
        notice(
            f"{seconds:.0f} s. {VICTIM} missed {counted(missed, 'round')} and was in {after} after that; "
            "all hold the same bits"
        )
        return 0
    if code == 130:
        notice(f"stopped after {seconds:.0f} s: diloco demo begins again")
        return code
    notice(f"{seconds:.0f} s. This is not what should have happened: {FOLDER}/island-*/output.log says more")
    return 1
