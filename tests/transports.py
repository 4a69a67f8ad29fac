"""Every transport as a pair of peers for the contract, and the ways past its frames to the bytes below."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from invited import admitted
from streams import HERE, SOON, auto_on

from diloco.comm.peers.directory import Directory
from diloco.comm.peers.identity import Identity
from diloco.comm.transport import link
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.frame import SECURED, pack_header
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.comm.transport.wire import WireCarrier

Directories = Callable[[], Sequence[Directory]]  # called by those that need daemons only


@contextmanager
def started_directories(folder: Path) -> Iterator[list[Directory]]:
    """Two that do not know each other: addresses must be enough."""
    with ExitStack() as stack:
        identities = [Identity.load(folder / name) for name in "ab"]
        started = [Directory.start(identity, admitted(identity)) for identity in identities]
        for directory in started:
            stack.callback(directory.close)
        yield started


@dataclass
class Two:
    a: Transport
    b: Transport
    address_b: PeerAddress
    address_a: PeerAddress | None = None  # of those that b has to allow

    def streams(self, channel: str = "data") -> tuple[Stream, Stream]:
        one = self.connect(channel)
        return one, self.b.accept(channel, timeout_s=SOON)

    def connect(self, channel: str = "data") -> Stream:
        return self.a.connect(self.address_b, channel, timeout_s=SOON)

    def allow(self, *peers: PeerAddress) -> None:
        transport: Any = self.b
        while not hasattr(transport, "allow"):
            transport = transport.transport
        transport.allow(peers)

    def close(self) -> None:
        self.a.close()
        self.b.close()


def memory_pair() -> Two:
    network = MemoryNetwork()
    a, b = network.transport("a"), network.transport("b")
    return Two(a, b, b.address())


def direct_pair() -> Two:
    a, b = DirectTransport("a", HERE), DirectTransport("b", HERE)
    b.allow([a.address(HERE)])
    return Two(a, b, b.address(HERE), a.address(HERE))


def libp2p_pair(directories: Sequence[Directory]) -> Two:
    a, b = (Libp2pTransport(directory) for directory in directories)
    b.allow([a.address()])
    return Two(a, b, b.address(), a.address())


def auto_pair(directories: Sequence[Directory], *, port_open: bool = True) -> Two:
    a, b = (auto_on(directory) for directory in directories)
    b.allow([a.address(HERE)])
    there = b.address(HERE)
    if not port_open:
        with socket.create_server((HERE, 0)) as listener:
            there = replace(there, port=listener.getsockname()[1])
    return Two(a, b, there, a.address(HERE))


def wrapped(pair: Two, wrap: Callable[[Transport], Transport]) -> Two:
    return replace(pair, a=wrap(pair.a), b=wrap(pair.b))


def shaped(pair: Two) -> Two:
    paths = link.Paths(link.Path(delay_s=0.002, jitter_s=0.001))
    return wrapped(pair, lambda transport: ShapedTransport(transport, link.Link(2e9, 2e9), paths))


def capped_on_one_side(pair: Two) -> Two:
    return replace(pair, a=ShapedTransport(pair.a, link.Link(1e9, 1e9)))


KINDS: dict[str, Callable[[Directories], Two]] = {
    "memory": lambda _: memory_pair(),
    "direct": lambda _: direct_pair(),
    "memory-shaped": lambda _: shaped(memory_pair()),
    "direct-shaped": lambda _: shaped(direct_pair()),
    "direct-capped": lambda _: capped_on_one_side(direct_pair()),
    "libp2p": lambda directories: libp2p_pair(directories()),
    "libp2p-shaped": lambda directories: shaped(libp2p_pair(directories())),
    "auto-direct": lambda directories: auto_pair(directories()),
    "auto-libp2p": lambda directories: auto_pair(directories(), port_open=False),
    "memory-pooled": lambda _: wrapped(memory_pair(), PooledTransport),
    "auto-pooled": lambda directories: wrapped(auto_pair(directories()), PooledTransport),  # as islands have it
}
POOLED = ["memory-pooled", "auto-pooled"]  # streams that go one way: who connects sends
BOTH_WAYS = [kind for kind in KINDS if kind not in POOLED]
CHECKSUMMED = ["memory", "memory-shaped", "libp2p", "libp2p-shaped", "auto-libp2p", "memory-pooled"]  # by no TLS
GUARDED = [kind for kind in KINDS if not kind.startswith("memory")]  # who is not allowed is refused
THREADED = ["direct", "direct-capped", "libp2p", "auto-direct", "auto-libp2p", *POOLED]  # a thread for what comes in


def wire_carrier_of(stream: Stream) -> WireCarrier:
    carrier: Any = stream.carrier
    while not isinstance(carrier, WireCarrier):
        carrier = carrier.inner if hasattr(carrier, "inner") else carrier.carrier
    return carrier


def write(stream: Stream, raw: bytes) -> None:
    """Past all that makes frames."""
    wire_carrier_of(stream).wire.write(memoryview(raw), None)


def header(stream: Stream, payload: bytes, rest: int = 0) -> bytes:
    return pack_header(1, b"", payload, rest=rest, flags=SECURED if wire_carrier_of(stream).wire.secure else 0)


def limit_stall(stream: Stream, stall_s: float) -> None:
    stream.stall_s = wire_carrier_of(stream).stall_s = stall_s
