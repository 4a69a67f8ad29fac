"""An island's secret: all that it needs to take part in a run, made by the owner before any island starts.

It holds the island's private key, a ticket that is bound to that key, and who else takes part where; the first island's
also holds the owner's key, by which that island founds the run. A file of mode 0600, JSON:

    {"island": "island-0", "identity": HEX, "ticket": "diloco2-…", "owner": HEX or null,
     "islands": {"island-0": PEER_ID, …}, "addresses": {"island-0": "HOST:PORT", …}, "start_islands": COUNT}
"""

import json
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco.atomic import write_file
from diloco.comm.peers.addressbook import multiaddr
from diloco.comm.peers.identity import Identity, new_secret, peer_id_of, public_key_of
from diloco.comm.peers.ticket import Ticket
from diloco.errors import ConfigError, TicketError
from diloco.run.invites import FOR_EVER_S, SECRET

FOUNDER = "island-0"
FOUNDED = ".founded"  # added to the name of the founder's secret, once the run is on its disk
HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:/\[\]=,]+)):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class IslandSecret:
    """Hold what one island needs to enter a run, as founder or by its ticket."""

    island: str
    identity: bytes = field(repr=False)  # private key
    ticket: Ticket
    islands: Mapping[str, str]  # the peer id of each island that is known of, those that were added later included
    addresses: Mapping[str, str]  # HOST:PORT of those whose place is known beforehand
    start_islands: int  # with which the run was planned: its first round waits for them
    owner: bytes | None = field(default=None, repr=False)  # private key, of the founder's only

    @classmethod
    def read(cls, path: Path) -> "IslandSecret":
        """Read a secret; raise TicketError where the file is none, or others can read it."""
        try:
            mode = path.stat().st_mode
            tree = json.loads(path.read_text())
        except OSError as error:
            raise TicketError(
                f"the island's secret {path} cannot be read ({error.strerror}): give --attach FILE"
            ) from None
        except ValueError:
            raise TicketError(f"{path} is no island's secret: it is not JSON; `diloco launch` writes them") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TicketError(f"others can use the secret {path} (mode {stat.S_IMODE(mode):04o}): chmod 600 '{path}'")
        try:
            owner = None if tree.get("owner") is None else bytes.fromhex(tree["owner"])
            found = cls(
                str(tree["island"]), bytes.fromhex(tree["identity"]), Ticket.parse(tree["ticket"], 0.0),
                {str(name): str(peer) for name, peer in tree["islands"].items()},
                {str(name): str(place) for name, place in tree["addresses"].items()}, int(tree["start_islands"]), owner,
            )  # fmt: skip
            found._check()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise TicketError(f"{path} is no whole island's secret ({error!r}): have it made again") from None
        return found

    def _check(self) -> None:
        if self.islands[self.island] != self.peer:
            raise ValueError("its key is not that of its island")
        self.ticket.admission(public_key_of(self.identity))
        if self.owner is not None and public_key_of(self.owner) != self.ticket.invite.owner:
            raise ValueError("its owner's key is not that of its run")
        for place in self.addresses.values():
            host_port(place)

    @property
    def peer(self) -> str:
        """Return the island's peer id."""
        return peer_id_of(public_key_of(self.identity))

    def render(self) -> str:
        """Format the secret as the text of its file."""
        owner = None if self.owner is None else self.owner.hex()
        tree = {
            "island": self.island, "identity": self.identity.hex(), "ticket": self.ticket.render(), "owner": owner,
            "islands": dict(self.islands), "addresses": dict(self.addresses), "start_islands": self.start_islands,
        }  # fmt: skip
        return json.dumps(tree, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the secret to a file that only its owner can read."""
        write_file(path, self.render(), mode=SECRET, durable=True)

    def multiaddrs(self, at: Mapping[str, str]) -> tuple[str, ...]:
        """Return where the other islands may be: by these addresses, and by those that were known beforehand."""
        places = [(name, place) for known in (at, self.addresses) for name, place in known.items()]
        others = [(self.islands[name], place) for name, place in places if name != self.island and name in self.islands]
        return tuple(dict.fromkeys(f"{multiaddr(*host_port(place))}/p2p/{peer}" for peer, place in others))


def make_secrets(
    names: Sequence[str], addresses: Mapping[str, str], known: Sequence[IslandSecret] = ()
) -> list[IslandSecret]:
    """Make the secrets of these islands: of a new run, whose first one founds it, or more of the run of those known.

    Returned are those of all islands. They know of each other: any may be the only one there when another comes back.
    """
    owner = next((secret.owner for secret in known if secret.owner is not None), None) or new_secret()
    start = known[0].start_islands if known else len(names)
    signer, now = Identity.of(owner), time.time()

    def secret_of(name: str) -> IslandSecret:
        private = new_secret()
        ticket = Ticket.issue(signer, [], now=now, lifetime_s=FOR_EVER_S, peer=public_key_of(private))
        return IslandSecret(name, private, ticket, {}, {}, start, owner if not known and name == names[0] else None)

    secrets = [*known, *map(secret_of, names)]
    islands = {secret.island: secret.peer for secret in secrets}
    return [replace(secret, islands=islands, addresses=dict(addresses)) for secret in secrets]


def host_port(place: str) -> tuple[str, int]:
    """Split HOST:PORT, or [HOST]:PORT of IPv6; raise ValueError where it is neither."""
    found = HOST_PORT.fullmatch(place)
    if found is None or not 0 < int(found["port"]) < 65535:
        raise ValueError(f"{place!r} is no HOST:PORT")
    return found["six"] or found["host"], int(found["port"])


def parse_places(text: str) -> dict[str, str]:
    """Parse `island-0=HOST:PORT,island-2=HOST:PORT`, as --at takes it, or read the files of a folder.

    In a folder each island has a file of its name that holds HOST:PORT: whoever starts it there writes it. What has not
    been written whole is not counted; the folder is read again and again.
    """
    if text and "=" not in text and (folder := Path(text)).is_dir():
        found = {path.name: path.read_text().strip() for path in folder.glob("[!.]*")}
        return {name: place for name, place in found.items() if HOST_PORT.fullmatch(place)}
    places = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, place = part.partition("=")
        try:
            host_port(place)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"--at {part!r}: write NAME=HOST:PORT, as in island-0=10.0.0.1:31337, or a folder")
        places[name] = place
    return places
