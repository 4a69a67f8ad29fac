"""Streams that wait to be accepted: as many as fit, and nobody is kept out by others."""

from collections.abc import Iterator

import pytest

from diloco.comm.transport import inbox as module
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.errors import TransportError

SOON = 5.0
B = PeerAddress("b")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryNetwork]:
    monkeypatch.setattr(module, "MAX_WAITING", 6)
    monkeypatch.setattr(module, "MAX_WAITING_OF_ONE", 3)
    network = MemoryNetwork()
    network.transport("b")
    yield network
    for peer in list(network.peers.values()):
        peer.close()


def open_many(transport: Transport, count: int) -> None:
    for number in range(count):
        transport.connect(B, f"{transport.identity} {number}", timeout_s=SOON)


def waits(network: MemoryNetwork, channel: str) -> bool:
    try:
        network.peers["b"].accept(channel, timeout_s=0)
    except TransportError:
        return False
    return True


def test_a_peer_with_too_many_loses_its_oldest(network: MemoryNetwork) -> None:
    open_many(network.transport("a"), 4)
    assert [waits(network, f"a {number}") for number in range(4)] == [False, True, True, True]


def test_when_it_is_full_whoever_has_most_makes_room(network: MemoryNetwork) -> None:
    open_many(network.transport("few"), 1)
    for name in ("many", "more"):
        open_many(network.transport(name), 3)
    open_many(network.transport("member"), 2)
    assert waits(network, "few 0") and all(waits(network, f"member {number}") for number in range(2))
    left = [waits(network, f"{name} {number}") for name in ("many", "more") for number in range(3)]
    assert left == [False, False, True, False, True, True]
