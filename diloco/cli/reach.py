"""How far one gets into a run by its ticket, step by step: the part of `diloco doctor` that needs others."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from shutil import copyfile

from diloco.cli.doctor import Finding
from diloco.cli.run import read_ticket
from diloco.comm.peers.addressbook import answering, multiaddr, rendezvous_points
from diloco.comm.peers.directory import lock_identity
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import DilocoError
from diloco.run.folder import IDENTITY_KEY
from diloco.run.local import Connection
from diloco.run.machine import host_towards
from diloco.run.peer import Peer
from diloco.units import format_rate

MEET_S = 20.0  # for members to know this machine, and this machine them
AGAIN_S = 0.5


def examine_way(given: str, folder: Path, host: str | None, port: int) -> list[Finding]:
    """Go as far as a ticket leads, and say where it ends; nothing is joined, and nothing kept."""
    found: list[Finding] = []
    try:
        for finding in _steps(given, folder, host, port):
            found.append(finding)
            if finding.state == "bad":
                break
    except DilocoError as error:
        found.append(Finding(_NEXT[len(found)] if len(found) < len(_NEXT) else "way", "bad", str(error)))
    return found


_NEXT = ("ticket", "address", "admission", "members")


def _steps(given: str, folder: Path, host: str | None, port: int) -> Iterator[Finding]:
    ticket = Ticket.parse(read_ticket(given), 0.0)
    ticket.refuse_newcomer(as_witness=True)
    many = f"{ticket.invite.islands} islands" if ticket.invite.islands > 1 else "one island"
    who = "the island with its key" if ticket.invite.bound else many
    yield Finding("ticket", "ok", f"lets {who} {ticket.invite.right.name.lower()} until {ticket.expiry}")
    here = [address for address, found in zip(ticket.addresses, _answering(ticket.addresses), strict=True) if found]
    if not here:
        mend = "ask a member for its ticket of now: diloco ticket show RUN; or look for a firewall on the way"
        yield Finding("address", "bad", f"nobody accepts connections at {', '.join(ticket.addresses)}", mend)
    yield Finding("address", "ok", f"{len(here)} of {len(ticket.addresses)} addresses answer")
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="diloco-") as scratch:
        own = Path(scratch)
        if (folder / IDENTITY_KEY).is_file():  # a bound ticket is for this one
            stack.enter_context(closing(lock_identity(Identity.load(folder / IDENTITY_KEY))))  # it must not run now
            copyfile(folder / IDENTITY_KEY, own / IDENTITY_KEY)
            (own / IDENTITY_KEY).chmod(0o600)
        Identity.load(own / IDENTITY_KEY)
        connection = Connection(host or host_towards(ticket.addresses), name="doctor", port=port)
        with closing(Peer(own, ticket, connection)) as peer:
            yield Finding("admission", "ok", "the members let this machine in")
            yield from _members(peer)


def _answering(addresses: Sequence[str]) -> list[bool]:
    """Tell of each address whether its port or the next one, where the rendezvous is, accepts connections."""
    doors = [[address, *(multiaddr(*door) for door in rendezvous_points([address]))] for address in addresses]
    return [bool(found) for found in answering(doors)]


def _members(peer: Peer) -> Iterator[Finding]:
    deadline, dials, reached, reason = time.monotonic() + MEET_S, list[bool](), 0, ""
    peer.publish(MEET_S)  # not longer: an invite has so many places in the directory
    while time.monotonic() < deadline and not reached:
        for member in peer.find_peers():
            try:
                way = peer.way_to(member)
            except DilocoError as error:
                reason = str(error)
                continue
            name, reached = peer.name_of(member), reached + 1
            if way.through:
                yield Finding(name, "ok", f"reached through {peer.name_of(way.through)}")
            else:
                dials += [way.dials] if way.dials is not None else []
                yield Finding(name, "ok", f"reached directly, {format_rate(8 * way.bytes_per_s)} from there to here")
        time.sleep(AGAIN_S)
    if not reached:
        mend = "open both ports of that member (the one of its address, and the next one) on the way from here"
        yield Finding(
            "members", "bad", f"no member can be reached ({reason})" if peer.records else "nobody is there", mend
        )
    elif not dials or all(dials):
        yield Finding("this machine", "ok", "others can dial it")
    else:
        mend = "streams will go through a member; faster: open two ports in a row, and give --port (and --host)"
        yield Finding("this machine", "warn", f"{dials.count(False)} of {len(dials)} members cannot dial it", mend)
