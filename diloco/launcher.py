"""Several islands on this machine, each a process of its own: starts them, watches them, brings back those that die.

No island is special once the run is on. The first one founds it; if it dies, it comes back as a joiner like any other,
with a ticket that names the addresses of all.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from diloco.board import Board
from diloco.configfile import render_config
from diloco.errors import SaveError
from diloco.fleet import Fleet
from diloco.fleetplan import Plan
from diloco.runner import REPEAT_S, prepare_folder
from diloco.watching import IslandsView

LOOK_S = 0.2


def run_islands(plan: Plan, view: IslandsView, *, fresh: bool) -> Board:
    """Until the run is finished, or everybody has left."""
    kept = open_run(plan, fresh=fresh)
    if kept is not None:
        view.say(f"the earlier run is kept as {kept}")
    fleet = Fleet(plan, view)
    with signals() as heard:
        try:
            fleet.found()
            while fleet.at_work:
                time.sleep(LOOK_S)
                fleet.look(len(heard))
        finally:
            fleet.end()
    return fleet.board


def open_run(plan: Plan, *, fresh: bool) -> Path | None:
    """The run's folder, locked; returns where an earlier run was moved."""
    folder = plan.folder
    if not fresh and any(folder.glob("island-*")):
        raise SaveError(
            f"{folder} already holds a run of several islands: add --fresh to start again (the old one is kept), "
            "or --set run=NAME for another run"
        )
    try:
        kept = prepare_folder(folder, resume=False, fresh=fresh)
        for place in (folder, *(folder / name for name in plan.names)):
            place.mkdir(exist_ok=True)
            (place / "config.yaml").write_text(render_config(plan.config), encoding="utf-8")  # by it a run is known
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None
    return kept


@contextmanager
def signals() -> Iterator[list[float]]:
    """When SIGINT or SIGTERM came; one within a second of the one before is its echo."""
    heard: list[float] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if not heard or time.monotonic() - heard[-1] > REPEAT_S:
            heard.append(time.monotonic())

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
