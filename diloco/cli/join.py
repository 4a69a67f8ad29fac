"""Declare `diloco join`: take part in a run by its ticket, as far as a volunteer's limits allow."""

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.dashboard import Dashboard, show_beside
from diloco.cli.run import contributed, ending, pass_on, rates_of, read_ticket, relay_rate, say_ending
from diloco.cli.shared import (
    EventsJson,
    JoinHost,
    JoinOverrides,
    Link,
    MaxDown,
    MaxUp,
    MetricsAt,
    Port,
    Quiet,
    RelayRate,
    loading,
    next_commands,
    parse_option,
    parse_positive,
    say,
    show_of,
)
from diloco.errors import ConfigError
from diloco.run.typed import again
from diloco.units import parse_bytes

if TYPE_CHECKING:
    from diloco.report.live import Show

TicketText = Annotated[
    str,
    typer.Argument(metavar="TICKET", help="The run's ticket, a file that holds it, - (standard input) or env:NAME."),
]
OwnDir = Annotated[Path | None, typer.Option(help="This island's folder (default runs/RUN_ID-NAME).")]
Name = Annotated[str | None, typer.Option(help="Name under which others see this island.")]
Fsdp = Annotated[int | None, typer.Option(min=1, help="Processes to shard parameters and batch over.")]
Tp = Annotated[int | None, typer.Option(min=1, help="Processes to split each matrix over.")]
Witness = Annotated[bool, typer.Option("--witness", help="Train nothing: only store the run's state, and vote.")]
TrainingHours = Annotated[
    str | None, typer.Option("--hours", help="Train in these hours of the day only, by this machine's clock: 22-7")
]
MaxMonth = Annotated[str | None, typer.Option(help="Send and receive no more than this in a calendar month: 50GB")]
YieldGpu = Annotated[
    bool, typer.Option("--yield-gpu", help="Be away while another process uses the GPU (asks nvidia-smi).")
]


def join(
    ticket: TicketText,
    set_: JoinOverrides = None,
    dir: OwnDir = None,
    name: Name = None,
    fsdp: Fsdp = None,
    tp: Tp = None,
    witness: Witness = False,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    link: Link = None,
    host: JoinHost = None,
    port: Port = None,
    relay: RelayRate = None,
    hours: TrainingHours = None,
    max_month: MaxMonth = None,
    yield_gpu: YieldGpu = False,
    metrics: MetricsAt = None,
    quiet: Quiet = False,
    as_json: EventsJson = False,
    dashboard: Dashboard = False,
) -> None:
    """Join a run as a peer.

    The run's configuration and state come from the other islands. Ctrl-C contributes what was trained so far, says
    goodbye and leaves; a second Ctrl-C leaves at once. A witness needs no accelerator and no data: with one, a run of
    two islands goes on when either of them is lost.

    With --hours, --max-month or --yield-gpu the island leaves in good order when it must not train, and comes back by
    itself.
    """
    from diloco.cli import main
    from diloco.comm.peers.ticket import Ticket
    from diloco.config.file import overrides_tree, own_island
    from diloco.launch.mesh_processes import start_if_several

    show = show_of(quiet=quiet, as_json=as_json)
    mesh = [f"island.{key}={value}" for key, value in (("fsdp", fsdp), ("tp", tp)) if value is not None]
    told = [f"log.metrics={json.dumps(metrics)}"] if metrics is not None else []
    own = overrides_tree([*(set_ or []), *mesh, *told])
    island = own_island(own)
    text = read_ticket(ticket)
    pass_on(ticket, text)
    parsed = Ticket.parse(text, 0.0)
    if witness and island.fsdp * island.tp > 1:
        raise ConfigError("a witness trains nothing: leave out --fsdp and --tp")
    from diloco.run.machine import host_towards, own_name

    name = name or own_name()
    folder = dir or Path("runs") / f"{parsed.run_id.hex()[:8]}-{name}"
    up, down, delay_s = rates_of(link, max_up, max_down)
    if hours is not None or max_month is not None or yield_gpu:
        heed_limits(folder, hours, max_month, yield_gpu=yield_gpu, show=show)
    if dashboard:
        show_beside(folder, show)
    start_if_several(island, main)
    with loading():
        from diloco.plan.fit import shortage_here
        from diloco.run import start
        from diloco.run.local import Connection
        from diloco.simulate.real.network import as_simulated

    mesh_name = "witness" if witness else island.mesh
    where = host or host_towards(parsed.addresses)
    connection = Connection(
        where, up, down, delay_s, name, mesh=mesh_name, port=port or 0, metered=max_month is not None,
        relay_bits_per_s=relay_rate("0" if relay is None and max_month is not None else relay),
    )  # fmt: skip
    enter = start.witness if witness else partial(start.join, check=shortage_here)
    outcome = enter(text, own, as_simulated(connection, folder), folder, show)
    if outcome.leader:
        ended = [ending(outcome, str(folder)), *contributed(str(folder))]
        command = "" if outcome.finished else again()
        say_ending(show, ended, next_commands({command: "comes back, with what this folder holds"}) if command else [])


def heed_limits(folder: Path, hours: str | None, max_month: str | None, *, yield_gpu: bool, show: "Show") -> None:
    """Take part by a process of its own for as long as the volunteer's limits allow, and exit as it does; do nothing in
    that process itself."""
    from diloco.launch.volunteer import VOLUNTEER, limits_of, volunteer
    from diloco.run.allowance import Hours, gpu_processes

    given = None if hours is None else parse_option("--hours", hours, Hours.parse)
    most = None if max_month is None else parse_positive("--max-month", max_month, parse_bytes)
    if VOLUNTEER in os.environ:
        return
    if yield_gpu:
        list(gpu_processes())  # raises, where they cannot be found
    tell = partial(say, show=show)
    raise SystemExit(volunteer(lambda own: limits_of(folder, given, most, yield_gpu=yield_gpu, own=own), folder, tell))
