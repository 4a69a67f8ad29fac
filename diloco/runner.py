"""`diloco run`: prepares the run's folder, listens for signals, trains, and says what to do next."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from diloco.checkpoint.save import saves
from diloco.config import Config
from diloco.configfile import render_config
from diloco.errors import SaveError
from diloco.events import Events, JsonLines, Sink
from diloco.place import take_place
from diloco.terminal import open_view
from diloco.trackers import TensorBoard, WandB
from diloco.trainer import Outcome, Trainer


def run(config: Config, *, resume: bool = False, fresh: bool = False) -> Outcome:
    with take_place(config.island) as place:
        if place.leader:
            prepare_folder(config, resume=resume, fresh=fresh)
        events = Events(_sinks(config) if place.leader else ())
        try:
            trainer = Trainer(config, place, events)
            if resume:
                trainer.resume()
            with stop_on_signal(loud=place.leader) as stop:
                return trainer.run(lambda: stop.asked)
        finally:
            events.close()


def prepare_folder(config: Config, *, resume: bool, fresh: bool) -> None:
    """Make the run's folder; never train over somebody's earlier run unasked."""
    folder = Path(config.dir)
    if fresh and folder.exists():
        folder.rename(_free_name(folder))
    if not resume and (found := saves(folder)):
        raise SaveError(
            f"{folder} already holds a run, saved at step {int(found[-1].name.removeprefix('save-'))}: add --resume "
            "to go on with it, or --fresh to start again (the old one is kept under another name)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(render_config(config), encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return name


def _sinks(config: Config) -> Iterator[Sink]:
    yield JsonLines(Path(config.dir) / "events.jsonl")
    if config.log.tensorboard:
        yield TensorBoard(Path(config.dir) / "tensorboard")
    if config.log.wandb:
        yield WandB(config)
    yield open_view()


class Stop:
    asked = False


@contextmanager
def stop_on_signal(*, loud: bool) -> Iterator[Stop]:
    """The first SIGINT or SIGTERM asks the loop to stop after its step; the second leaves at once."""
    stop = Stop()

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.asked:
            os._exit(128 + number)
        stop.asked = True
        if loud:  # a plain write: the handler may have interrupted any other output
            os.write(2, b"\nfinishing this step, then saving (once more to leave at once without saving)\n")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
