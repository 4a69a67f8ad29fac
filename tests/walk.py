"""Walk through the README as a new user does: `python tests/walk.py` (`make walk`), and print how long it took.

From a fresh clone, in an environment of its own: install, train, found a run, join it, kill the founder, let it come
back, sample a text. The commands are the README's, with stand-ins for what is a reader's own. It fails if one of them
does, or if all of it took more than LIMIT_MIN minutes on an idle machine with two cores (`--any-time` only says so).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
LIMIT_MIN = 6.0
PATIENCE_S = 900.0  # for anything that is waited for: a machine may be busy
INSTALL = "make install && source .venv/bin/activate"
QUICKSTART = "diloco run examples/quickstart.yaml"
SAMPLE = 'diloco sample quickstart "def main("'
FOUND = "diloco run CONFIG --islands 1 --host ADDRESS"
TICKET = "diloco ticket show NAME"
JOIN = "diloco join TICKET"
STATUS = "diloco status NAME"
SHOWN = (INSTALL, QUICKSTART, SAMPLE, FOUND, TICKET, JOIN, STATUS)  # in the README, as they stand
STAND_INS = {"CONFIG": "examples/islands.yaml", "ADDRESS": "127.0.0.1", "NAME": "islands"}
LONG = " --set inner.steps=1000000"  # it is stopped


class Walk:
    """Type commands in a clone, and say when each was done."""

    def __init__(self, clone: Path) -> None:
        self.clone, self._began, self._last = clone, time.monotonic(), time.monotonic()

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def say(self, text: str) -> None:
        now = time.monotonic()
        print(f"{self.minutes:5.1f} min  {now - self._last:6.1f} s  {text}", flush=True)
        self._last = now

    def words(self, line: str) -> list[str]:
        for name, value in STAND_INS.items():
            line = line.replace(name, value)
        activate = "" if line.startswith("make") else "source .venv/bin/activate && "
        return ["bash", "-c", f"{activate}exec {line}" if activate else line]

    def type(self, line: str) -> str:
        """Type a command, wait for its end, and return what it printed; it must end well."""
        done = subprocess.run(self.words(line), cwd=self.clone, capture_output=True, text=True, env=environment())
        if done.returncode:
            sys.exit(f"{line} failed ({done.returncode}):\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        self.say(line)
        return done.stdout

    @contextmanager
    def started(self, line: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command that goes on; whatever happens, nothing of it stays."""
        log = (self.clone / "walk.log").open("ab")
        process = subprocess.Popen(
            self.words(line), cwd=self.clone, stdout=log, stderr=log, env=environment(), start_new_session=True
        )
        try:
            yield process
        finally:
            kill(process)
            log.close()

    def wait(self, what: str, condition: Callable[[], bool], *processes: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            gone = [process for process in processes if process.poll() is not None]
            if gone or time.monotonic() > deadline:
                sys.exit(f"{what}: {'a command has ended' if gone else 'in vain'}\n{self.log()}")
            time.sleep(0.2)
        self.say(what)

    def log(self) -> str:
        return (self.clone / "walk.log").read_text(errors="replace")[-4000:]

    def rounds(self, island: Path) -> list[set[str]]:
        """Return who contributed to each round that this island has seen."""
        events = island / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        told = [json.loads(line) for line in lines if line.startswith('{"event": "round"') and line.endswith("}")]
        return [set(each["contributors"]) for each in told if each["contributors"]]


def environment() -> dict[str, str]:
    """Return this process's, without an environment of Python's around it; islands that share cores have one each."""
    away = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL", "DILOCO_TICKET")
    return {name: value for name, value in os.environ.items() if name not in away} | {"OMP_NUM_THREADS": "1"}


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def leave(process: subprocess.Popen[bytes]) -> None:
    """Press Ctrl-C, and wait for a good end."""
    process.send_signal(signal.SIGINT)
    if code := process.wait(PATIENCE_S):
        sys.exit(f"an island that was asked to leave ended with {code}")


def walk(clone: Path) -> float:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    path = Walk(clone)
    path.type(INSTALL)
    path.type(QUICKSTART)
    print(path.type(f"{SAMPLE} --tokens 60"))
    founder, second = clone / "runs" / "islands", clone / "runs" / "second"
    with path.started(FOUND + LONG) as first:
        path.wait("the run is founded", (founder / "ticket").exists, first)
        ticket = path.type(TICKET).split()[-1]
        with path.started(f"{JOIN.replace('TICKET', ticket)} --name second --dir runs/second") as other:
            both = {"island-1", "second"}
            path.wait("both islands contribute", lambda: both in path.rounds(second), first, other)
            path.type(STATUS)
            kill(first)
            path.wait("the founder is killed, the other goes on", lambda: path.rounds(second)[-1] == {"second"}, other)
            with path.started(f"{FOUND}{LONG} --resume") as again:
                path.wait("the founder is back", lambda: path.rounds(second)[-1] == both, again, other)
                leave(other)
                leave(again)
    path.say("both have left")
    text = path.type('diloco sample runs/second "def main(" --tokens 60')
    if len(text) < 20:
        sys.exit(f"the sampled text is short: {text!r}")
    print(text)
    return path.minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--any-time", action="store_true", help="however long it takes")
    any_time = parser.parse_args().any_time
    with TemporaryDirectory(prefix="diloco-walk-") as folder:
        minutes = walk(Path(folder) / "diloco")
    print(f"from clone to sampled text: {minutes:.1f} minutes (limit {LIMIT_MIN:g} on two idle cores)")
    sys.exit(minutes > LIMIT_MIN and not any_time)


if __name__ == "__main__":
    main()
