"""A launched run as its islands see it: who is in its directory now, and how far each one is.

Whoever launched a run has its owner's key, and by it looks into the directory as an observer: nothing is joined.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from diloco.comm.peers.addressbook import answering, by_peer, multiaddr
from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity, peer_id_of
from diloco.comm.peers.ticket import Ticket
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
    here = _answering(known)
    if not here:
        where = ", ".join(places) or "any address"
        raise LaunchError(f"no island answers at {where}: they may be starting, or not be reached from here")
    owner = IslandSecret.read(launch.secret_file(FOUNDER)).owner
    if owner is None:
        raise LaunchError(f"{launch.secret_file(FOUNDER)} has no owner's key: look from where the run was launched")
    ticket = Ticket.issue(Identity.of(owner), [], now=time.time(), lifetime_s=LIFETIME_S, right=Right.OBSERVE)
    return _look(ticket, here)


def peers_of(launch: Launch) -> dict[str, str]:
    """Return the peer id of each island that was launched, by its name."""
    files = [launch.secret_file(island.name) for island in launch.islands]
    return {secret.island: secret.peer for secret in (IslandSecret.read(file) for file in files if file.exists())}


def _answering(known: Mapping[str, str]) -> list[str]:
    places = [f"{multiaddr(*host_port(place))}/p2p/{peer}" for peer, place in known.items()]
    return [address for found in answering([[place] for place in places]) for address in found]


def _look(ticket: Ticket, places: Sequence[str]) -> dict[str, Member]:
    from diloco.comm.peers.directory import Directory  # takes seconds: hivemind
    from diloco.run.peer import host_towards

    known, found = by_peer(places), dict[str, Member]()
    with tempfile.TemporaryDirectory(prefix="diloco-") as scratch:
        me, host = Identity.load(Path(scratch) / "identity.key"), host_towards(tuple(places))
        with closing(Directory.start(me, ticket.admission(me.public_key), listen_host=host)) as directory:
            deadline = time.monotonic() + LOOK_S
            while not found and time.monotonic() < deadline:
                directory.reach(known)
                records = directory.peers().items()
                found = {peer_id_of(k): Member(r.name, r.round, any(r.chain_digest)) for k, r in records}
                time.sleep(AGAIN_S)
            if not found:
                raise LaunchError(f"nobody is in the run's directory ({directory.refusal or 'no answer'}): try again")
    return found
