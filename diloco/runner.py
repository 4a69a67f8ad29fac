"""`diloco run`: prepares the run's folder, listens for signals, trains, and says what to do next."""

import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from diloco.checkpoint.save import saves
from diloco.child import PAUSE, REPEAT_S, handled
from diloco.config import Config
from diloco.configfile import render_config
from diloco.errors import ConfigError, SaveError
from diloco.events import Events, JsonLines, Sink
from diloco.fleetplan import has_log
from diloco.place import take_place
from diloco.terminal import open_view
from diloco.trackers import TensorBoard, WandB
from diloco.trainer import Outcome, Trainer


def run(config: Config, *, resume: bool = False, fresh: bool = False) -> Outcome:
    if resume and fresh:
        raise ConfigError("--resume goes on with the earlier run, --fresh starts again: use one of them")
    refuse_remote(config)
    with take_place(config.island) as place:
        events = Events()
        trainer = Trainer(config, place, events)  # before anything on disk is touched: it refuses what cannot work
        if resume:
            trainer.resume()
        place.leader_first(lambda: open_folder(config, events, resume=resume, fresh=fresh))
        try:
            with stop_on_signal(loud=place.leader) as stop:
                return trainer.run(lambda: stop.asked)
        finally:
            events.close()


def refuse_remote(config: Config) -> None:
    """An island alone has saves, and no log."""
    if config.checkpoint.remote is not None:
        raise ConfigError(
            "checkpoint.remote copies the log of an island that others can join, and this one is alone: "
            "add --islands 1 (connect: alone=False), or leave it out"
        )


def open_folder(config: Config, events: Events, *, resume: bool, fresh: bool, view: bool = True) -> None:
    folder = Path(config.dir)
    try:
        kept = prepare_folder(folder, resume=resume, fresh=fresh)
        (folder / "config.yaml").write_text(render_config(config), encoding="utf-8")
        log_to(folder / "diloco.log")
        for sink in _sinks(config, resume=resume):
            events.attach(sink)
        if view:
            events.attach(open_view())
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None
    if kept is not None:
        events.emit("note", text=f"the earlier run is kept as {kept}")


def log_to(path: Path) -> None:
    """Warnings of the network's threads: for those who look for a reason, not for the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("diloco")
    ours.handlers, ours.propagate = [handler], False


def prepare_folder(folder: Path, *, resume: bool, fresh: bool) -> Path | None:
    """Make the run's folder and lock it; returns where `fresh` moved an earlier run.

    Never trains over an earlier run unasked, never moves or fills a folder that is no run, never joins a run that
    another process is at.
    """
    if folder.exists() and not is_run(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise SaveError(f"{folder} is there already and is no run of ours: it was left alone; set checkpoint.dir")
    if not resume and not fresh and any(has_log(island) or saves(island) for island in folder.glob("island-*/")):
        raise SaveError(
            f"{folder} already holds a run of several islands: add --resume to go on with it, --fresh to start again "
            "(the old one is kept), or --set run=NAME for another run"
        )
    kept = None
    if folder.exists():
        _lock(folder)
        if fresh:
            kept = _free_name(folder.resolve())
            folder.rename(kept)
    if not resume and (found := saves(folder)):
        raise SaveError(
            f"{folder} already holds a run, saved at step {int(found[-1].stem.removeprefix('save-'))}: add --resume to "
            "go on with it, --fresh to start again (the old one is kept), or --set run=NAME for another run"
        )
    if not resume and has_log(folder):
        raise SaveError(
            f"{folder} already holds an island's log of a run: add --resume to go on with it, --fresh to start again "
            "(the old one is kept), or --set run=NAME for another run"
        )
    if not folder.exists():
        folder.mkdir(parents=True)
        _lock(folder)
    return kept


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "identity.key").is_file()


def _lock(folder: Path) -> None:
    """Held until this process ends, however it ends, or releases it."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SaveError(
            f"another process is training in {folder}: wait for it, or set run=NAME for another run"
        ) from None
    _locks.append(lock)


_locks: list[TextIO] = []


def release(folder: Path) -> None:
    """For a process that goes on when its run has ended."""
    for lock in [lock for lock in _locks if Path(lock.name).parent == folder]:
        _locks.remove(lock)
        lock.close()


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return name


def _sinks(config: Config, *, resume: bool) -> Iterator[Sink]:
    yield JsonLines(Path(config.dir) / "events.jsonl", append=resume)
    if config.log.tensorboard:
        yield TensorBoard(Path(config.dir) / "tensorboard")
    if config.log.wandb:
        yield WandB(config)


def nothing_more() -> None:
    """A pause needs no more than that the loop stops."""


class Stop:
    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.pausing = False
        self.on_pause: Callable[[], None] = nothing_more  # called at once, in the midst of a step

    @property
    def asked(self) -> bool:
        return self.asked_at is not None


@contextmanager
def stop_on_signal(*, loud: bool) -> Iterator[Stop]:
    """The first SIGINT or SIGTERM asks the loop to stop after its step; a later one leaves at once. PAUSE asks an
    island among others to stop without contributing what it has: it will come back.

    Not one within a second of the first: launchers pass on a signal that the terminal has already sent to everybody.
    """
    stop = Stop()

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.asked_at is None:
            stop.asked_at, stop.pausing = time.monotonic(), number == PAUSE
            if stop.pausing:
                stop.on_pause()
            if loud:  # a plain write: the handler may have interrupted any other output
                os.write(2, b"\nfinishing this step, then saving (once more to leave at once without saving)\n")
        elif time.monotonic() - stop.asked_at > REPEAT_S:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # the live view had hidden the cursor
            os._exit(128 + number)

    with handled(on_signal):
        yield stop
