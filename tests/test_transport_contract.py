"""What every transport does, run against each of them, shaped and pooled ones included.

What is special about one of them is in its own file: `test_comm_memory.py`, `test_comm_direct.py` and so on.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from streams import SOON, Background, out_of_threads, until, until_stuck
from transports import (
    BOTH_WAYS,
    CHECKSUMMED,
    GUARDED,
    KINDS,
    THREADED,
    Two,
    header,
    limit_stall,
    wire_carrier_of,
    write,
)

from diloco.comm.transport import transport
from diloco.comm.transport.transport import Stream
from diloco.errors import FrameError, PeerLost, PeerRefused, StreamClosed, StreamEnded, TransportError, TransportTimeout

LARGE = 2**25  # bytes, more than a wire and all buffers on its way take in


@pytest.fixture(params=list(KINDS))
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    pair = KINDS[request.param](lambda: request.getfixturevalue("directories"))
    yield pair
    pair.close()


SIZES = [0, 1, 16 * 1024, 70_001, 5_000_000]
FRAMES = [os.urandom(n * 7919) for n in range(40)]


def assert_arrives(sender: Stream, receiver: Stream, size: int) -> None:
    payload = os.urandom(size)
    sending = Background(lambda: sender.send(3, b"head", payload))
    frame = receiver.receive(timeout_s=SOON)
    sending.result()
    assert (frame.kind, frame.head) == (3, b"head")
    assert frame.payload == payload


def test_frames_of_any_size_arrive_as_they_were_sent(two: Two) -> None:
    a, b = two.streams()
    for size in SIZES:
        assert_arrives(a, b, size)


@pytest.mark.parametrize("two", BOTH_WAYS, indirect=True)
def test_frames_of_any_size_come_back(two: Two) -> None:
    a, b = two.streams()
    for size in SIZES:
        assert_arrives(b, a, size)


def send_all(stream: Stream) -> None:
    for number, frame in enumerate(FRAMES):
        stream.send(number, payload=frame)
    stream.end()


def receive_all(stream: Stream) -> list[bytes]:
    received = []
    while True:
        try:
            received.append(bytes(stream.receive(timeout_s=SOON).payload))
        except StreamEnded:
            return received


@pytest.mark.parametrize("two", BOTH_WAYS, indirect=True)
def test_both_directions_at_once_many_frames(two: Two) -> None:
    streams = two.streams()
    sending = [Background(lambda s=s: send_all(s)) for s in streams]
    receiving = [Background(lambda s=s: receive_all(s)) for s in streams]
    assert [work.result() for work in receiving] == [FRAMES, FRAMES]
    for work in sending:
        work.result()


def test_many_streams_at_once_keep_their_frames_apart_and_in_order(two: Two) -> None:
    streams = [two.streams(f"{number}") for number in range(4)]
    sending = [Background(lambda s=s: send_all(s)) for s, _ in streams]
    receiving = [Background(lambda s=s: receive_all(s)) for _, s in streams]
    assert all(work.result() == FRAMES for work in receiving)
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


@pytest.mark.parametrize("two", CHECKSUMMED, indirect=True)
def test_damage_is_seen_by_the_checksum(two: Two) -> None:
    a, b = two.streams()
    write(a, header(a, b"payload") + b"payloaD")
    with pytest.raises(FrameError, match=f"^{two.a.identity}: checksum"):
        b.receive(timeout_s=SOON)


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


def test_a_timeout_covers_the_wait_for_another_sender(two: Two) -> None:
    a, b = two.streams()
    first = Background(lambda: a.send(1, payload=bytes(LARGE)))
    assert first.blocked()
    second = Background(lambda: a.send(2, timeout_s=0.1))
    with pytest.raises(TransportTimeout):
        second.result()
    assert b.receive(timeout_s=SOON).kind == 1
    first.result()
    a.send(3)
    assert b.receive(timeout_s=SOON).kind == 3


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
    two: Two, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    a, b = two.streams()
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
    until_stuck(a)
    assert sending.blocked()
    assert a.bytes_sent < LARGE
    (a if closer == "own" else b).close()
    with pytest.raises(StreamClosed if closer == "own" else PeerLost):
        sending.result()


def test_a_send_that_is_stuck_times_out(two: Two) -> None:
    a, _b = two.streams()
    with pytest.raises(PeerLost, match=rf"^{two.b.identity}\b.* (stalled|uplink)"):
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


def test_a_closed_transport_opens_nothing(two: Two) -> None:
    two.a.close()
    with pytest.raises(TransportError):
        two.connect()


def test_a_channel_that_is_forgotten_is_cut_and_refused(two: Two) -> None:
    """By the connect itself, or as soon as the stream is used."""
    waiting = two.connect("old")
    waiting.send(1)
    other, there = two.streams("other")
    two.b.forget("old")
    with pytest.raises(PeerLost, match=two.b.identity):
        waiting.receive(timeout_s=SOON)
    with pytest.raises(PeerLost, match=two.b.identity):
        two.connect("old").receive(timeout_s=SOON)
    other.send(1, b"other channels are not disturbed")
    assert there.receive(timeout_s=SOON).head == b"other channels are not disturbed"


@pytest.mark.parametrize("two", BOTH_WAYS, indirect=True)  # a pool has fewer connections than that
def test_of_too_many_streams_that_nobody_accepts_one_makes_way(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_WAITING_OF_ONE", 3)
    streams = [two.connect() for _ in range(4)]
    hearing = [Background(stream.receive) for stream in streams]
    until(lambda: not all(work.blocked() for work in hearing))
    accepted = [two.b.accept("data", timeout_s=SOON) for _ in range(3)]
    for stream in accepted:
        stream.send(1)
    assert sorted(outcome(work) for work in hearing) == ["PeerLost", "frame", "frame", "frame"]
    with pytest.raises(TransportTimeout):
        two.b.accept("data", timeout_s=0)


def outcome(work: Background) -> str:
    try:
        work.result()
    except PeerLost:
        return "PeerLost"
    return "frame"


@pytest.mark.parametrize("two", GUARDED, indirect=True)
def test_who_is_not_allowed_is_refused_and_streams_that_exist_stay(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    near, far = two.streams()
    two.allow()
    reason = f"(stream: b'not among the peers that may connect|certificate of {two.a.identity})"
    with pytest.raises(PeerRefused, match=f"^{two.b.identity} refused the {reason}"):
        two.connect("refused")
    until(lambda: f"{two.b.identity} refused a" in caplog.text)
    near.send(1, b"streams that exist stay")
    assert far.receive(timeout_s=SOON).head == b"streams that exist stay"
    assert two.address_a is not None
    two.allow(two.address_a)
    assert two.streams("allowed again")[1].peer == two.a.identity


@pytest.mark.parametrize("two", THREADED, indirect=True)
def test_out_of_threads_costs_one_connection(
    two: Two, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", out_of_threads)
        with pytest.raises(PeerLost):
            two.connect().receive(timeout_s=SOON)
    assert "can't start new thread" in caplog.text
    assert two.streams()[1].peer == two.a.identity
