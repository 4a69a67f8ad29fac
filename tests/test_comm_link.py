import math
import threading
import time
from random import Random
from typing import Any

import pytest

from diloco.comm.transport.link import BURST_S, Line, Link, Path, PathPace, Paths
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.shaped import AHEAD_S, ShapedTransport, cut_piece, sent_at, window_bytes
from diloco.comm.transport.transport import Frame, Stream
from diloco.comm.transport.wire import Deadline, Piece, WireCarrier
from diloco.errors import PeerLost, TransportTimeout

SOON = 20.0
RATES = [1e6, 20e6, 200e6, 1e9, 2e9]


@pytest.mark.parametrize("bits_per_s", RATES)
@pytest.mark.parametrize("oversleep_s", [0.0, 0.0001, 0.003])
def test_the_rate_holds_although_sleeps_end_late(bits_per_s: float, oversleep_s: float) -> None:
    """A sender sleeps until each piece is through, and wakes up late each time."""
    line, start = Line(bits_per_s, burst_s=0.008), 100.0
    size, now = line.piece_bytes, start
    count = math.ceil(bits_per_s / 8 * 2 / size)  # two seconds' worth
    for _ in range(count):
        finish = line.reserve(size, now)
        now = finish + oversleep_s if finish > now else now
    assert now - start == pytest.approx(count * size * 8 / bits_per_s, rel=0.02)


@pytest.mark.parametrize("oversleep_s", [0.003, 0.02, 0.1])
def test_a_stream_makes_up_for_whatever_it_overslept(oversleep_s: float) -> None:
    pace, now = PathPace(Line(8e6, burst_s=BURST_S)), 100.0
    for _ in range(500):
        finish = pace.reserve(4000, now)  # 4 ms
        slept = finish > now
        now = finish + oversleep_s if slept else now
        pace.passed(finish, now, slept=slept)
    assert now - 100.0 == pytest.approx(2.0, abs=BURST_S + oversleep_s)


@pytest.mark.parametrize("idle_s", [0.1, 50.0])
def test_what_was_overslept_is_no_more_than_that(idle_s: float) -> None:
    pace = PathPace(Line(8e6))
    pace.passed(pace.reserve(4000, 100.0), 100.014, slept=True)  # 10 ms late
    assert pace.reserve(1000, 100.014 + idle_s) == pytest.approx(100.014 + idle_s - 0.010 + 0.001)


def test_a_stream_that_has_caught_up_has_nothing_left_to_make_up_for() -> None:
    pace = PathPace(Line(8e6))
    pace.passed(pace.reserve(4000, 100.0), 100.014, slept=True)
    pace.passed(pace.reserve(8000, 100.014), 100.014, slept=False)  # through at 100.012
    assert pace.reserve(1000, 200.0) == pytest.approx(200.0 - 0.002 + 0.001)
    pace.passed(200.0, 199.0, slept=False)
    assert pace.reserve(1000, 300.0) == pytest.approx(300.001)


def test_idling_saves_up_no_more_than_the_burst() -> None:
    line = Line(8000, burst_s=0.01)
    line.reserve(10, now=0.0)
    assert line.reserve(1000, now=500.0) == pytest.approx(500.99)


def test_two_streams_share_one_line() -> None:
    line = Line(8000)
    finishes = [line.reserve(500, now=10.0) for _ in range(4)]
    assert finishes == pytest.approx([10.5, 11.0, 11.5, 12.0])


@pytest.mark.parametrize(("up", "first_at"), [(8000, 10.5), (80_000, 10.05)], ids=["equal", "a faster before"])
def test_the_slower_of_two_lines_sets_the_rate_and_equal_ones_cost_no_more_than_one(up: float, first_at: float) -> None:
    before, behind = Line(up), Line(8000)
    found = [behind.reserve_arriving(500, before.reserve(500, now=10.0)) for _ in range(3)]
    assert found == pytest.approx([first_at, first_at + 0.5, first_at + 1.0])


def test_a_large_piece_of_a_fast_line_is_not_waved_through_a_slow_one() -> None:
    slow = Line(8e6)
    assert slow.reserve_arriving(1_000_000, last_at=10.0) == pytest.approx(11.0, abs=1.01 * slow.piece_bytes / 1e6)


def test_no_limit_means_no_wait() -> None:
    assert Line(None).reserve(10**12, now=5.0) == 5.0


@pytest.mark.parametrize("bits_per_s", [*RATES, 3e6, 6e6, 16e6])
def test_pieces_are_small_in_time_or_in_bytes(bits_per_s: float) -> None:
    size = Link(bits_per_s, None).piece_bytes
    assert 8 * 1024 <= size <= 2 * 1024 * 1024
    seconds = size * 8 / bits_per_s
    assert size == 8 * 1024 or seconds <= 0.0164 or (size <= 32 * 1024 and seconds <= 0.0656)


def test_cut_pieces_join_to_the_whole() -> None:
    payload = bytes(range(256)) * 10
    parts = list(cut_piece(Piece(5, b"head", memoryview(payload)), 1000))
    assert b"".join(part.payload for part in parts) == payload
    assert [(part.head, part.continues, part.rest) for part in parts] == [
        (b"head", False, 1560),
        (b"", True, 560),
        (b"", True, 0),
    ]


class Paper:
    """A wire that keeps what is written, with the overhead of TLS records."""

    peer, secure = "b", True

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: memoryview, deadline: Deadline) -> None:
        self.writes.append(bytes(data))

    def bytes_for(self, length: int) -> int:
        return length + 22 * math.ceil(length / 16384)


@pytest.mark.parametrize("head", [0, 4, 20_000])
@pytest.mark.parametrize("length", [0, 1, 16_336, 16_340, 16_341, 100_000])
def test_a_header_shares_its_record_with_the_payload(head: int, length: int) -> None:
    wire, payload = Paper(), bytes(range(250)) * 400
    carrier = WireCarrier(wire)  # type: ignore[arg-type]
    carrier.send(Piece(1, bytes(head), memoryview(payload)[:length]), None)
    assert b"".join(wire.writes)[44 + head :] == payload[:length]
    assert carrier.bytes_sent == sum(wire.bytes_for(len(write)) for write in wire.writes)
    if head < 16_000:
        assert len(wire.writes[0]) == min(16_384, 44 + head + length)


def test_arrival_is_delay_plus_jitter_plus_stall() -> None:
    random = Random(1)
    arrivals = [Path(delay_s=0.1, jitter_s=0.05).arrival(10.0, random) for _ in range(1000)]
    assert 10.1 <= min(arrivals) < 10.105 and 10.145 < max(arrivals) <= 10.15
    stalls = [Path(loss=0.25, stall_s=1.0).arrival(0.0, random) for _ in range(4000)]
    assert set(stalls) == {0.0, 1.0}
    assert sum(stalls) / 4000 == pytest.approx(0.25, abs=0.04)


def test_the_window_holds_what_is_on_its_way() -> None:
    assert window_bytes(Link(None, 2e9), Path(delay_s=0.08)) >= 2e9 / 8 * 0.08
    assert window_bytes(Link(None, 1e6), Path(delay_s=0.08)) == 4 * 1024 * 1024
    assert window_bytes(Link(), Path(delay_s=60)) == 256 * 1024 * 1024


class Net:
    def __init__(self, paths: Paths, rates: dict[str, tuple[float | None, float | None]]) -> None:
        network = MemoryNetwork()
        self.plain = {name: network.transport(name) for name in rates}
        self.shaped = {name: ShapedTransport(self.plain[name], Link(*rates[name]), paths) for name in rates}

    def streams(self, one: str, other: str) -> tuple[Stream, Stream]:
        near = self.shaped[one].connect(self.plain[other].address(), "data", timeout_s=SOON)
        return near, self.shaped[other].accept("data", timeout_s=SOON)

    def close(self) -> None:
        for transport in self.shaped.values():
            transport.close()


def transfer_s(near: Stream, far: Stream, size: int) -> float:
    start = time.monotonic()
    near.send(1, payload=bytes(size))
    far.receive(timeout_s=SOON)
    return time.monotonic() - start


@pytest.mark.parametrize(("up", "down"), [(50e6, None), (None, 50e6), (50e6, 50e6)])
def test_a_real_transfer_takes_as_long_as_the_link_says(up: float | None, down: float | None) -> None:
    net = Net(Paths(), {"a": (up, None), "b": (None, down)})
    assert transfer_s(*net.streams("a", "b"), 3_125_000) > 0.4  # 0.5 s at 50 Mbit/s
    net.close()


def receive_patiently(stream: Stream, timeout_s: float) -> Frame:
    give_up = time.monotonic() + SOON
    while time.monotonic() < give_up:
        try:
            return stream.receive(timeout_s=timeout_s)
        except TransportTimeout:
            continue
    raise AssertionError("nothing arrived")


@pytest.mark.parametrize("path", [Path(), Path(delay_s=0.1)])
def test_a_frame_may_take_longer_than_the_wait_for_it(path: Path) -> None:
    net = Net(Paths(path), {"a": (20e6, None), "b": (None, None)})
    near, far = net.streams("a", "b")
    sending = threading.Thread(target=near.send, args=(1, b"", b"x" * 1_000_000))  # 0.4 s
    sending.start()
    assert receive_patiently(far, timeout_s=0.05).payload == b"x" * 1_000_000
    sending.join()
    near.send(2, b"still in step")
    assert far.receive(timeout_s=SOON).head == b"still in step"
    net.close()


@pytest.mark.parametrize(
    ("stamp", "counts_as"),
    [(0, 100), (94, 100), (99, 99), (100.003, 100.003), (100.1, 100 + AHEAD_S), (104.9, 100 + AHEAD_S)],
)
def test_a_stamp_is_trusted_as_far_as_an_honest_sender_needs(stamp: float, counts_as: float) -> None:
    piece = Piece(1, b"", memoryview(b""), stamp_ns=int(stamp * 1e9))
    assert sent_at(piece, now=100.0) == pytest.approx(counts_as)


def test_delay_is_paid_once_and_not_per_piece() -> None:
    net = Net(Paths(Path(delay_s=0.3, jitter_s=0.01)), {"a": (None, None), "b": (None, None)})
    assert 0.3 <= transfer_s(*net.streams("a", "b"), 20_000_000) < 12.0  # 77 pieces: once for each would be 23 s
    net.close()


def test_held_pieces_do_not_overwrite_each_other() -> None:
    net = Net(Paths(Path(delay_s=0.05)), {"a": (None, None), "b": (None, None)})
    near, far = net.streams("a", "b")
    sizes = [100_000, 150_000, 70_000, 100, 3_000_000] * 4
    for _ in range(3):  # the first pass makes the buffers that the others use again
        for number, size in enumerate(sizes):
            near.send(number, payload=bytes([number]) * size)
        received = [bytes(far.receive(timeout_s=SOON).payload) for _ in sizes]
        assert received == [bytes([number]) * size for number, size in enumerate(sizes)]
    net.close()


def test_a_small_piece_does_not_hold_a_large_buffer() -> None:
    net = Net(Paths(Path(delay_s=0.001)), {"a": (None, None), "b": (None, None)})
    near, far = net.streams("a", "b")
    carrier: Any = far.carrier
    for size in (1_000_000, 100_000, 10):
        near.send(1, payload=bytes(size))
        far.receive(timeout_s=SOON)
    assert [len(buffer) for buffer in carrier._spare] == [1_000_000, 100_000]
    net.close()


@pytest.mark.parametrize("cut_into", [1, 5])
def test_no_frame_is_there_before_its_time(cut_into: int) -> None:
    link = (1e9, 1e9)
    net = Net(Paths(Path(delay_s=0.05)), {"a": link, "b": link})
    assert transfer_s(*net.streams("a", "b"), cut_into * Link(*link).piece_bytes) >= 0.05 + cut_into * 0.008 - 0.0085
    net.close()


def test_streams_of_an_island_share_its_uplink() -> None:
    net = Net(Paths(), {"a": (50e6, None), "b": (None, None), "c": (None, None)})
    (a1, b), (a2, c) = net.streams("a", "b"), net.streams("a", "c")
    start = time.monotonic()
    for stream in (a1, a2):
        stream.send(1, payload=bytes(1_500_000))
    for stream in (b, c):
        stream.receive(timeout_s=SOON)
    assert time.monotonic() - start > 0.4
    net.close()


def test_order_is_kept_under_jitter_and_stalls() -> None:
    net = Net(Paths(Path(jitter_s=0.01, loss=0.05, stall_s=0.02), seed=4), {"a": (None, None), "b": (None, None)})
    near, far = net.streams("a", "b")
    for number in range(100):
        near.send(number)
    assert [far.receive(timeout_s=SOON).kind for _ in range(100)] == list(range(100))
    net.close()


def test_a_cut_link_breaks_streams_on_both_sides_and_only_those() -> None:
    paths = Paths()
    net = Net(paths, {"a": (None, None), "b": (None, None), "c": (None, None)})
    (a, b), (a2, c) = net.streams("a", "b"), net.streams("a", "c")
    paths.cut("b", "a")
    for stream in (a, b):
        with pytest.raises(PeerLost, match="cut"):
            stream.receive(timeout_s=SOON)
        with pytest.raises(PeerLost, match="cut"):
            stream.send(1)
    with pytest.raises(PeerLost, match="cut"):
        net.streams("a", "b")
    a2.send(1, b"still there")
    assert c.receive(timeout_s=SOON).head == b"still there"
    paths.heal("a", "b")
    assert net.streams("a", "b")[0].peer == "b"
    net.close()
