"""Measure what it costs to keep everything: steps while a save and a snapshot are written, and bytes of the log.

An island trains by itself. Now and then a save of all of it and a snapshot of its outer state are begun, as in a run,
and the steps that fall into the writing are compared with those in between. The log is that of two real islands.
"""

import os
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from diloco.bench.bare import BareConfig
from diloco.bench.crew import crew
from diloco.bench.report import Check, Report, time_s
from diloco.bench.team import trainer_of
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import NOTHING, Journal
from diloco.checkpoint.log.segments import segment_paths
from diloco.checkpoint.log.snapshot import SnapshotContents, snapshots
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.island.mesh import pick_device
from diloco.run.join import alone
from diloco.train.trainer import Trainer

WARM_UP = 3  # steps
CODEC = "int4"
NAMES = ("A", "B")


def measure(*, device: str, blocks: int, values: int, rounds: int) -> Report:
    """Compare step times and bytes; `blocks` of steps run while files are written, and as many without."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # a core is left, as beside an accelerator
    with TemporaryDirectory(prefix="diloco-bench-") as folder:
        stepping = _steps(Path(folder) / "outer", device, blocks)
        logging = _log_bytes(Path(folder) / "log", values, rounds)
    return Report(
        [
            Check("checkpoint.step_ratio", stepping["written_step_s"] / stepping["step_s"], 1.03, "lower"),
            Check("checkpoint.byte_saving", logging["snapshots_bytes"] / logging["log_bytes"], 10.0, "higher"),
        ],
        {**stepping, **logging},
    )


def _steps(folder: Path, device: str, blocks: int) -> dict[str, Any]:
    """Return the median seconds of a step with and without files being written, and of the copy before it."""
    during: list[float] = []
    between: list[float] = []
    copies: list[float] = []
    with trainer_of(_config(device)) as (trainer, _), alone(trainer):
        place = trainer.place.device
        store = DiskStore(folder, lambda what, text: None, keep=1)
        store.begin("", "", 0, known=True)  # as in the middle of a run: nothing hurries
        for _ in range(WARM_UP):
            trainer.advance()
        for block in range(1, blocks + 1):
            copies.append(_begin_writing(trainer, store, block))
            found: list[float] = []
            while trainer.saver.writing or store.writing_snapshot:
                found.append(time_s(trainer.advance, place))
            during += found[:-1]  # at the end of the last one nothing was being written
            between += [time_s(trainer.advance, place) for _ in found[:-1]]
        store.close()
    return {
        "device": place.type, "parameters": trainer.island.layout.size, "step_s": median(between),
        "written_step_s": median(during), "steps": len(during), "copy_s": median(copies),
    }  # fmt: skip


def _begin_writing(trainer: Trainer, store: DiskStore, block: int) -> float:
    """Begin a save and a snapshot; return the seconds that training waits for them."""
    started = time.perf_counter()
    trainer.begin_save()
    assert trainer.rounds is not None
    vectors = trainer.rounds.driver.replica.pin_now(once=True)
    store.snapshot(SnapshotContents(block, f"{block:064x}", (block,), {}, vectors))
    return time.perf_counter() - started


def _config(device: str) -> Config:
    cuda = pick_device(device).type == "cuda"
    return parse_config({
        "run": "checkpoint", "model": {"preset": "150m", "vocab": 32768} if cuda else {"preset": "35m"},
        "data": {"sequence": 1024 if cuda else 32}, "island": {"batch": 32 if cuda else 1, "device": device},
        "inner": {"steps": 100_000, "warmup": 2}, "sync": {"every": 50_000}, "evaluate": {"every": 0},
        "log": {"every": 10},
    })  # fmt: skip


def _log_bytes(folder: Path, values: int, rounds: int) -> dict[str, Any]:
    """Return the bytes that an island's log has after some rounds, and what as many snapshots would have."""
    with crew(BareConfig(values, pace_s=0.1, codec=CODEC, folder=str(folder)), NAMES) as team:
        team.await_commits(rounds, NAMES)
        team.stand_still()
    journal = Journal.read(folder / NAMES[0])
    updates = sum(entry.payload != NOTHING for entry in journal.entries.values())
    written = sum(path.stat().st_size for path in segment_paths(folder / NAMES[0]))
    (snapshot,) = snapshots(folder / NAMES[0])
    of_one = sum(path.stat().st_size for path in snapshot.iterdir())
    return {"rounds": updates, "log_bytes": written, "snapshots_bytes": updates * of_one}
