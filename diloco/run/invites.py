"""The tickets of a run: in the founder's folder all that were made, a line each, the one for everybody first.

Whoever reads a ticket can come in with it: the files have mode 0600.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from diloco.atomic import write_file
from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import SaveError, TicketError

INVITES, TICKET = "invites", "ticket"  # in an island's folder
TICKET_S = 30 * 24 * 3600.0
FOR_EVER_S = 1000 * 365 * 24 * 3600.0
SECRET = 0o600


def own_ticket(owner: Identity, island: Identity) -> Ticket:
    """Return the ticket by which an owner lets its own island in: no other key can use it, and it does not expire."""
    return Ticket.issue(owner, [], now=time.time(), lifetime_s=FOR_EVER_S, peer=island.public_key)


def open_ticket(folder: Path, owner: Identity, addresses: Sequence[str]) -> Ticket:
    """Return the run's ticket for everybody, at these addresses: as before, until half of its time is over."""
    made = made_tickets(folder)
    if not made or made[0].invite.owner != owner.public_key or made[0].expires_at < time.time() + TICKET_S / 2:
        made = [Ticket.issue(owner, [], now=time.time(), lifetime_s=TICKET_S), *made]
        _write(folder / INVITES, made)
    return made[0].at(addresses)


def renew_open_ticket(folder: Path, owner: Identity, addresses: Sequence[str]) -> None:
    """Replace the run's ticket for everybody by a new one, because it was revoked."""
    _write(folder / INVITES, [Ticket.issue(owner, [], now=time.time(), lifetime_s=TICKET_S), *made_tickets(folder)])
    keep_ticket(folder, open_ticket(folder, owner, addresses))


def make_ticket(
    folder: Path, owner: Identity, addresses: Sequence[str], *, lifetime_s: float, peer: bytes | None, right: Right,
    islands: int,
) -> Ticket:  # fmt: skip
    """Issue another ticket of the run, and write it down among those that were made."""
    now = time.time()
    ticket = Ticket.issue(owner, [], now=now, lifetime_s=lifetime_s, peer=peer, right=right, islands=islands)
    _write(folder / INVITES, [*made_tickets(folder), ticket])
    return ticket.at(addresses)


def made_tickets(folder: Path) -> list[Ticket]:
    """Return the tickets that were made in this folder, without addresses."""
    try:
        lines = (folder / INVITES).read_text().split()
    except FileNotFoundError:
        return []
    try:
        return [Ticket.parse(line, 0.0) for line in lines]
    except TicketError as error:
        raise SaveError(f"{folder / INVITES} is damaged ({error}): move it away, and make tickets anew") from None


def keep_ticket(folder: Path, ticket: Ticket) -> None:
    """Write down by which ticket the island in this folder came in, or lets others in."""
    _write(folder / TICKET, [ticket])


def _write(path: Path, tickets: Sequence[Ticket]) -> None:
    write_file(path, "".join(f"{ticket.render()}\n" for ticket in tickets), mode=SECRET)
