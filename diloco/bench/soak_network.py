"""Cut and slow down the network between a soak's islands.

With root on Linux each island has a network namespace, and what is cut is cut for everything: rounds, downloads and the
directory. Without root the islands follow the file of `diloco simulate`: then only their own transport is cut, always
in both directions, and the directory still gets through.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from diloco.atomic import write_file
from diloco.bench.soak_plan import Link
from diloco.comm.peers.identity import Identity
from diloco.errors import ConfigError
from diloco.simulate.real.netns import Namespaces, refuse_if_not_permitted
from diloco.simulate.real.network import VARIABLE, network_at
from diloco.simulate.real.topology import Rates, Topology, island_name

FAST_BITS_PER_S = 1e10
BACKENDS = ("auto", "netns", "shaped")


class SoakNetwork(Protocol):
    """Connect the islands, which count from 1."""

    def host(self, island: int) -> str:
        """Return the address under which others see an island."""

    def prefix(self, island: int) -> list[str]:
        """Return the words before the command that starts an island."""

    def environment(self) -> dict[str, str]:
        """Return the variables that islands need to find their network."""

    def set_cut(self, links: frozenset[Link]) -> None:
        """Cut these links, and heal all others."""

    def set_slow(self, island: int, bits_per_s: float | None) -> None:
        """Hold an island's link to a rate, up and down; None makes it fast again."""


class KernelNetwork:
    """Give each island a network namespace; the kernel cuts and slows down."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces, self._cut = namespaces, frozenset[Link]()

    def host(self, island: int) -> str:
        return self._namespaces.host(island)

    def prefix(self, island: int) -> list[str]:
        return ["ip", "netns", "exec", self._namespaces.name(island)]

    def environment(self) -> dict[str, str]:
        return {}

    def set_cut(self, links: frozenset[Link]) -> None:
        for sender, receiver in sorted(links - self._cut):
            self._namespaces.cut(sender, receiver)
        for sender, receiver in sorted(self._cut - links):
            self._namespaces.heal(sender, receiver)
        self._cut = links

    def set_slow(self, island: int, bits_per_s: float | None) -> None:
        if bits_per_s is None:
            self._namespaces.unshape(island)
        else:
            self._namespaces.shape(island, Rates(bits_per_s, bits_per_s))


class FileNetwork:
    """Describe the network in a file that the islands follow, as `diloco simulate` does."""

    def __init__(self, folder: Path, islands: int) -> None:
        """The islands' folders lie in `folder`; their keys are made here, because the file names islands by them."""
        self._file = (folder / "network.json").resolve()
        names = [island_name(number) for number in range(1, islands + 1)]
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
        ids = {name: Identity.load(folder / name / "identity.key").peer_id for name in names}
        self._tree: dict[str, Any] = network_at(Topology.uniform(islands, FAST_BITS_PER_S, 0.0), (), ids, 0.0)
        self._write()

    def host(self, island: int) -> str:
        return "127.0.0.1"

    def prefix(self, island: int) -> list[str]:
        return []

    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self._file)}

    def set_cut(self, links: frozenset[Link]) -> None:
        pairs = {tuple(sorted(link)) for link in links}
        self._tree["cut"] = sorted([island_name(one), island_name(other)] for one, other in pairs)
        self._write()

    def set_slow(self, island: int, bits_per_s: float | None) -> None:
        rate = bits_per_s or FAST_BITS_PER_S
        self._tree["islands"][island_name(island)] |= {"up_bits_per_s": rate, "down_bits_per_s": rate}
        self._write()

    def _write(self) -> None:
        write_file(self._file, json.dumps(self._tree))


def choose_backend(asked: str) -> str:
    """Return netns or shaped: what was asked for, or netns where this machine permits it."""
    if asked not in BACKENDS:
        raise ConfigError(f"--backend {asked}: there are {', '.join(BACKENDS)}")
    if asked != "shaped":
        try:
            refuse_if_not_permitted()
        except ConfigError:
            if asked == "netns":
                raise
            return "shaped"
        return "netns"
    return asked


@contextmanager
def open_network(backend: str, folder: Path, islands: int) -> Iterator[SoakNetwork]:
    """Open a network of so many islands, all connected; namespaces are deleted in the end."""
    if backend == "shaped":
        yield FileNetwork(folder, islands)
        return
    with Namespaces(islands).opened() as namespaces:
        yield KernelNetwork(namespaces)
