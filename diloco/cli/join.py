import time
from pathlib import Path

from rich.console import Console

from diloco.cli.run import ending, mesh_of, parse_rate
from diloco.comm.peers.ticket import Ticket
from diloco.config.file import overrides_tree, own_island
from diloco.errors import ConfigError, TicketError
from diloco.launch.mesh_processes import start_if_several
from diloco.units import parse_rate as parse_bits


def join_command(
    ticket: str,
    overrides: list[str],
    *,
    dir: Path | None,
    name: str | None,
    max_up: str | None,
    max_down: str | None,
    link: str | None,
    host: str | None,
) -> None:
    own = overrides_tree(overrides)
    island = own_island(own)
    text = read_ticket(ticket)
    parsed = Ticket.parse(text, time.time())
    start_if_several(island)
    from diloco.run.peer import Connection, host_towards, own_name
    from diloco.run.start import join
    from diloco.simulate.real.network import as_simulated

    name = name or own_name()
    folder = dir or Path("runs") / f"{parsed.run_id.hex()[:8]}-{name}"
    rate, delay_s = parse_rate(link)
    up, down = (cap(option, "--max-up" if option is max_up else "--max-down") for option in (max_up, max_down))
    here = host or host_towards(parsed.addresses)
    connection = Connection(here, up or rate, down or rate, delay_s, name, mesh=mesh_of(island))
    outcome = join(text, own, as_simulated(connection, folder), folder)
    if outcome.leader:
        Console(highlight=False).print(ending(outcome, str(folder)), soft_wrap=True, markup=False)


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


def cap(text: str | None, option: str) -> float | None:
    try:
        return None if text is None else parse_bits(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None
