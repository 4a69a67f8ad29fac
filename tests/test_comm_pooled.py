"""One connection serves many streams, one after the other; a stream that is cut takes its connection along."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from streams import SOON, until

from diloco.comm.transport.frame import END
from diloco.comm.transport.memory import MemoryNetwork, MemoryTransport
from diloco.comm.transport.pooled import CHANNEL, MAX_AGE_S, MAX_OF_ONE, Lease, PooledTransport
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import Deadline, Piece
from diloco.errors import PeerLost, StreamClosed, StreamEnded


class Counting(MemoryTransport):
    """Counts the connections it opens."""

    connections = 0

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        self.connections += 1
        return super().connect(peer, channel, timeout_s=timeout_s)


def answered(transport: PooledTransport) -> bool:
    """Whether the news that the last stream was read has come back."""
    wires = [idle.connection.carrier.wire for idle in transport._idle.values()]  # type: ignore[attr-defined]
    return all(wire.incoming.held for wire in wires)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Two:
    network: MemoryNetwork
    plain: Counting
    a: PooledTransport
    b: PooledTransport
    clock: "Clock"

    def open(self, channel: str, port: int = 0) -> Stream:
        return self.a.connect(PeerAddress("b", port=port), channel, timeout_s=SOON)

    def silent(self, count: int) -> list[Stream]:
        """Connections on which no stream begins, once b has them."""
        opened = []
        for _ in range(count):
            opened.append(self.plain.connect(PeerAddress("b"), CHANNEL, timeout_s=SOON))
            until(lambda: not self.b.transport.inbox._waiting)  # type: ignore[attr-defined]
        return opened

    def message(self, channel: str, text: bytes, port: int = 0) -> bytes:
        """Sent on a stream of its own, which both sides see end."""
        sender = self.open(channel, port)
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


@pytest.fixture
def two() -> Iterator[Two]:
    network = MemoryNetwork()
    plain = Counting(network, "a")
    network.peers["a"] = plain
    clock = Clock()
    pair = Two(network, plain, PooledTransport(plain, clock=clock), PooledTransport(network.transport("b")), clock)
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


def is_cut(stream: Stream) -> bool:
    return bool(stream.carrier.wire.incoming.broken)  # type: ignore[attr-defined]


def test_a_peers_oldest_idle_connection_makes_way_for_its_fifth(two: Two) -> None:
    silent = two.silent(MAX_OF_ONE)
    assert [is_cut(stream) for stream in silent] == [False] * MAX_OF_ONE
    assert two.message("x", b"through") == b"through"
    assert [is_cut(stream) for stream in silent] == [True, False, False, False]


def test_streams_that_nobody_reads_make_way_too_and_leave_no_thread(two: Two) -> None:
    before = threading.active_count()
    unread = []
    for number in range(3 * MAX_OF_ONE):
        unread.append(two.open(f"{number}"))
        until(lambda number=number: f"{number}" in two.b.inbox._waiting)  # type: ignore[misc]
    until(lambda: threading.active_count() <= before + MAX_OF_ONE)
    assert two.message("y", b"through") == b"through"


def test_a_connection_is_not_used_for_another_address(two: Two) -> None:
    two.message("x", b"", port=1)
    old = two.a._idle["b"].connection
    two.message("y", b"", port=2)
    assert (two.plain.connections, is_cut(old)) == (2, True)


def test_an_old_connection_is_replaced_however_often_it_is_used(two: Two) -> None:
    for two.clock.now in (0.0, MAX_AGE_S / 2, MAX_AGE_S):
        two.message("x", b"")
    assert two.plain.connections == 1
    two.clock.now = MAX_AGE_S + 1
    two.message("x", b"")
    assert two.plain.connections == 2


def test_old_connections_to_others_are_dropped_as_well(two: Two) -> None:
    two.message("x", b"")
    old = two.a._idle["b"].connection
    two.clock.now = MAX_AGE_S + 1
    with pytest.raises(PeerLost):
        two.a.connect(PeerAddress("nobody"), "x", timeout_s=SOON)
    assert is_cut(old)


class Interrupted(threading.Event):
    """Lets another thread's work happen right after somebody saw that the stream is not over."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile: Callable[[], None] | None = meanwhile

    def is_set(self) -> bool:
        seen = super().is_set()
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return seen


class Recorded:
    """A carrier that takes everything, and whose connection must not be cut after it was given back."""

    peer, bytes_sent, bytes_for = "b", 0, None

    def __init__(self) -> None:
        self.happened: list[str] = []

    def send(self, piece: Piece, deadline: Deadline) -> None:
        self.happened.append("sent")

    def close(self) -> None:
        self.happened.append("closed")


def test_an_end_that_overtakes_a_close_never_gives_a_cut_connection_back() -> None:
    carrier = Recorded()
    lease = Lease(Stream(carrier), lambda: carrier.happened.append("given back"))  # type: ignore[arg-type]
    ending = threading.Thread(target=lambda: lease.send(Piece(END, b"", memoryview(b"")), None))

    def end_meanwhile() -> None:
        ending.start()
        until(lambda: "sent" in carrier.happened)
        ending.join(0.2)  # without a lock it goes all the way

    lease.over = Interrupted(end_meanwhile)
    lease.close()
    ending.join()
    assert carrier.happened == ["sent", "closed"]
