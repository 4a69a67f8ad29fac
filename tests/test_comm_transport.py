"""One suite for every transport, shaped and not."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from streams import HERE, SOON, Background, auto_on

from diloco.comm.peers.directory import Directory
from diloco.comm.peers.identity import Identity
from diloco.comm.transport import memory, transport
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.frame import SECURED, pack_header
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.link import Link, Path, Paths
from diloco.comm.transport.memory import MemoryNetwork, connected
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.comm.transport.wire import WireCarrier
from diloco.errors import FrameError, PeerLost, StreamClosed, StreamEnded, TransportError, TransportTimeout


@dataclass
class Two:
    a: Transport
    b: Transport
    address_b: PeerAddress

    def streams(self, channel: str = "data") -> tuple[Stream, Stream]:
        one = self.a.connect(self.address_b, channel, timeout_s=SOON)
        return one, self.b.accept(channel, timeout_s=SOON)


def memory_pair() -> Two:
    network = MemoryNetwork()
    a, b = network.transport("a"), network.transport("b")
    return Two(a, b, b.address())


def direct_pair() -> Two:
    a, b = DirectTransport("a", HERE), DirectTransport("b", HERE)
    b.allow([a.address(HERE)])
    return Two(a, b, b.address(HERE))


def libp2p_pair(request: pytest.FixtureRequest) -> Two:
    a, b = (Libp2pTransport(directory) for directory in request.getfixturevalue("directories"))
    b.allow([a.address()])
    return Two(a, b, b.address())


def auto_pair(request: pytest.FixtureRequest, *, port_open: bool) -> Two:
    a, b = (auto_on(directory) for directory in request.getfixturevalue("directories"))
    b.allow([a.address(HERE)])
    if port_open:
        return Two(a, b, b.address(HERE))
    with socket.create_server((HERE, 0)) as listener:
        return Two(a, b, replace(b.address(HERE), port=listener.getsockname()[1]))


def shaped(pair: Two) -> Two:
    paths = Paths(Path(delay_s=0.002, jitter_s=0.001))
    a, b = (ShapedTransport(transport, Link(2e9, 2e9), paths) for transport in (pair.a, pair.b))
    return Two(a, b, pair.address_b)


def shaped_on_one_side(pair: Two) -> Two:
    return Two(ShapedTransport(pair.a, Link(1e9, 1e9)), pair.b, pair.address_b)


KINDS: dict[str, Callable[[pytest.FixtureRequest], Two]] = {
    "memory": lambda _: memory_pair(),
    "direct": lambda _: direct_pair(),
    "memory-shaped": lambda _: shaped(memory_pair()),
    "direct-shaped": lambda _: shaped(direct_pair()),
    "direct-capped": lambda _: shaped_on_one_side(direct_pair()),
    "libp2p": libp2p_pair,
    "libp2p-shaped": lambda request: shaped(libp2p_pair(request)),
    "auto-direct": lambda request: auto_pair(request, port_open=True),
    "auto-libp2p": lambda request: auto_pair(request, port_open=False),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Directory]]:
    """Two that do not know each other: addresses must be enough."""
    folder = tmp_path_factory.mktemp("identities")
    started = [Directory.start(Identity.load(folder / name), b"r" * 32) for name in "ab"]
    yield started
    for directory in started:
        directory.close()


@pytest.fixture(params=list(KINDS))
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    pair = KINDS[request.param](request)
    yield pair
    pair.a.close()
    pair.b.close()


@pytest.mark.parametrize("size", [0, 1, 16 * 1024, 70_001, 5_000_000])
def test_a_frame_arrives_as_it_was_sent_in_both_directions(two: Two, size: int) -> None:
    payload = os.urandom(size)
    for sender, receiver in (two.streams(), two.streams()[::-1]):
        sending = Background(lambda sender=sender: sender.send(3, b"head", payload))
        frame = receiver.receive(timeout_s=SOON)
        sending.result()
        assert (frame.kind, frame.head) == (3, b"head")
        assert frame.payload == payload


def test_both_directions_at_once_many_frames(two: Two) -> None:
    a, b = two.streams()
    frames = [os.urandom(n * 7919) for n in range(40)]

    def send_all(stream: Stream) -> None:
        for number, frame in enumerate(frames):
            stream.send(number, payload=frame)
        stream.end()

    def receive_all(stream: Stream) -> list[bytes]:
        received = []
        while True:
            try:
                received.append(bytes(stream.receive(timeout_s=SOON).payload))
            except StreamEnded:
                return received

    sending = [Background(lambda s=s: send_all(s)) for s in (a, b)]
    receiving = [Background(lambda s=s: receive_all(s)) for s in (a, b)]
    assert [work.result() for work in receiving] == [frames, frames]
    for work in sending:
        work.result()


def test_identities_and_channels(two: Two) -> None:
    first, second = two.a.connect(two.address_b, "x", timeout_s=SOON), two.a.connect(two.address_b, "y", timeout_s=SOON)
    first.send(1, b"on x")
    second.send(1, b"on y")
    y, x = two.b.accept("y", timeout_s=SOON), two.b.accept("x", timeout_s=SOON)
    assert (first.peer, x.peer) == (two.b.identity, two.a.identity)
    assert (x.receive(timeout_s=SOON).head, y.receive(timeout_s=SOON).head) == (b"on x", b"on y")


def test_the_payload_goes_where_the_receiver_says(two: Two) -> None:
    a, b = two.streams()
    buffer = bytearray(300_000)

    def place(kind: int, head: bytes, length: int) -> memoryview:
        start = int(head)
        return memoryview(buffer)[start : start + length]

    a.send(1, b"100000", b"x" * 100_000)
    frame = b.receive(place, timeout_s=SOON)
    assert buffer == bytes(100_000) + b"x" * 100_000 + bytes(100_000)
    assert frame.payload.obj is buffer


def test_a_stream_that_ends_and_one_that_is_cut_differ(two: Two) -> None:
    a, b = two.streams()
    a.send(1)
    a.end()
    b.receive(timeout_s=SOON)
    for _ in range(2):
        with pytest.raises(StreamEnded):
            b.receive(timeout_s=SOON)
    a, b = two.streams()
    a.send(1)
    a.close()
    b.receive(timeout_s=SOON)
    with pytest.raises(PeerLost, match=rf"^{two.a.identity}\b"):
        b.receive(timeout_s=SOON)


def wire_carrier_of(stream: Stream) -> WireCarrier:
    carrier: Any = stream.carrier
    while not isinstance(carrier, WireCarrier):
        carrier = carrier.inner
    return carrier


def write(stream: Stream, raw: bytes) -> None:
    """Past all that makes frames."""
    wire_carrier_of(stream).wire.write(memoryview(raw), None)


def header(stream: Stream, payload: bytes, rest: int = 0) -> bytes:
    return pack_header(1, b"", payload, rest=rest, flags=SECURED if wire_carrier_of(stream).wire.secure else 0)


def test_a_frame_cut_in_its_middle_is_no_frame(two: Two) -> None:
    a, b = two.streams()
    write(a, header(a, bytes(1000)) + bytes(500))
    a.close()
    with pytest.raises(PeerLost, match=f"^{two.a.identity}: "):
        b.receive(timeout_s=SOON)


def test_bad_bytes_end_the_stream_and_name_the_peer(two: Two) -> None:
    a, b = two.streams()
    write(a, os.urandom(1000))
    with pytest.raises(FrameError, match=f"^{two.a.identity}: "):
        b.receive(timeout_s=SOON)
    with pytest.raises(TransportError):
        b.send(1)
    one, other = two.streams()
    one.send(1, b"others are not disturbed")
    assert other.receive(timeout_s=SOON).head == b"others are not disturbed"


def test_a_peer_cannot_make_us_allocate(two: Two) -> None:
    a, b = two.streams()
    raw = bytearray(header(a, b""))
    raw[12:20] = (2**40).to_bytes(8, "little")
    write(a, raw)
    with pytest.raises(FrameError, match="at most"):
        b.receive(timeout_s=SOON)


def test_nothing_is_lost_by_a_timeout(two: Two) -> None:
    a, b = two.streams()
    with pytest.raises(TransportTimeout):
        b.receive(timeout_s=0.05)
    a.send(1, b"late")
    assert b.receive(timeout_s=SOON).head == b"late"
    with pytest.raises(TransportTimeout):
        two.b.accept("nobody", timeout_s=0.05)


def limit_stall(stream: Stream, stall_s: float) -> None:
    stream.stall_s = wire_carrier_of(stream).stall_s = stall_s


def test_a_frame_that_has_begun_may_trickle_in(two: Two) -> None:
    a, b = two.streams()
    limit_stall(b, 2.0)
    raw = header(a, bytes(500)) + bytes(500)
    write(a, raw[:10])

    def trickle() -> None:
        for start in range(10, len(raw), 100):
            time.sleep(0.05)
            write(a, raw[start : start + 100])

    sending = Background(trickle)
    frame = None
    while frame is None:
        try:
            frame = b.receive(timeout_s=0.1)
        except TransportTimeout:  # a delaying link shows whole pieces only
            continue
    sending.result()
    assert frame.payload == bytes(500)


@pytest.mark.parametrize(("rest", "missing"), [(0, 500), (500, 0)], ids=["within-a-piece", "between-pieces"])
def test_a_peer_that_stops_within_a_frame_is_lost(two: Two, rest: int, missing: int) -> None:
    a, b = two.streams()
    limit_stall(b, 0.2)
    started = time.monotonic()
    receiving = Background(b.receive)
    write(a, header(a, bytes(1000), rest) + bytes(1000 - missing))
    with pytest.raises(PeerLost, match="stalled within a frame"):
        receiving.result()
    assert time.monotonic() - started >= 0.2
    with pytest.raises(TransportError):
        b.receive(timeout_s=SOON)


def test_a_timeout_covers_the_wait_for_another_sender_and_memory_is_bounded() -> None:
    near, far = memory_pair().streams()
    first = Background(lambda: near.send(1, payload=bytes(2 * memory.PIPE_BYTES)))
    assert first.blocked()
    assert wire_carrier_of(near).wire.outgoing.held <= memory.PIPE_BYTES
    second = Background(lambda: near.send(2, timeout_s=0.1))
    with pytest.raises(TransportTimeout):
        second.result()
    assert far.receive(timeout_s=SOON).kind == 1
    first.result()
    near.send(3)
    assert far.receive(timeout_s=SOON).kind == 3


def test_a_timeout_covers_the_wait_for_another_receiver(two: Two) -> None:
    a, b = two.streams()
    first = Background(b.receive)
    assert first.blocked()
    second = Background(lambda: b.receive(timeout_s=0.1))
    with pytest.raises(TransportTimeout):
        second.result()
    a.send(1)
    assert first.result().kind == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_a_send_interrupted_within_a_frame_closes_the_stream(
    monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    a, b = memory_pair().streams()
    wire, writes = wire_carrier_of(a).wire, []
    write = wire.write

    def interrupted(data: memoryview, deadline: float | None) -> None:
        writes.append(len(data))
        if len(writes) == 2:
            raise interruption
        write(data, deadline)

    monkeypatch.setattr(wire, "write", interrupted)
    with pytest.raises(interruption):
        a.send(1, payload=bytes(100_000))
    with pytest.raises(TransportError):
        a.send(2)
    with pytest.raises(PeerLost):
        b.receive(timeout_s=SOON)


@pytest.mark.parametrize("arguments", [(256,), (-1,), (1, "text"), (1, b"", memoryview(bytes(100_000))[::2])])
def test_what_cannot_be_sent_is_refused_before_anything_is(two: Two, arguments: tuple[Any, ...]) -> None:
    a, b = two.streams()
    with pytest.raises((TypeError, ValueError)):
        a.send_reserved(*arguments)
    a.send(1, b"still in step")
    assert b.receive(timeout_s=SOON).head == b"still in step"


@pytest.mark.parametrize("closer", ["own", "peer", "transport"])
def test_close_unblocks_a_receive(two: Two, closer: str) -> None:
    a, b = two.streams()
    receiving = Background(b.receive)
    assert receiving.blocked()
    {"own": b, "peer": a, "transport": two.b}[closer].close()
    with pytest.raises(PeerLost if closer == "peer" else StreamClosed):
        receiving.result()


@pytest.mark.parametrize("closer", ["own", "peer"])
def test_back_pressure_blocks_a_send_and_close_unblocks_it(two: Two, closer: str) -> None:
    a, b = two.streams()
    sending = Background(lambda: [a.send(1, payload=bytes(2**20)) for _ in range(400)])
    time.sleep(0.3)
    assert sending.blocked()
    assert a.bytes_sent < 100 * 2**20
    (a if closer == "own" else b).close()
    with pytest.raises(StreamClosed if closer == "own" else PeerLost):
        sending.result()


def test_a_send_that_is_stuck_times_out(two: Two) -> None:
    a, _b = two.streams()
    with pytest.raises(TransportError):
        for _ in range(400):
            a.send(1, payload=bytes(2**20), timeout_s=0.3)


def test_closing_a_transport_unblocks_accept(two: Two) -> None:
    accepting = Background(lambda: two.b.accept("data", timeout_s=None))
    assert accepting.blocked()
    two.b.close()
    with pytest.raises(StreamClosed):
        accepting.result()


def test_connecting_to_nobody_fails(two: Two) -> None:
    two.b.close()
    with pytest.raises(PeerLost, match=two.b.identity):
        two.a.connect(two.address_b, "data", timeout_s=SOON)


def test_headers_count_as_sent_too(two: Two) -> None:
    a, b = two.streams()
    before = a.bytes_sent
    a.send(1, b"head", bytes(1_000_000))
    b.receive(timeout_s=SOON)
    assert 1_000_044 < a.bytes_sent - before < 1_010_000


def test_reserved_kinds_are_refused(two: Two) -> None:
    a, _ = two.streams()
    with pytest.raises(ValueError, match="kind"):
        a.send(255)


def test_damage_in_memory_is_seen_by_the_checksum() -> None:
    near, far = connected("a", "b")
    raw = bytearray(pack_header(1, b"", b"payload") + b"payload")
    raw[-1] ^= 1
    near.write(memoryview(raw), None)
    with pytest.raises(FrameError, match="a: checksum"):
        Stream(WireCarrier(far)).receive()


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
