"""A launched run as its islands see it: who is in its directory now, and how far each one is.

Whoever launched a run has its owner's key, and by it visits its islands as an observer: nothing is joined.
"""

import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from diloco.comm.peers.addressbook import multiaddr, rendezvous_points
from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity, peer_id_of
from diloco.comm.peers.noticeboard import Noticeboard
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.rendezvous import Rendezvous
from diloco.errors import LaunchError
from diloco.launch.backend import JobState, Launch
from diloco.run.secret import FOUNDER, IslandSecret, host_port

LOOK_S, AGAIN_S = 20.0, 0.5
LIFETIME_S = 600.0


@dataclass(frozen=True)
class Member:
    """Describe an island as the run's directory has it."""

    name: str
    round: int
    has_state: bool  # else it waits for one


def members(launch: Launch, states: Mapping[str, JobState]) -> dict[str, Member]:
    """Return who is in the run's directory, by peer id; raise LaunchError where nobody answers."""
    places = [state.address for state in states.values() if state.state == "running" and state.address]
    names = peers_of(launch)
    known = {names[name]: state.address for name, state in states.items() if name in names and state.address in places}
    owner = IslandSecret.read(launch.secret_file(FOUNDER)).owner
    if owner is None:
        raise LaunchError(f"{launch.secret_file(FOUNDER)} has no owner's key: look from where the run was launched")
    ticket = Ticket.issue(Identity.of(owner), [], now=time.time(), lifetime_s=LIFETIME_S, right=Right.OBSERVE)
    return _look(ticket, known)


def peers_of(launch: Launch) -> dict[str, str]:
    """Return the peer id of each island that was launched, by its name."""
    files = [launch.secret_file(island.name) for island in launch.islands]
    return {secret.island: secret.peer for secret in (IslandSecret.read(file) for file in files if file.exists())}


def _look(ticket: Ticket, known: Mapping[str, str]) -> dict[str, Member]:
    doors = {peer: rendezvous_points([multiaddr(*host_port(place))]) for peer, place in known.items()}
    with tempfile.TemporaryDirectory(prefix="diloco-") as scratch:
        me, board = Identity.load(Path(scratch) / "identity.key"), Noticeboard(ticket.run_id)
        with closing(DirectTransport(me.peer_id, "127.0.0.1")) as direct:  # nobody is to dial it
            rendezvous = Rendezvous(direct, me, ticket.admission(me.public_key), board)
            deadline = time.monotonic() + LOOK_S
            while not (found := board.peers()) and time.monotonic() < deadline:
                if not rendezvous.visit(doors):
                    where, why = ", ".join(known.values()) or "any address", rendezvous.refusal
                    why = why or "they may be starting, or not be reached from here"
                    raise LaunchError(f"no island answers at {where}: {why}")
                time.sleep(0.0 if board.peers() else AGAIN_S)
    if not found:
        raise LaunchError("nobody is in the run's directory yet: try again")
    return {peer_id_of(key): Member(one.name, one.round, any(one.chain_digest)) for key, one in found.items()}
