"""Where the others were last: addresses on disk, for when nobody is in the directory any more.

After a long cut, or when all have to start again, an island tries these besides those of its ticket.
"""

import errno
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from diloco.atomic import write_file
from diloco.errors import DirectoryError

VERSION = 2  # 1 was one address a line
MAX_PEERS, MAX_ADDRESSES = 64, 4
OTHERS, OWN = "peers", "addresses"
USUAL_PORTS = range(20000, 32000, 2)  # below those that most systems give to connections

log = logging.getLogger(__name__)

Places = Mapping[str, Sequence[str]]  # of each peer id, its multiaddrs


class AddressBook:
    """Keep the last known addresses of this peer and of the others in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._others = _read(folder / OTHERS)

    @property
    def others(self) -> dict[str, tuple[str, ...]]:
        """Return the last known multiaddrs of each other peer by its id, those seen last at the end."""
        return dict(self._others)

    def remember(self, present: Places, is_member: Callable[[str], bool]) -> None:
        """Write down where those are who are present now. Who is absent stays, members of the run longest."""
        news = {peer: tuple(places[:MAX_ADDRESSES]) for peer, places in present.items() if places}
        if all(self._others.get(peer) == places for peer, places in news.items()):
            return
        merged = {peer: places for peer, places in self._others.items() if peer not in news} | news
        worth_most_last = sorted(merged, key=is_member)  # stable: among equals, the last seen
        kept = set(worth_most_last[-MAX_PEERS:])
        others = {peer: places for peer, places in merged.items() if peer in kept}
        try:
            write_file(self._folder / OTHERS, json.dumps({"version": VERSION, "peers": others}, indent=1) + "\n")
            self._others = others
        except OSError as error:
            log.warning("the others' addresses could not be kept: %s", error)

    def keep_own(self, addresses: Iterable[str]) -> None:
        """Write down this peer's own multiaddrs, a line each."""
        write_file(self._folder / OWN, "".join(f"{address}\n" for address in addresses))

    def own_port(self, host: str) -> int:
        """Return the port that this peer had last, if nobody else has it or the next one now; else another such."""
        ports = [int(parts[4]) for line in _lines(self._folder / OWN) if len(parts := line.split("/")) > 4]
        for port in ports:
            with suppress(OSError, OverflowError):  # OverflowError: there is no next one
                return free_port(host, free_port(host, port) + 1) - 1
        return _free_pair(host, secrets.choice(USUAL_PORTS))


def by_peer(addresses: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Group multiaddrs by the peer whose id they end with; those without an id are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for address in addresses:
        _, separator, peer = address.rpartition("/p2p/")
        if separator and "/" not in peer:
            found[peer] = (*found.get(peer, ()), address)
    return found


def multiaddr(host: str, port: int) -> str:
    """Return the multiaddr of a TCP port at a host, which is an address or a name."""
    family = "ip6" if ":" in host else "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns4"
    return f"/{family}/{host}/tcp/{port}"


def rendezvous_points(addresses: Iterable[str]) -> list[tuple[str, int]]:
    """Return host and port of the rendezvous that belongs to each of these multiaddrs: it is at the next port."""
    found = []
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *_] if port.isdecimal():
                found.append((host, int(port) + 1))
    return [(host, port) for host, port in found if port < 65536]


def answering(places: Sequence[Sequence[str]], within_s: float = 1.5) -> list[list[str]]:
    """Return of each peer's multiaddrs those at which a connection is accepted now, all tried at once."""
    with ThreadPoolExecutor(max(1, sum(map(len, places)))) as pool:
        tries = [[(address, pool.submit(_accepts, address, within_s)) for address in known] for known in places]
        return [[address for address, answer in known if answer.result()] for known in tries]


def _accepts(address: str, within_s: float) -> bool:
    match address.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *_]:
            with suppress(OSError, ValueError):  # ValueError: a host that is no name
                socket.create_connection((host, int(port)), within_s).close()
                return True
    return False


def free_port(host: str, port: int = 0) -> int:
    """Return this port, or any free one for 0; raise OSError where it cannot be had."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def refuse_taken(host: str, port: int, *, within_s: float = 10.0) -> None:
    """Raise DirectoryError if this port or the next one cannot be had: it names which, and two that can.

    A process that was killed leaves its ports after a moment, when its daemon has ended too.
    """
    deadline = time.monotonic() + within_s
    for number in (port, port + 1):
        while (error := _why_not(host, number)) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        if error is not None:
            why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise DirectoryError(
                f"--port {port} takes the ports {port} and {port + 1}, and {number} cannot be had: {why}. "
                f"Use two that are free: --port {_free_pair(host, port + 2)}"
            )


def _why_not(host: str, port: int) -> OSError | None:
    try:
        free_port(host, port)
    except OSError as error:
        return error
    return None


def _free_pair(host: str, port: int) -> int:
    """Return the first of two free ports in a row, from this one on where there are such, else among the high ones."""
    for first in (*range(port, min(port + 1000, 65535)), *range(65534, 49151, -2)):
        with suppress(OSError):
            return free_port(host, free_port(host, first) + 1) - 1
    return 49152


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    """Read the addresses of others; what cannot be read counts as none, for other ways to find them remain."""
    lines = _lines(path)
    if not lines or lines[0] != "{":
        return by_peer(lines)
    try:
        tree = json.loads(path.read_text())
        if tree["version"] != VERSION:
            raise ValueError(f"version {tree['version']}, this is version {VERSION}")
        return {str(peer): tuple(map(str, places)) for peer, places in tree["peers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not used: %s", path, error)
        return {}


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text().split())
    except (OSError, UnicodeDecodeError):
        return ()
