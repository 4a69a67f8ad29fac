"""Pipes in memory are bounded, and so is what an inbox holds of streams that nobody accepts."""

from collections.abc import Iterator

import pytest
from streams import SOON, Background
from transports import memory_pair, wire_carrier_of

from diloco.comm.transport import memory, transport
from diloco.comm.transport.memory import MemoryNetwork, MemoryWire
from diloco.comm.transport.transport import PeerAddress
from diloco.errors import TransportError


def test_a_pipe_holds_no_more_than_its_limit() -> None:
    near, far = memory_pair().streams()
    wire = wire_carrier_of(near).wire
    assert isinstance(wire, MemoryWire)
    sending = Background(lambda: near.send(1, payload=bytes(2 * memory.PIPE_BYTES)))
    assert sending.blocked()
    assert 0 < wire.outgoing.held <= memory.PIPE_BYTES
    assert far.receive(timeout_s=SOON).kind == 1
    sending.result()
    assert wire.outgoing.held == 0


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryNetwork]:
    monkeypatch.setattr(transport, "MAX_WAITING", 6)
    monkeypatch.setattr(transport, "MAX_WAITING_OF_ONE", 3)
    network = MemoryNetwork()
    network.transport("b")
    yield network
    for peer in list(network.peers.values()):
        peer.close()


def open_many(network: MemoryNetwork, name: str, count: int) -> None:
    peer = network.transport(name)
    for number in range(count):
        peer.connect(PeerAddress("b"), f"{name} {number}", timeout_s=SOON)


def waits(network: MemoryNetwork, channel: str) -> bool:
    try:
        network.peers["b"].accept(channel, timeout_s=0)
    except TransportError:
        return False
    return True


def test_a_peer_with_too_many_loses_its_oldest(crowded: MemoryNetwork) -> None:
    open_many(crowded, "a", 4)
    assert [waits(crowded, f"a {number}") for number in range(4)] == [False, True, True, True]


def test_when_it_is_full_whoever_has_most_makes_room(crowded: MemoryNetwork) -> None:
    open_many(crowded, "few", 1)
    for name in ("many", "more"):
        open_many(crowded, name, 3)
    open_many(crowded, "member", 2)
    assert waits(crowded, "few 0") and all(waits(crowded, f"member {number}") for number in range(2))
    left = [waits(crowded, f"{name} {number}") for name in ("many", "more") for number in range(3)]
    assert left == [False, False, True, False, True, True]
