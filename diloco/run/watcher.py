"""Watch a run from outside, by a ticket whose right is *watch*: look into its directory, and ask members for status.

Nobody is admitted by that: the members let such a peer open no other stream, and it is in no roster.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.transport import PeerAddress
from diloco.errors import DirectoryError, JoinRefused
from diloco.report.status import RunStatus, merged
from diloco.run.folder import IDENTITY_KEY
from diloco.run.local import Connection
from diloco.run.machine import host_towards
from diloco.run.peer import Peer
from diloco.run.status_streams import StatusAsker

SEARCH_S, AGAIN_S = 30.0, 0.5
DIRECTORY_S = 10.0  # for which those who were found are asked before others are looked for
NAME = "watcher"
RENEW_S, EXPIRES_S = 8.0, 20.0  # of its record: the next one to look may need its place
MEET_S = 6.0  # until all members have heard of it


def watch_run(ticket: Ticket, *, pause_s: float) -> Iterator[RunStatus]:
    """Yield the run's status again and again, as its members tell it; raise JoinRefused where nobody answers."""
    ticket.refuse_unless_to_watch()
    with tempfile.TemporaryDirectory(prefix="diloco-") as scratch:
        Identity.load(Path(scratch) / IDENTITY_KEY)
        connection = Connection(host_towards(ticket.addresses), name=NAME, relay_bits_per_s=0.0)
        with closing(Peer(Path(scratch), ticket, connection)) as peer:
            yield from _looks(peer, pause_s)


def _looks(peer: Peer, pause_s: float) -> Iterator[RunStatus]:
    heard, published, looked, why = time.monotonic(), -RENEW_S, -DIRECTORY_S, "no answer"
    known: dict[str, PeerAddress] = {}
    said: list[RunStatus] = []
    asker = StatusAsker(peer.plain)
    while True:
        if time.monotonic() - published > RENEW_S:
            try:
                peer.publish(EXPIRES_S)
                published = time.monotonic()
            except DirectoryError as error:  # as many watch by this ticket as may: one of them may be gone soon
                why = str(error)
        if not said or len(said) < len(known) or time.monotonic() - looked > DIRECTORY_S:
            known, looked = peer.find_peers(), time.monotonic()
        said = asker.ask(known)
        waited_s = time.monotonic() - heard
        if len(said) == len(known) > 0 or (said and waited_s > MEET_S):
            heard = time.monotonic() - MEET_S  # who has not answered by now is not waited for again
            best = max(said, key=lambda status: (status.own.leads, status.round, status.at))
            yield merged(best, said)
            time.sleep(pause_s)
        elif waited_s > SEARCH_S + MEET_S:
            raise JoinRefused(f"no island told its status within {SEARCH_S:.0f} s ({why}): is it still on?")
        else:
            time.sleep(AGAIN_S)
