"""Put each island into a network namespace (Linux, root), where the kernel holds its rates: tc's token bucket.

So everything counts: the directory's traffic, TCP's acknowledgements and retransmissions. A bridge connects the
namespaces. Delays, jitter and stalls are still made by the islands: not every kernel has netem. A cut of `simulate` is
made by both: the islands break their streams at once, and the kernel loses every packet of the pair.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.errors import ConfigError
from diloco.simulate.real.topology import Rates

CLONE_NEWNET = 0x40000000
QUEUE_S, BURST_S, MIN_BURST_BYTES = 0.2, 0.01, 16384
NOBODY = "02:d1:10:c0:00:00"  # the address of no device


class Namespaces:
    """Manage the namespaces of so many islands, which exist while `opened` is entered."""

    def __init__(self, islands: int) -> None:
        self._prefix = f"dl{os.getpid() % 10**6}"
        self.islands = range(1, islands + 1)
        self._rates: dict[int, Rates] = {}
        self._cut: set[frozenset[int]] = set()

    def name(self, island: int) -> str:
        """Return the name of an island's namespace; it contains this process's id."""
        return f"{self._prefix}-{island}"

    def host(self, island: int) -> str:
        """Return an island's IPv4 address on the bridge."""
        return f"10.213.0.{island}"

    @contextmanager
    def opened(self) -> Iterator["Namespaces"]:
        """Make the bridge and all namespaces, and delete them in the end, also after an error."""
        try:
            _run("ip", "link", "add", self._prefix, "type", "bridge")
            _run("ip", "link", "set", self._prefix, "up")
            for island in self.islands:
                self._open(island)
            yield self
        finally:
            for island in self.islands:  # a namespace goes with its last process, and the kernel takes its time
                subprocess.run(["ip", "link", "delete", self._cable(island)], capture_output=True)
                subprocess.run(["ip", "netns", "delete", self.name(island)], capture_output=True)
            subprocess.run(["ip", "link", "delete", self._prefix], capture_output=True)

    def _open(self, island: int) -> None:
        """Make an island's namespace and the cable from it to the bridge."""
        name = self.name(island)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self._cable(island), "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", self._cable(island), "master", self._prefix, "up")
        _run("ip", "-n", name, "address", "add", f"{self.host(island)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")

    def _cable(self, island: int) -> str:
        return f"{self._prefix}.{island}"

    def shape(self, island: int, rates: Rates) -> None:
        """Hold an island's link to these rates from now on; nothing is done if it has them already."""
        if self._rates.get(island) != rates:
            _run("tc", "-n", self.name(island), *_bucket("eth0", rates.up_bits_per_s))
            _run("tc", *_bucket(self._cable(island), rates.down_bits_per_s))
            self._rates[island] = rates

    def unshape(self, island: int) -> None:
        """Let an island's link be as fast as the machine again."""
        if self._rates.pop(island, None) is not None:
            _run("tc", "-n", self.name(island), "qdisc", "delete", "dev", "eth0", "root")
            _run("tc", "qdisc", "delete", "dev", self._cable(island), "root")

    def cut_exactly(self, pairs: set[frozenset[int]]) -> None:
        """Lose all packets between exactly these pairs of islands from now on, without a sign to either."""
        for pair in pairs ^ self._cut:
            one, other = sorted(pair)
            for sender, receiver in ((one, other), (other, one)):
                (self.cut if pair in pairs else self.heal)(sender, receiver)
        self._cut = set(pairs)

    def cut(self, sender: int, receiver: int) -> None:
        """Lose whatever one island sends to another, without an error: it goes to a device that does not exist."""
        entry = [self.host(receiver), "lladdr", NOBODY, "nud", "permanent", "dev", "eth0"]
        _run("ip", "-n", self.name(sender), "neighbour", "replace", *entry)

    def heal(self, sender: int, receiver: int) -> None:
        """Undo a cut; the receiver's device is asked for again."""
        _run("ip", "-n", self.name(sender), "neighbour", "delete", self.host(receiver), "dev", "eth0")


def _bucket(device: str, bits_per_s: float) -> list[str]:
    """Return the arguments of tc for a token bucket of this rate, with a queue of 0.2 s."""
    burst = int(max(MIN_BURST_BYTES, bits_per_s / 8 * BURST_S))
    limits = ["rate", f"{int(bits_per_s)}bit", "burst", str(burst), "latency", f"{int(1000 * QUEUE_S)}ms"]
    return ["qdisc", "replace", "dev", device, "root", "tbf", *limits]


def enter(name: str) -> None:
    """Move this thread, and all that it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def refuse_if_not_permitted() -> None:
    """Raise ConfigError where namespaces cannot be made, before anything is started; one is tried out."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("--backend netns: network namespaces are Linux's; leave --backend out")
    if os.geteuid() != 0:
        raise ConfigError("--backend netns needs root, to make network namespaces: leave it out, or become root")
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        raise ConfigError(f"--backend netns needs {' and '.join(missing)}: apt-get install iproute2, or leave it out")
    with Namespaces(1).opened() as namespaces:
        namespaces.shape(1, Rates(1e6, 1e6))


def _run(*command: str) -> None:
    """Run a command; ConfigError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise ConfigError(f"--backend netns is not permitted here: {' '.join(command)}: {reason}; leave --backend out")
