"""`diloco join`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.run import ending, mesh_of, parse_rate_and_delay
from diloco.cli.shared import Host, Link, MaxDown, MaxUp, Overrides, parse_option, say
from diloco.errors import TicketError
from diloco.units import parse_rate


def join(
    ticket: Annotated[str, typer.Argument(metavar="TICKET", help="The run's ticket, or a file that holds it.")],
    set_: Overrides = None,
    dir: Annotated[Path | None, typer.Option(help="This island's folder; runs/RUN-NAME if not given.")] = None,
    name: Annotated[str | None, typer.Option(help="How others see this island.")] = None,
    fsdp: Annotated[int | None, typer.Option(min=1, help="Processes that share parameters and data.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Processes that share each matrix.")] = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    link: Link = None,
    host: Host = None,
) -> None:
    """Join a run as a peer.

    The run's configuration and state come from the other islands. Ctrl-C contributes what was trained so far, says
    goodbye and leaves; once more leaves at once.
    """
    from diloco.comm.peers.ticket import Ticket
    from diloco.config.file import overrides_tree, own_island
    from diloco.launch.processes import start_if_several

    mesh = [f"island.{key}={value}" for key, value in (("fsdp", fsdp), ("tp", tp)) if value is not None]
    own = overrides_tree([*(set_ or []), *mesh])
    island = own_island(own)
    text = read_ticket(ticket)
    parsed = Ticket.parse(text, time.time())
    start_if_several(island)
    from diloco.run.peer import Connection, host_towards, own_name
    from diloco.run.start import join
    from diloco.simulate.real.network import as_simulated

    name = name or own_name()
    folder = dir or Path("runs") / f"{parsed.run_id.hex()[:8]}-{name}"
    rate, delay_s = parse_rate_and_delay(link)
    up = parse_option("--max-up", max_up, parse_rate) if max_up else rate
    down = parse_option("--max-down", max_down, parse_rate) if max_down else rate
    here = host or host_towards(parsed.addresses)
    connection = Connection(here, up or rate, down or rate, delay_s, name, mesh=mesh_of(island))
    outcome = join(text, own, as_simulated(connection, folder), folder)
    if outcome.leader:
        say(ending(outcome, str(folder)))


def read_ticket(given: str) -> str:
    """Tickets are long: a file that holds one will do."""
    if given.startswith("diloco1-"):
        return given
    try:
        return Path(given).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TicketError(
            f"{given[:60]!r}: a ticket begins with diloco1-, and no file holds one there ({why})"
        ) from None
