"""Declare `diloco run`: train on this machine, and say how it ended."""

import ctypes
import json
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.dashboard import Dashboard, show_beside
from diloco.cli.shared import (
    ConfigPath,
    EventsJson,
    Link,
    MetricsAt,
    Overrides,
    Port,
    Quiet,
    RelayRate,
    RunHost,
    loading,
    next_commands,
    parse_option,
    say,
    show_of,
)
from diloco.errors import ConfigError, TicketError
from diloco.run.typed import TICKET_WORD, launcher, program
from diloco.units import counted, format_count, format_size, parse_link, parse_rate

if TYPE_CHECKING:
    from diloco.launch.fleet import Plan
    from diloco.report.live import Show
    from diloco.run.launched import Launched
    from diloco.train.trainer import Outcome


VARIABLE = "env:"  # before the name of a variable that holds a ticket
Resume = Annotated[bool, typer.Option("--resume", help="Continue from what the run's folder holds.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is kept as NAME.1, NAME.2, …")]
Islands = Annotated[
    int | None, typer.Option(min=1, max=64, help="Start a run that others can join, with this many islands.")
]
Restart = Annotated[
    bool, typer.Option("--restart/--no-restart", help="Restart an island that dies, or in which a process hangs.")
]
Attach = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False,
        help="Take part by this secret of `diloco launch`: found, resume or join, whichever is right.",
    ),
]  # fmt: skip
At = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=HOST:PORT,…", show_default=False,
        help="With --attach: where other islands are now; or a folder with a file for each, NAME, that says so.",
    ),
]  # fmt: skip
AttachedDir = Annotated[
    Path | None, typer.Option(help="With --attach: this island's folder (default: NAME in the run's folder).")
]
Wait = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, help="With --attach: for a member (default: for ever).")
]
Script = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND", show_default=False,
        help="With --attach: a program that trains by diloco.connect, in place of the built-in trainer.",
    ),
]  # fmt: skip


def run(
    config: ConfigPath,
    set_: Overrides = None,
    resume: Resume = False,
    fresh: Fresh = False,
    islands: Islands = None,
    restart: Restart = True,
    link: Link = None,
    host: RunHost = None,
    port: Port = None,
    relay: RelayRate = None,
    attach: Attach = None,
    at: At = None,
    dir: AttachedDir = None,
    wait: Wait = None,
    script: Script = None,
    metrics: MetricsAt = None,
    quiet: Quiet = False,
    as_json: EventsJson = False,
    dashboard: Dashboard = False,
) -> None:
    """Train on this machine.

    Ctrl-C finishes the step, saves, and prints how to continue. With --islands, others join with the ticket that is
    printed: diloco join TICKET. The processes of island.fsdp and island.tp are started here; on several machines:
    torchrun --nnodes 2 … -m diloco run CONFIG

    With --attach the command can be given any number of times, on any island, in any order. It exits with 0 if the run
    is finished, and with 75 if the island has left before the end and is to be started again.
    """
    from diloco.config.file import load_config
    from diloco.launch.fleet import Plan
    from diloco.launch.restarts import continues
    from diloco.run.folder import islands_to_start
    from diloco.run.launched import Launched

    show = show_of(quiet=quiet, as_json=as_json)
    set_ = [*(set_ or []), *([f"log.metrics={json.dumps(metrics)}"] if metrics is not None else [])]
    loaded = load_config(config, set_)
    if attach is not None:
        if resume or fresh or islands is not None:
            raise ConfigError("--attach finds out what to do: leave out --islands, --resume and --fresh")
        own = None if dir is None else str(dir)
        told = Launched(str(config), str(attach), at or "", own, inf if wait is None else wait, host, port)
        if dashboard:
            raise ConfigError("--dashboard does not go with --attach: look at the run with `diloco dashboard RUN`")
        attach_island(told, set_ or [], script, link=link, relay=relay, show=show)
        return
    for option, value in {"--at": at, "--dir": dir, "--wait": wait, "--script": script}.items():
        if value is not None:
            raise ConfigError(f"{option} goes with --attach: add that, or leave it out")
    islands = islands_to_start(Path(loaded.dir), islands, resume=resume, fresh=fresh)
    if continues(Path(loaded.dir), fresh=fresh):
        resume, fresh = True, False
    plan = Plan(loaded, config, tuple(set_ or ()), islands, link, host, restart, resume, port, relay)
    if dashboard:
        show_beside(Path(loaded.dir), show)
    (many_islands if islands > 1 else one_island)(plan, fresh=fresh, show=show)


def one_island(plan: "Plan", *, fresh: bool, show: "Show") -> None:
    """Train one island in this process: alone, or one that others can join."""
    options = {"--link": plan.link, "--host": plan.host, "--port": plan.port, "--relay": plan.relay}
    for option, value in options.items():
        if value is not None and not plan.islands:
            raise ConfigError(f"{option} is for a run that others can join, and this one is alone: add --islands 1")
    from diloco.cli import main
    from diloco.launch.mesh_processes import start_if_several

    up, down, delay_s = rates_of(plan.link)
    island, folder = plan.config.island, plan.config.dir
    start_if_several(island, main, restart=plan.restart)
    with loading():
        from diloco.plan.fit import shortage_here
        from diloco.run.local import Connection
        from diloco.run.start import run
        from diloco.simulate.real.network import as_simulated

    connection = Connection(
        plan.host or "127.0.0.1", up, down, delay_s, "island-1", mesh=island.mesh, port=plan.port or 0,
        relay_bits_per_s=relay_rate(plan.relay),
    )  # fmt: skip
    seen = as_simulated(connection, Path(folder)) if plan.islands else None
    outcome = run(plan.config, seen, resume=plan.resume, fresh=fresh, show=show, check=shortage_here)
    if outcome.leader:
        next_ = what_next(plan, outcome.step, finished=outcome.finished)
        say_ending(show, [ending(outcome, folder), *contributed(folder)], next_)


def attach_island(
    told: "Launched", overrides: list[str], script: str | None, *, link: str | None, relay: str | None, show: "Show"
) -> None:
    """Take part in a run by a secret, and exit with 0 if it is finished, with 75 if this island has left before.

    Of processes that diloco itself has started only the leader says so by its code: the others end well. On several
    machines each process does, because each machine's job has to know.
    """
    from diloco.cli import main
    from diloco.config.file import load_config
    from diloco.launch.mesh_processes import start_if_several
    from diloco.launch.own_loop import become_own_loop
    from diloco.run.secret import IslandSecret

    secret = IslandSecret.read(Path(told.secret))
    where = Path(told.dir or Path(load_config(told.config, overrides).dir) / secret.island)
    config = load_config(told.config, [*overrides, f"checkpoint.dir={json.dumps(str(where))}"])
    if script is not None:
        become_own_loop(replace(told, dir=str(where)), script, config.island)
    up, down, delay_s = rates_of(link)
    start_if_several(config.island, main)
    with loading():
        from diloco.plan.fit import shortage_here
        from diloco.run.attach import Attachment
        from diloco.run.signals import LEFT
        from diloco.run.start import attach
        from diloco.simulate.real.network import as_simulated

    attachment = Attachment.of(told)
    connection = attachment.connection(
        told, up_bits_per_s=up, down_bits_per_s=down, delay_s=delay_s, mesh=config.island.mesh,
        relay_bits_per_s=relay_rate(relay),
    )  # fmt: skip
    outcome = attach(config, as_simulated(connection, where), attachment, show, shortage_here)
    if outcome.leader:
        say_ending(show, [ending(outcome, str(where)), *contributed(str(where))])
    if outcome.leader or "DILOCO_MEETING" not in os.environ:
        raise SystemExit(0 if outcome.finished else LEFT)


def many_islands(plan: "Plan", *, fresh: bool, show: "Show") -> None:
    """Train several islands on this machine, and report how the run ended.

    Exits with 0 if the run is finished and all islands that saw its end hold the same state, or if it was asked to stop
    and all have; otherwise with 1.
    """
    from diloco.history.present import glance
    from diloco.launch.fleet import end_of, run_islands
    from diloco.report.board import account
    from diloco.report.live import open_islands_view

    rates_of(plan.link)
    steps = plan.config.inner.steps
    if plan.resume and (end := end_of(plan)) is not None:
        say_ending(show, [f"this run is already finished: {end}"], what_next(plan, steps, finished=True))
        return
    with closing(open_islands_view(lambda: glance(plan.folder), show)) as view:
        board = run_islands(plan, view, fresh=fresh)
    say_ending(show, account(board), what_next(plan, steps, finished=board.finished, paused=board.paused))
    raise SystemExit(0 if board.paused or (board.finished and board.agree) else 1)


def read_ticket(given: str) -> str:
    """Return the ticket's text: given as such, in a file, on standard input (-) or in a variable (env:NAME)."""
    from diloco.comm.peers.ticket import OLD_PREFIX, PREFIX, TEXT_LIMIT

    if given.startswith((PREFIX, OLD_PREFIX)):
        return given
    if given.startswith(VARIABLE):
        return os.environ.get(given.removeprefix(VARIABLE), "")
    try:
        with sys.stdin if given == "-" else open(given) as file:
            return file.read(2 * TEXT_LIMIT)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TicketError(
            f"{given[:60]!r}: a ticket begins with {PREFIX}, and no file holds one there ({why})"
        ) from None


def pass_on(given: str, text: str) -> None:
    """Hand a ticket to the processes that this one starts, by their environment, which only its owner can read.

    Where it was given as such it is taken off the command line, where everybody on the machine can read it. Standard
    input can be read only once.
    """
    if given not in (text, "-"):
        return
    os.environ["DILOCO_TICKET"] = text
    sys.argv = [TICKET_WORD if word == given else word for word in sys.argv]
    try:
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45])
        offset = Path("/proc/self/cmdline").read_bytes().find(text.encode())
    except (OSError, ValueError, IndexError):  # not Linux
        return
    if start and offset >= 0:
        ctypes.memset(start + offset, ord("*"), len(text))


def relay_rate(given: str | None) -> float | None:
    """Return the bits per second at which to pass on for others; None: no limit, 0: nothing."""
    return None if given is None else 0.0 if given == "0" else parse_option("--relay", given, parse_rate)


def rates_of(
    link: str | None, max_up: str | None = None, max_down: str | None = None
) -> tuple[float | None, float | None, float]:
    """Return the rates up and down (a cap counts before the link's rate; None: no limit) and the one-way delay."""
    rate, delay_s = (None, 0.0) if link is None else parse_option("--link", link, parse_link)
    up = parse_option("--max-up", max_up, parse_rate) if max_up else rate
    down = parse_option("--max-down", max_down, parse_rate) if max_down else rate
    return up or rate, down or rate, delay_s


def ending(outcome: "Outcome", folder: str) -> str:
    """Format how the run ended: done, paused or stopped, with step, round and the losses of the whole run."""
    at = f"step {outcome.step}, round {outcome.round}"
    if outcome.finished and not outcome.trained:
        return f"this run is already finished: {at}"
    from diloco.report.events import Validation, of_kind
    from diloco.report.sinks import EVENTS
    from diloco.report.watching import Tail

    told = of_kind(Tail(Path(folder) / EVENTS).read(), Validation)  # of all starts
    losses = [float("nan") if event.validation_loss is None else event.validation_loss for event in told]
    done = "done" if outcome.finished else "paused" if outcome.paused else "stopped"
    fell = f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    return f"{done}: {at}{fell}; {folder}/events.jsonl has all of it"


def contributed(folder: str) -> list[str]:
    """Say what an island has given to a run of several: rounds, tokens and bytes; nothing for one that was alone."""
    from diloco.checkpoint.log.history import read_headers
    from diloco.report.status import read_status
    from diloco.run.folder import OUTER

    status = read_status(Path(folder))
    if status is None or len(status.islands) < 2:
        return []
    rounds = [each for each in read_headers(Path(folder) / OUTER) if each.contributions]
    parts = [part for each in rounds for part in each.contributions if part.island == status.me]
    tokens, of_all = (
        sum(part.tokens for part in parts),
        sum(part.tokens for each in rounds for part in each.contributions),
    )
    own = status.own
    return [
        f"contributed to {len(parts)} of {counted(len(rounds), 'round')}: {format_count(tokens)} of "
        f"{format_count(of_all)} tokens, {tokens / max(1, of_all):.0%}; sent {format_size(own.bytes_sent or 0)} and "
        f"received {format_size(own.bytes_received or 0)} for rounds since it was started"
    ]


def say_ending(show: "Show", ended: list[str], next_: Iterable[str] = ()) -> None:
    """Say how it ended and what can be done next: all of it, only how, or, where events are printed, nothing."""
    if show == "auto":
        say(*ended, *next_)
    elif show == "quiet":
        say(*ended)


def what_next(plan: "Plan", steps: int, *, finished: bool, paused: bool = False) -> list[str]:
    """List the commands to continue with, after a run of so many steps that is finished or not."""
    options = ["--islands", str(plan.islands), *plan.network(plan.names[0])] if plan.islands else []
    options += [] if plan.restart else ["--no-restart"]
    twice = f"inner.steps={2 * steps}"
    longer = [*(one for one in plan.overrides if one.partition("=")[0].strip() != "inner.steps"), twice]
    commands = {}
    if not finished:
        where = "from there" if not plan.islands else "from the last round that any island has"
        how = f"continues {'where the islands stopped' if paused else where}"
        commands[_command(plan.path, plan.overrides, *options, "--resume")] = how
    elif not plan.islands:
        commands[_command(plan.path, longer, "--resume")] = "trains on, twice as long (--set changes any key)"
        commands[f"{program()} config"] = "explains every key"
    else:
        commands[_command(plan.path, longer, *options, "--resume")] = "trains on, twice as long"
        commands[f"{program()} rewind {plan.folder} ROUND"] = "begins another run with an earlier round of it"
    sample = f"{program()} sample {plan.folder} 'The '"
    commands[sample] = "continues a text; diloco export makes a Hugging Face model of it"
    commands[f"{program()} log {plan.folder}"] = "who contributed to which round; --verify replays all of it"
    if plan.islands > 1:
        commands[f"{plan.folder}/island-1/events.jsonl, {plan.folder}/island-1/output.log"] = (
            "what happened, one JSON object a line, and what the island printed; each island has both"
        )
    return next_commands(commands)


def _command(path: Path, overrides: Iterable[str], *options: str) -> str:
    """Format the command that started this run, with these overrides and options, so that it can be typed again."""
    changes = [word for override in overrides for word in ("--set", override)]
    return shlex.join([*launcher(), "run", str(path), *options, *changes])
