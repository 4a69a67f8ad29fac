"""`diloco run`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import ConfigPath, Host, Link, Overrides, parse_option, say
from diloco.errors import ConfigError
from diloco.units import parse_link

if TYPE_CHECKING:
    from diloco.config.schema import IslandConfig
    from diloco.launch.plan import Plan
    from diloco.train.trainer import Outcome


def run(
    config: ConfigPath,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what the run's folder holds.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again; an earlier run is kept as NAME.1, NAME.2, …")
    ] = False,
    islands: Annotated[
        int | None, typer.Option(min=1, max=64, help="Found a run that others can join, with so many islands here.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="With --islands: restart islands that die.")
    ] = True,
    link: Link = None,
    host: Host = None,
) -> None:
    """Train on this machine.

    Ctrl-C finishes the step, saves, and says how to go on. With --islands, others join with the ticket that is
    printed: diloco join TICKET. The processes of island.fsdp and island.tp are started here; on several machines:
    torchrun --nnodes 2 … -m diloco run CONFIG
    """
    from diloco.config.file import load_config
    from diloco.launch.plan import Plan
    from diloco.run.folder import islands_to_start

    loaded = load_config(config, set_ or [])
    islands = islands_to_start(Path(loaded.dir), islands, resume=resume, fresh=fresh)
    plan = Plan(loaded, config, tuple(set_ or ()), islands, link, host, restart, resume)
    start = run_command if islands == 0 else one_island if islands == 1 else many_islands
    start(plan, fresh=fresh)


def run_command(plan: "Plan", *, fresh: bool) -> None:
    """An island alone."""
    for option, value in (("--link", plan.link), ("--host", plan.host)):
        if value is not None:
            raise ConfigError(f"{option} is for a run that others can join, and this one is alone: add --islands")
    from diloco.launch.processes import start_if_several

    start_if_several(plan.config.island)
    from diloco.run.start import run

    outcome = run(plan.config, resume=plan.resume, fresh=fresh)
    if outcome.leader:
        say(farewell(outcome, plan.config.dir, plan.path, plan.overrides))


def one_island(plan: "Plan", *, fresh: bool) -> None:
    """An island that others can join, in this process."""
    from diloco.launch.processes import start_if_several

    up, delay_s = parse_rate_and_delay(plan.link)
    config = plan.config
    start_if_several(config.island)
    from diloco.run.peer import Connection
    from diloco.run.start import run
    from diloco.simulate.real.network import as_simulated

    connection = Connection(plan.host or "127.0.0.1", up, up, delay_s, "island-1", mesh=mesh_of(config.island))
    connection = as_simulated(connection, Path(config.dir))
    outcome = run(config, connection, resume=plan.resume, fresh=fresh)
    if outcome.leader:
        again = command_line(plan.path, plan.overrides, "--islands", "1", *plan.network(), "--resume")
        say(ending(outcome, config.dir) + ("" if outcome.finished else f"; go on with:\n  {again}"))


def many_islands(plan: "Plan", *, fresh: bool) -> None:
    """Ends with 0 if the run is finished and all who saw its end hold the same state."""
    from diloco.launch.fleet import end_of, run_islands
    from diloco.report.board import account
    from diloco.report.watching import open_islands_view

    parse_rate_and_delay(plan.link)
    if plan.resume and (end := end_of(plan)) is not None:
        say(f"this run is already finished: {end}", *what_next(plan, finished=True))
        return
    view = open_islands_view()
    try:
        board = run_islands(plan, view, fresh=fresh)
    finally:
        view.close()
    say(*account(board), *what_next(plan, finished=board.finished))
    raise SystemExit(0 if board.finished and board.agree else 1)


def what_next(plan: "Plan", *, finished: bool) -> list[str]:
    options = ["--islands", str(plan.islands), *plan.network()]
    command = command_line(plan.path, plan.overrides, *options, "--resume")
    longer = changed(plan.overrides, "inner.steps", 2 * plan.config.inner.steps)
    again = [
        f"  diloco rewind {plan.folder} ROUND --set inner.steps={2 * plan.config.inner.steps}",
        "      trains on from that round (the last one, say), as a run of its own",
        f"  {command_line(plan.path, longer, *options, '--fresh')}",
        "      trains again, twice as long",
    ]
    return [
        "next:",
        *(again if finished else [f"  {command}", "      goes on from the last round that any island has"]),
        f"  diloco log {plan.folder}",
        "      who contributed to which round; --verify replays all of it",
        f"  {plan.folder}/island-1/events.jsonl, {plan.folder}/island-1/output.log",
        "      what happened, one JSON object a line, and what the island printed; each island has both",
    ]


def mesh_of(island: "IslandConfig") -> str:
    return f"fsdp {island.fsdp} x tp {island.tp}"


def parse_rate_and_delay(link: str | None) -> tuple[float | None, float]:
    return (None, 0.0) if link is None else parse_option("--link", link, parse_link)


def ending(outcome: "Outcome", folder: str) -> str:
    if outcome.finished and not outcome.trained:
        return f"this run is already finished: step {outcome.step}, round {outcome.round}"
    done = "done" if outcome.finished else "paused" if outcome.paused else "left"
    at = f"step {outcome.step}, round {outcome.round}{losses_of(outcome)}"
    return f"{done}: {at}; {folder}/events.jsonl has all of it"


def losses_of(outcome: "Outcome") -> str:
    losses = outcome.validation_losses
    return f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""


def command_line(path: Path, overrides: Sequence[str], *options: str) -> str:
    """What this run was started with, as it can be typed again."""
    changes = [word for override in overrides for word in ("--set", override)]
    return shlex.join([*_launcher(), "run", str(path), *options, *changes])


def changed(overrides: Sequence[str], key: str, value: object) -> list[str]:
    """With another value of one key."""
    return [*(override for override in overrides if override.partition("=")[0].strip() != key), f"{key}={value}"]


def _launcher() -> list[str]:
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    if processes is not None and "DILOCO_MEETING" not in os.environ:
        return ["torchrun", "--nproc-per-node", processes, "-m", "diloco"]
    program = Path(sys.argv[0])
    return [sys.executable, "-m", "diloco"] if program.name == "__main__.py" else [str(program)]


def farewell(outcome: "Outcome", folder: str, path: Path, overrides: Sequence[str]) -> str:
    longer = command_line(path, changed(overrides, "inner.steps", 2 * outcome.step), "--resume")
    if not outcome.finished:
        return f"stopped after step {outcome.step}; go on with:\n  {command_line(path, overrides, '--resume')}"
    if not outcome.trained:
        return f"this run is already finished, at step {outcome.step}; train on with:\n  {longer}"
    return "\n".join(
        [
            f"done: {outcome.step} steps, {outcome.round} round{'s' * (outcome.round != 1)}{losses_of(outcome)}",
            "next:",
            f"  {longer}",
            "      trains on, twice as long (--set changes any key)",
            f"  {shlex.join(_launcher())} config",
            "      explains every key",
            f"  {folder}/events.jsonl",
            "      what happened, one JSON object a line",
        ]
    )
