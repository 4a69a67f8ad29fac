"""Islands that are let in: an owner whose key is made of its name, and admissions by tickets of its run."""

import time
from pathlib import Path

from diloco.comm.peers.admission import Admission
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket

DAY_S = 24 * 3600.0


def owner_in(folder: Path) -> Identity:
    """The owner of the run of all who have their keys in this folder."""
    return Identity.load(folder / "owner.key")


def ticket_in(folder: Path, **options: object) -> Ticket:
    return Ticket.issue(owner_in(folder), [], now=time.time(), lifetime_s=DAY_S, **options)


def admitted(identity: Identity) -> Admission:
    """Admit an identity to the run of the owner whose key lies beside its own."""
    return ticket_in(identity.path.parent).admission(identity.public_key)
