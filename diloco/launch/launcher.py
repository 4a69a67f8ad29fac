"""Several islands on this machine, each a process of its own: starts them, watches them, brings back those that die.

No island is special once the run is on. The first one founds it; if it dies, it comes back as a joiner like any other,
with a ticket that names the addresses of all.
"""

import time
from pathlib import Path

from diloco.checkpoint.save import read_facts, saves
from diloco.config.file import render_config
from diloco.errors import SaveError
from diloco.launch.fleet import Fleet
from diloco.launch.plan import Plan
from diloco.report.board import Board
from diloco.report.watching import IslandsView
from diloco.run.folder import islands_in, prepare_folder
from diloco.run.signals import signals
from diloco.train.resume import among_others

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


def end_of(plan: Plan) -> str | None:
    """Where a run has ended, if an island of this folder has seen it."""
    for save in [save for name in plan.names for save in saves(plan.folder / name)]:
        if (together := among_others(save)) is not None and together["finished"]:
            facts = read_facts(save)
            return f"step {facts['step']}, round {facts['round']}"
    return None


def open_run(plan: Plan, *, fresh: bool) -> Path | None:
    """The run's folder, locked; returns where an earlier run was moved."""
    folder = plan.folder
    if plan.resume and not islands_in(folder) and not any(map(saves, (folder, *folder.glob("island-*/")))):
        raise SaveError(f"{folder} holds no run to go on with: start without --resume")
    try:
        kept = prepare_folder(folder, resume=plan.resume, fresh=fresh)
        for place in (folder, *(folder / name for name in plan.names)):
            place.mkdir(exist_ok=True)
            (place / "config.yaml").write_text(render_config(plan.config), encoding="utf-8")  # by it a run is known
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None
    return kept
