"""Declare `diloco ticket`: by which tickets others come into a run, and how one is taken back."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.history import founding_folder
from diloco.cli.shared import RunName, say
from diloco.errors import SaveError, TicketError

if TYPE_CHECKING:
    from diloco.comm.peers.ticket import Ticket
    from diloco.elastic.protocol.record import Amendment

ticket = typer.Typer(help="Make, list and revoke tickets to a run.", no_args_is_help=True)
ID_LETTERS = 8  # of an invite's key, by which people name it
DAY_S = 24 * 3600.0
WATCHERS = 32  # that may look at a time, by one ticket


@ticket.command(epilog="Example: diloco ticket create islands --islands 2 --days 7")
def create(
    run: RunName,
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="KEY", help="Admit one island only, by its key: diloco ticket key DIR."),
    ] = None,
    islands: Annotated[
        int | None,
        typer.Option(min=1, help="How many islands may come in with it, ever; or watch at a time (default 1, or 32)."),
    ] = None,
    days: Annotated[float, typer.Option(help="How long others may come in with it.")] = 30.0,
    right: Annotated[
        str, typer.Option(help="contribute, witness (stores and votes), observe or watch.")
    ] = "contribute",
) -> None:
    """Make a ticket, and print it.

    It needs the key of the run's owner. An island that has come in stays when its ticket expires.
    """
    from diloco.comm.peers.admission import Right
    from diloco.comm.peers.identity import Identity, public_key_in
    from diloco.run.folder import OWNER_KEY
    from diloco.run.invites import make_ticket

    folder = founding_folder(run)
    if right.upper() not in Right.__members__:
        raise TicketError(f"--right {right}: use {', '.join(name.lower() for name in Right.__members__)}")
    made = make_ticket(
        folder, Identity.load(folder / OWNER_KEY), known_addresses(folder), lifetime_s=days * DAY_S,
        peer=None if for_ is None else public_key_in(for_), right=Right[right.upper()],
        islands=islands or (WATCHERS if right.upper() == Right.WATCH.name else 1),
    )  # fmt: skip
    print(_at_head(made, folder).render())


@ticket.command(epilog="Example: diloco ticket key runs/second")
def key(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that this island has, or will have (--dir).")],
) -> None:
    """Print an island's key for `create --for`.

    The key is made if there is none.
    """
    from diloco.comm.peers.identity import Identity
    from diloco.run.folder import IDENTITY_KEY

    print(Identity.load(dir / IDENTITY_KEY).peer_id)


@ticket.command("list", epilog="Example: diloco ticket list islands")
def list_(run: RunName) -> None:
    """List the tickets of a run.

    Those that were made where it was founded: who came in with each, and until when others can.
    """
    from diloco.history.find import find_logs, names_of
    from diloco.history.log import newest_state
    from diloco.run.folder import OUTER
    from diloco.run.invites import made_tickets
    from diloco.train.amend import with_waiting

    folder = founding_folder(run)
    state, names = newest_state(folder / OUTER), names_of(find_logs(run))
    revoked = {key for each in with_waiting(folder, state.amendments) for key in each.revokes}
    for made in made_tickets(folder):
        invite = made.invite
        came = [names.of(peer) for peer, by, _ in state.admitted if by == invite.key.hex()]
        who = f"…{invite.key.hex()[-8:]} only, " if invite.bound else ""
        until = "revoked" if invite.key.hex() in revoked else f"until {made.expiry}"
        used = f"{len(came)} of {invite.islands} used{': ' * bool(came)}{', '.join(came)}"
        say(f"{_name(made)}  {invite.right.name.lower()}, {who}{until}; {used}")


@ticket.command(epilog="Example: diloco ticket revoke islands 1f0c9a3e")
def revoke(
    run: RunName,
    id: Annotated[str, typer.Argument(metavar="ID", help="The ticket, as `diloco ticket list` names it.")],
    islands: Annotated[bool, typer.Option("--islands", help="Also take out all who came in with it.")] = False,
) -> None:
    """Let nobody else in with a ticket.

    It is signed with the key of the run's owner and takes effect with a round. Islands that came in with it stay,
    unless --islands is given, or `diloco evict` takes one out.
    """
    from diloco.comm.peers.identity import Identity
    from diloco.run.folder import OWNER_KEY
    from diloco.run.invites import made_tickets, renew_open_ticket
    from diloco.train.amend import FOLDER

    folder = founding_folder(run)
    every = made_tickets(folder)
    found = [made for made in every if _name(made).startswith(id)]
    if len(found) != 1 or not id:
        raise TicketError(f"{id!r}: {len(found)} tickets are called that; diloco ticket list {run} lists all")
    while (change := _write_revocation(folder, found[0], with_islands=islands)) is None:
        pass  # somebody else was quicker: look again
    if found[0] == every[0]:
        renew_open_ticket(folder, Identity.load(folder / OWNER_KEY), known_addresses(folder))
    out = f", and {len(change.evicts)} island{'s' * (len(change.evicts) != 1)} taken out" if islands else ""
    say(
        f"change {change.number} of {run}: the ticket {_name(found[0])} is revoked{out}",
        f"It waits in {folder / FOLDER}: the island that trains there, or the next one, brings it to the others.",
    )


@ticket.command(epilog="Example: diloco ticket show islands")
def show(run: RunName) -> None:
    """Print the ticket of an island.

    It has the addresses of those that answer now.
    It works in the folder of any island of the run, whether or not the founder is there. If nobody answers, it has the
    addresses that were known last.
    """
    from diloco.comm.peers.ticket import Ticket
    from diloco.history.find import find_logs
    from diloco.history.log import newest_state
    from diloco.run.folder import OUTER
    from diloco.run.invites import TICKET

    folders = [log.parent for log in find_logs(run)]
    folder = next((folder for folder in folders if (folder / TICKET).is_file()), None)
    if folder is None:
        raise SaveError(f"{folders[0]} holds no ticket: nobody else can join this run")
    held = Ticket.parse((folder / TICKET).read_text(), 0.0)
    state = newest_state(folder / OUTER)
    if held.invite.key.hex() in state.revoked or held.expires_at <= time.time():
        typer.echo("note: it is revoked or has expired: only islands that were in the run before use it", err=True)
    if held.invite.bound:
        typer.echo("note: it is bound to this island: nobody else can use it", err=True)
    elif sum(each.invite == held.invite.key.hex() for each in state.admitted) >= held.invite.islands:
        typer.echo("note: it is used up: only islands that were in the run before come in with it", err=True)
    print(_at_head(held.at(known_addresses(folder)), folder).render())


def known_addresses(folder: Path) -> list[str]:
    """Return where others find this run: the addresses of islands that answer now; if none does, all that are known."""
    from diloco.comm.peers.addressbook import OWN, AddressBook, answering
    from diloco.launch.fleet import spread

    own = (folder / OWN).read_text().split() if (folder / OWN).is_file() else []
    places = [own, *map(list, AddressBook(folder).others.values())]
    return spread(answering(places)) or spread(places)


def _at_head(made: "Ticket", folder: Path) -> "Ticket":
    from diloco.history.log import newest_state
    from diloco.run.folder import OUTER

    head = newest_state(folder / OUTER).head
    return made.at(made.addresses, (head.round, bytes.fromhex(head.digest)))


def _name(made: "Ticket") -> str:
    return made.invite.key.hex()[:ID_LETTERS]


def _write_revocation(folder: Path, made: "Ticket", *, with_islands: bool) -> "Amendment | None":
    """Sign and write the amendment that revokes a ticket. None: another one has taken its number, so try again."""
    from diloco.comm.peers.identity import Identity
    from diloco.elastic.protocol.record import EVICT, REVOKE
    from diloco.history.log import newest_state
    from diloco.run.folder import OUTER, OWNER_KEY
    from diloco.train.amend import with_waiting, write_amendment

    state = newest_state(folder / OUTER)
    before, name = with_waiting(folder, state.amendments), made.invite.key.hex()
    out = {peer for each in before for peer in each.evicts}
    came = [peer for peer, by, _ in state.admitted if by == name and peer not in out]
    if name in {key for each in before for key in each.revokes} and not (with_islands and came):
        raise TicketError(f"{_name(made)} is revoked already")
    changes: dict[str, list[str]] = {REVOKE: [name]} | ({EVICT: came} if with_islands and came else {})
    return write_amendment(folder, Identity.load(folder / OWNER_KEY), len(before) + 1, changes)
