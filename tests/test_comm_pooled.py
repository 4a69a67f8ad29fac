"""One connection serves many streams, one after the other; a stream that is cut takes its connection along."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from diloco.comm.memory import MemoryNetwork, MemoryTransport
from diloco.comm.pooled import PooledTransport
from diloco.comm.transport import PeerAddress, Stream
from diloco.errors import PeerLost, StreamClosed, StreamEnded

SOON = 10.0


class Counting(MemoryTransport):
    """Counts the connections it opens."""

    connections = 0

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        self.connections += 1
        return super().connect(peer, channel, timeout_s=timeout_s)


def answered(transport: PooledTransport) -> bool:
    """Whether the news that the last stream was read has come back."""
    wires = [connection.carrier.wire for connection in transport._idle.values()]  # type: ignore[attr-defined]
    return all(wire.incoming.held for wire in wires)


@dataclass
class Two:
    network: MemoryNetwork
    plain: Counting
    a: PooledTransport
    b: PooledTransport

    def open(self, channel: str) -> Stream:
        return self.a.connect(PeerAddress("b"), channel, timeout_s=SOON)

    def message(self, channel: str, text: bytes) -> bytes:
        """Sent on a stream of its own, which both sides see end."""
        sender = self.open(channel)
        sender.send(1, text)
        receiver = self.b.accept(channel, timeout_s=SOON)
        head = receiver.receive(timeout_s=SOON).head
        sender.end()
        with pytest.raises(StreamEnded):
            receiver.receive(timeout_s=SOON)
        for stream in (sender, receiver):
            stream.close()
        until(lambda: answered(self.a))
        return head


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


@pytest.fixture
def two() -> Iterator[Two]:
    network = MemoryNetwork()
    plain = Counting(network, "a")
    network.peers["a"] = plain
    pair = Two(network, plain, PooledTransport(plain), PooledTransport(network.transport("b")))
    yield pair
    pair.a.close()
    pair.b.close()


def test_streams_follow_each_other_on_one_connection(two: Two) -> None:
    assert [two.message(f"round {n}", b"%d" % n) for n in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert two.plain.connections == 1


def test_streams_at_the_same_time_have_connections_of_their_own(two: Two) -> None:
    first, second = two.open("x"), two.open("y")
    second.send(1, b"second")
    first.send(1, b"first")
    assert two.b.accept("x", timeout_s=SOON).receive(timeout_s=SOON).head == b"first"
    assert two.b.accept("y", timeout_s=SOON).receive(timeout_s=SOON).head == b"second"
    assert two.plain.connections == 2


def test_a_stream_closed_before_its_end_is_a_cut_and_the_next_has_a_new_connection(two: Two) -> None:
    sender = two.open("x")
    sender.send(1, b"half")
    receiver = two.b.accept("x", timeout_s=SOON)
    receiver.receive(timeout_s=SOON)
    sender.close()
    with pytest.raises(PeerLost):
        receiver.receive(timeout_s=SOON)
    assert two.message("y", b"whole") == b"whole"
    assert two.plain.connections == 2


def test_a_receiver_that_hangs_up_costs_one_connection(two: Two) -> None:
    two.message("first", b"")
    two.open("x").send(1)
    two.b.accept("x", timeout_s=SOON).close()
    assert two.message("y", b"whole") == b"whole"


def test_a_peer_that_came_back_is_connected_to_anew(two: Two) -> None:
    two.message("before", b"")
    two.b.close()
    two.b = PooledTransport(two.network.transport("b"))
    assert two.message("after", b"here") == b"here"
    assert two.plain.connections == 2


def test_bytes_are_those_of_the_stream_not_of_the_connection(two: Two) -> None:
    streams = []
    for number in range(2):
        streams.append(two.open(f"{number}"))
        streams[-1].send(1, payload=bytes(1000))
        two.b.accept(f"{number}", timeout_s=SOON).receive(timeout_s=SOON)
        streams[-1].end()
    assert [1000 < stream.bytes_sent < 1300 for stream in streams] == [True, True]


def test_a_stream_that_nobody_reads_holds_no_other_up(two: Two) -> None:
    for number in range(3):
        stream = two.open(f"nobody {number}")
        stream.send(1, payload=bytes(1000))
        stream.end()
    assert two.message("y", b"through") == b"through"


def test_after_its_end_a_stream_is_of_no_more_use(two: Two) -> None:
    sender = two.open("x")
    sender.end()
    with pytest.raises(StreamClosed):
        sender.send(1)
    assert two.message("y", b"unharmed") == b"unharmed"
