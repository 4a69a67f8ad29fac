import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.config.file import load_config
from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.launch.mesh_processes import start_if_several
from diloco.launch.plan import Plan, network_options
from diloco.report.board import account
from diloco.report.watching import open_islands_view
from diloco.run.folder import islands_in
from diloco.units import parse_link

if TYPE_CHECKING:
    from diloco.train.trainer import Outcome


def run_command(
    path: Path,
    overrides: list[str],
    *,
    link: str | None,
    host: str | None,
    resume: bool,
    fresh: bool,
    restart: bool = True,
) -> None:
    config = load_config(path, overrides)
    islands = islands_in(Path(config.dir)) if resume else 0
    if islands:
        islands_command(path, overrides, islands, link=link, host=host, resume=resume, fresh=fresh, restart=restart)
        return
    for option, value in (("--link", link), ("--host", host)):
        if value is not None:
            raise ConfigError(f"{option} is for a run that others can join, and this one is alone: add --islands")
    start_if_several(config.island)
    from diloco.run.start import run

    outcome = run(config, resume=resume, fresh=fresh)
    if outcome.leader:
        text = farewell(outcome, config.dir, path, overrides)
        Console(highlight=False).print(text, soft_wrap=True, markup=False)


def islands_command(
    path: Path,
    overrides: list[str],
    islands: int,
    *,
    link: str | None,
    host: str | None,
    resume: bool,
    fresh: bool,
    restart: bool = True,
) -> None:
    if resume and fresh:
        raise ConfigError("--resume goes on with the earlier run, --fresh starts again: use one of them")
    config = load_config(path, overrides)
    up, delay_s = parse_rate(link)
    if islands > 1:
        many_islands(Plan(config, path, tuple(overrides), islands, link, host, restart, resume), fresh=fresh)
        return
    start_if_several(config.island)
    from diloco.run.peer import Connection
    from diloco.run.start import run
    from diloco.simulate.real.network import as_simulated

    connection = Connection(host or "127.0.0.1", up, up, delay_s, "island-1", mesh=mesh_of(config.island))
    connection = as_simulated(connection, Path(config.dir))
    outcome = run(config, connection, resume=resume, fresh=fresh)
    if outcome.leader:
        again = command_line(path, overrides, "--islands", "1", *network_options(link, host), "--resume")
        text = ending(outcome, config.dir) + ("" if outcome.finished else f"; go on with:\n  {again}")
        Console(highlight=False).print(text, soft_wrap=True, markup=False)


def many_islands(plan: Plan, *, fresh: bool) -> None:
    """Ends with 0 if the run is finished and all who saw its end hold the same state."""
    from diloco.launch.launcher import end_of, run_islands

    if plan.resume and (end := end_of(plan)) is not None:
        text = "\n".join([f"this run is already finished: {end}", *what_next(plan, finished=True)])
        Console(highlight=False).print(text, soft_wrap=True, markup=False)
        return
    view = open_islands_view()
    try:
        board = run_islands(plan, view, fresh=fresh)
    finally:
        view.close()
    text = "\n".join([*account(board), *what_next(plan, finished=board.finished)])
    Console(highlight=False).print(text, soft_wrap=True, markup=False)
    raise SystemExit(0 if board.finished and board.agree else 1)


def what_next(plan: Plan, *, finished: bool) -> list[str]:
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


def mesh_of(island: IslandConfig) -> str:
    return f"fsdp {island.fsdp} x tp {island.tp}"


def parse_rate(link: str | None) -> tuple[float | None, float]:
    try:
        return (None, 0.0) if link is None else parse_link(link)
    except ValueError as error:
        raise ConfigError(f"--link {link}: {error}") from None


def ending(outcome: "Outcome", folder: str) -> str:
    if outcome.finished and not outcome.trained:
        return f"this run is already finished: step {outcome.step}, round {outcome.round}"
    done = "done" if outcome.finished else "paused" if outcome.paused else "left"
    losses = outcome.validation_losses
    found = f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    return f"{done}: step {outcome.step}, round {outcome.round}{found}; {folder}/events.jsonl has all of it"


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
    losses = outcome.validation_losses
    found = f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    return "\n".join(
        [
            f"done: {outcome.step} steps, {outcome.round} round{'s' * (outcome.round != 1)}{found}",
            "next:",
            f"  {longer}",
            "      trains on, twice as long (--set changes any key)",
            f"  {shlex.join(_launcher())} config",
            "      explains every key",
            f"  {folder}/events.jsonl",
            "      what happened, one JSON object a line",
        ]
    )
