"""The one start that can be made any number of times, in any order: an island founds its run, resumes it, or joins it.

Whichever is right follows from what is on its disk, from its secret (`secret.py`), and from whom it can reach:

- Its folder has the run's first record: it resumes.
- It has the owner's key, never had the run on its disk, and nobody whom it can reach has it: it founds the run.
- Else it waits for a member, and joins. That is so for a founder whose disk was lost, too.

That a run was founded is written down beside the secret when the run's first record is on the disk, and before anybody
can hear of it: a secret without that mark was never used to found anything that others could have joined.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.atomic import create_file
from diloco.comm.peers.addressbook import AddressBook, answering, by_peer
from diloco.comm.peers.identity import Identity
from diloco.config.schema import Config
from diloco.errors import SaveError
from diloco.run.folder import IDENTITY_KEY, OWNER_KEY, hold_folder, refuse_foreign
from diloco.run.join import Search, publish
from diloco.run.launched import Launched
from diloco.run.local import Connection
from diloco.run.machine import host_towards
from diloco.run.peer import Peer
from diloco.run.secret import FOUNDED, IslandSecret, host_port, parse_places

LOCK_S = 60.0  # for an earlier process of this island to end
ASK_S = 120.0  # for those who listen to say how far they are
AGAIN_S = 0.5
FIRST_SAID_S, SAY_AGAIN_S = 5.0, 60.0

log = logging.getLogger(__name__)


def say_to_stderr(text: str) -> None:
    """Print a line for whoever reads the job's output."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Attachment:
    """Hold what an island is attached to its run with: its secret, and where others were found to be."""

    file: Path
    secret: IslandSecret
    at: Mapping[str, str] = field(default_factory=dict)  # HOST:PORT by island, found when it was started
    wait_s: float = float("inf")
    say: Callable[[str], None] = say_to_stderr

    @property
    def places(self) -> tuple[str, ...]:
        """Return the multiaddrs at which other islands may be."""
        return self.secret.multiaddrs(self.at)

    @property
    def founds(self) -> bool:
        """Tell whether this island may found the run: it has the owner's key, and has not done so before."""
        return self.secret.owner is not None and not self._mark.exists()

    @property
    def _mark(self) -> Path:
        return self.file.with_name(self.file.name + FOUNDED)

    @classmethod
    def of(cls, told: Launched) -> "Attachment":
        """Read the secret of an island that was launched."""
        file = Path(told.secret)
        return cls(file, IslandSecret.read(file), parse_places(told.at), told.wait_s)

    def connection(self, told: Launched, **options: Any) -> Connection:
        """Return how this island reaches the others, as it was told or as its secret says; `options` are the rest."""
        own = self.own_place
        return Connection(
            told.host or self.host, name=self.secret.island, port=told.port or (own[1] if own else 0),
            found_now=lambda: self.secret.multiaddrs(parse_places(told.at)), **options,
        )  # fmt: skip

    @property
    def own_place(self) -> tuple[str, int] | None:
        """Return host and port at which others expect this island, where that was said beforehand."""
        place = self.at.get(self.secret.island) or self.secret.addresses.get(self.secret.island)
        return None if place is None else host_port(place)

    @property
    def host(self) -> str:
        """Return the address of this machine that others are given: as said beforehand, or as seen from theirs."""
        return self.own_place[0] if self.own_place is not None else host_towards(self.places)

    def config(self, config: Config) -> Config:
        """Return the configuration with which a founder begins: the first round waits for all that were planned."""
        if "start_islands" in config.elastic.model_fields_set:
            return config
        elastic = {**config.elastic.model_dump(exclude_unset=True), "start_islands": self.secret.start_islands}
        return config.model_copy(update={"elastic": type(config.elastic)(**elastic)})

    def prepare(self, folder: Path) -> None:
        """Make the island's folder with its keys, and lock it; wait for an earlier process of it that is ending."""
        refuse_foreign(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"{folder} cannot be made: {error}; name another one with --dir") from None
        Identity.keep(folder / IDENTITY_KEY, self.secret.identity)
        if self.secret.owner is not None:
            Identity.keep(folder / OWNER_KEY, self.secret.owner)
        hold_folder(folder, LOCK_S, self.say)

    def note_founded(self) -> None:
        """Write down beside a founder's secret that the run exists. Where that cannot be written, others are asked."""
        if self.secret.owner is None:
            return
        try:
            create_file(self._mark, b"", durable=True)
        except OSError as error:  # a secret that is mounted read-only
            log.warning("that the run is founded cannot be noted beside the secret: %s", error)

    def expect_others(self, folder: Path) -> None:
        """Write down that others have the run: even a founder that has not fetched it yet does not begin it again."""
        AddressBook(folder).remember(by_peer(self.places), lambda peer: True)

    def search(self) -> Search:
        """Return how members are looked for: for ever, unless a time was given, saying so now and then."""
        return Search(self.wait_s, self._waiting())

    def _waiting(self) -> Callable[[float, str], None]:
        since, said_at = time.strftime("%Y-%m-%d %H:%M:%S"), 0.0
        known = {**self.secret.addresses, **self.at}
        others = [name for name in self.secret.islands if name != self.secret.island]
        whom = ", ".join(f"{name} at {known[name]}" if name in known else name for name in others) or "any member"

        def report(waited_s: float, reason: str) -> None:
            nonlocal said_at
            if waited_s - said_at < (SAY_AGAIN_S if said_at else FIRST_SAID_S):
                return
            said_at = waited_s
            lost = self.secret.owner is not None and self._mark.exists()
            hint = f"; it has founded this run and lost its disk: if nobody else has the run, delete {self._mark}"
            self.say(f"{self.secret.island} waits since {since} for {whom} ({reason}){hint if lost else ''}")

        return report


def anybody_has_the_run(peer: Peer) -> bool:
    """Ask the islands that can be reached now whether any of them has a state of the run.

    One that is there and does not say is asked again, for ASK_S: it may be busy, and who began the run again because
    of that would have another run than it has. Where nobody listens, nobody is waited for.
    """
    places, deadline = by_peer(peer.ticket_addresses), time.monotonic() + ASK_S
    while places and time.monotonic() < deadline:
        answered = peer.reach(places)
        if not answered and not any(answering([*places.values()])):
            return False
        if answered:
            publish(peer)
            peer.find_peers()
            if any(any(record.chain_digest) for record in peer.records.values()):
                return True
            if answered <= peer.records.keys():  # all who answered say that they have nothing
                return False
        time.sleep(AGAIN_S)
    return False
