"""Measure what people who look cost an island: its steps while `diloco status TICKET --watch` runs, over those without.

The viewers are processes of their own. Turns of a few steps with and without them follow each other, so that whatever
else the machine does hits both; without them means that they are stopped, for less time than they wait for an answer.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from diloco.bench.processes import WorkerFailed
from diloco.bench.report import Check, Report, time_s
from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity
from diloco.config.schema import Config
from diloco.island.mesh import open_mesh
from diloco.launch.processes import start_process
from diloco.report.sinks import Events
from diloco.run.folder import OWNER_KEY, release
from diloco.run.invites import make_ticket
from diloco.run.local import Connection
from diloco.run.start import RunEntry
from diloco.train.trainer import Trainer

LIMIT = {"cpu": 1.02, "cuda": 1.01}
HOUR_S = 3600.0
SEEN_S = 120.0  # until each viewer has seen the run
SETTLE_S = 1.0  # they look once a second


def measure_viewers(config: Config, *, viewers: int, blocks: int, steps: int, turns: int) -> Report:
    """Compare the step times of an island that others can watch, with so many viewers and without, over blocks.

    A block has so many turns of either kind, of so many steps each.
    """
    with TemporaryDirectory(prefix="diloco-bench-", ignore_cleanup_errors=True) as scratch, ExitStack() as stack:
        folder = Path(scratch) / "run"
        trainer = stack.enter_context(_open_trainer(config, folder))
        advance = partial(time_s, trainer.advance, trainer.place.device, steps)
        advance()  # it warms up
        watching = stack.enter_context(_watched(folder, Path(scratch), viewers))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        before = watching.seen()
        for turn in range(2 * turns * blocks):
            seen = turn % 2 == 0
            watching.go_on() if seen else watching.stop()
            time.sleep(SETTLE_S)
            seconds[seen].append(advance())
        looks = watching.seen() - before
        kind, rounds = trainer.place.device.type, trainer.sync.view.updates
    step_s, unseen_step_s = (
        median(fmean(each[at : at + turns]) for at in range(0, turns * blocks, turns))
        for each in (seconds[True], seconds[False])
    )
    figures = {
        "device": kind, "step_s": step_s, "unseen_step_s": unseen_step_s, "blocks": blocks, "viewers": viewers,
        "looks": looks, "rounds": rounds,
    }  # fmt: skip
    return Report([Check("overhead.viewers_ratio", step_s / unseen_step_s, LIMIT[kind], "lower")], figures)


@contextmanager
def _open_trainer(config: Config, folder: Path) -> Iterator[Trainer]:
    """Found a run that others could join, with all that a real one has: a disk, a directory, a status."""
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"dir": str(folder)})})
    with open_mesh(config.island) as place, ExitStack() as stack:
        events = Events()
        stack.callback(events.close)
        stack.callback(release, folder)
        build = partial(Trainer, place=place, events=events)
        entrance = RunEntry(place, events, stack, Connection("127.0.0.1", name="island-1"), build, view=False)
        trainer = entrance.found(config, fresh=False)
        assert isinstance(trainer, Trainer)
        stack.callback(trainer.batches.close)
        yield trainer


class _Viewers:
    """Stop viewers and let them go on; each leads a process group of its own, and writes what it sees to a file."""

    def __init__(self, processes: "list[subprocess.Popen[bytes]]", files: list[Path]) -> None:
        self._processes, self._files = processes, files

    def seen(self) -> int:
        """Count how often they have seen the run, all together; raise WorkerFailed if one has ended."""
        for process, file in zip(self._processes, self._files, strict=True):
            if process.poll() is not None:
                raise WorkerFailed(f"a viewer ended: {file.read_text()[-300:]}")
        return sum(file.read_bytes().count(b"\n") for file in self._files)

    def stop(self) -> None:
        """Stop them where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them look again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.killpg(process.pid, number)


@contextmanager
def _watched(folder: Path, scratch: Path, viewers: int) -> Iterator[_Viewers]:
    """Start viewers by a ticket to watch, and wait until each has seen the run."""
    addresses = (folder / "addresses").read_text().split()
    owner = Identity.load(folder / OWNER_KEY)
    ticket = make_ticket(
        folder, owner, tuple(addresses), lifetime_s=HOUR_S, peer=None, right=Right.WATCH, islands=viewers
    )
    files = [scratch / f"viewer-{number}.jsonl" for number in range(viewers)]
    processes = list[subprocess.Popen[bytes]]()
    try:
        for file in files:
            with file.open("ab") as out:
                words = ["status", "env:DILOCO_BENCH_TICKET", "--watch", "--json"]
                processes.append(start_process(words, {"DILOCO_BENCH_TICKET": ticket.render()}, out, new_session=True))
        watching, deadline = _Viewers(processes, files), time.monotonic() + SEEN_S
        while watching.seen() < viewers or not all(file.stat().st_size for file in files):
            if time.monotonic() > deadline:
                raise WorkerFailed(f"the viewers have not seen the run within {SEEN_S:.0f} s")
            time.sleep(0.1)
        yield watching
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
