"""What is particular to libp2p streams; what all transports share is in test_transport_contract.py."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from invited import admitted
from streams import SOON, Background, end_loop, kill_daemon, until, until_stuck
from transports import libp2p_pair

from diloco.comm.peers.directory import Directory
from diloco.comm.peers.identity import Identity
from diloco.comm.transport import libp2p
from diloco.comm.transport.libp2p import Libp2pTransport, detach
from diloco.comm.transport.link import Link
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.socketwire import SocketWire
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import deadline_in
from diloco.errors import DirectoryError, PeerLost, StreamClosed, StreamEnded

Start = Callable[..., Libp2pTransport]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[tuple[Directory, Libp2pTransport]] = []

    def make(name: str, **options: Any) -> Libp2pTransport:
        identity = Identity.load(tmp_path / name)
        directory = Directory.start(identity, admitted(identity), **options)
        started.append((directory, Libp2pTransport(directory)))
        return started[-1][1]

    yield make
    for directory, transport in started:
        transport.close()
        directory.close()


Pair = tuple[Libp2pTransport, Libp2pTransport]


@pytest.fixture
def mortal(start: Start) -> Pair:
    """With daemons of their own, for tests that end one."""
    a, b = start("a"), start("b")
    b.allow([a.address()])
    return a, b


@pytest.fixture
def two(directories: list[Directory]) -> Iterator[Pair]:
    pair = libp2p_pair(directories)
    yield cast(Pair, (pair.a, pair.b))
    pair.close()


def streams(a: Libp2pTransport, b: Libp2pTransport) -> tuple[Stream, Stream]:
    near = a.connect(b.address(), "data", timeout_s=SOON)
    return near, b.accept("data", timeout_s=SOON)


def send_for_ever(stream: Stream) -> None:
    while True:
        stream.send(1, payload=bytes(2**20))


def test_a_daemon_that_has_ended_before_it_serves_streams_does_so_when_it_runs_again(
    start: Start, tmp_path: Path
) -> None:
    a, identity = start("a"), Identity.load(tmp_path / "b")
    with closing(Directory.start(identity, admitted(identity))) as directory:
        kill_daemon(directory)
        with closing(Libp2pTransport(directory)) as b:
            b.allow([a.address()])
            directory.reopen()
            streams(a, b)


def test_a_daemon_that_runs_and_does_not_take_streams_is_an_error(start: Start) -> None:
    """Nobody would try again: an island would take no streams for life."""
    with pytest.raises(DirectoryError):
        Libp2pTransport(start("a")._directory)  # it serves one already


@pytest.mark.parametrize("end", [kill_daemon, end_loop])
@pytest.mark.parametrize("side", ["own", "peer"])
def test_the_end_of_the_daemon_wakes_everybody(mortal: Pair, end: Callable[[Directory], None], side: str) -> None:
    a, b = mortal
    reading, _silent = streams(a, b)
    writing, _slow = streams(a, b)
    blocked = [Background(reading.receive), Background(lambda: send_for_ever(writing))]
    until_stuck(writing)
    assert all(work.blocked() for work in blocked)
    end((a if side == "own" else b)._directory)
    for work in blocked:
        with pytest.raises((PeerLost, StreamClosed)):
            work.result()
    with pytest.raises(PeerLost):
        a.connect(b.address(), "data", timeout_s=SOON)


def test_the_end_of_the_daemon_ends_an_accept(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    a = start("a")
    accepting = Background(lambda: a.accept("data", timeout_s=None))
    assert accepting.blocked()
    kill_daemon(a._directory)
    with pytest.raises(StreamClosed):
        accepting.result()
    assert "p2pd has ended" in caplog.text


def test_a_peer_that_opens_and_says_nothing_is_dropped(
    two: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = two
    monkeypatch.setattr(libp2p, "HANDSHAKE_S", 0.3)
    wire = a._directory.call(a._open(b.address()))
    wire.read_into(memoryview(bytearray(44)), SOON)  # the greeting
    assert wire.wait(deadline_in(SOON))
    with pytest.raises(PeerLost, match="cut"):
        wire.read_into(memoryview(bytearray(1)), SOON)
    assert "nothing arrived in time" in caplog.text
    until(lambda: b._handshakes._value == libp2p.MAX_HANDSHAKES)  # its thread closes before it says so
    wire.close()


def test_only_so_many_streams_are_opened_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(libp2p, "MAX_HANDSHAKES", 1)
    a, b = request.getfixturevalue("two")  # only now: a transport counts from its beginning
    silent = a._directory.call(a._open(b.address()))
    assert silent.wait(deadline_in(SOON))
    with pytest.raises(PeerLost):
        a.connect(b.address(), "data", timeout_s=SOON)
    assert "others are being opened" in caplog.text
    silent.close()


@pytest.mark.parametrize("identity", ["{nobody}", "abc", "0OIl", ""])
@pytest.mark.parametrize("control", [(), ("/ip4/127.0.0.1/tcp/9",), ("/no/such/protocol",)])
def test_addresses_that_lead_nowhere(two: Pair, tmp_path: Path, identity: str, control: tuple[str, ...]) -> None:
    nobody = Identity.load(tmp_path / "nobody").peer_id
    with pytest.raises(PeerLost, match="no libp2p stream"):
        two[0].connect(PeerAddress(identity.format(nobody=nobody), control=control), "data", timeout_s=SOON)


def test_a_relay_is_asked(start: Start, tmp_path: Path) -> None:
    a, relay = start("a"), start("b", relays=True)
    circuits = tuple(f"{address}/p2p-circuit" for address in relay.address().control)
    nobody = PeerAddress(Identity.load(tmp_path / "nobody").peer_id, control=circuits)
    with pytest.raises(PeerLost, match="NO_RESERVATION"):
        a.connect(nobody, "data", timeout_s=SOON)


def test_an_islands_daemon_relays_for_no_stranger(two: Pair, tmp_path: Path) -> None:
    """libp2p's relays ask nobody who he is: two strangers spoke through any member, whatever its --relay said."""
    circuits = tuple(f"{address}/p2p-circuit" for address in two[1].address().control)
    nobody = PeerAddress(Identity.load(tmp_path / "nobody").peer_id, control=circuits)
    with pytest.raises(PeerLost, match="p2p-circuit] EOF"):
        two[0].connect(nobody, "data", timeout_s=SOON)


def test_an_open_that_takes_too_long_leaves_nothing_behind(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two
    streams(a, b)
    opened: list[asyncio.StreamWriter] = []
    released = asyncio.Event()
    real_open = a._p2p.call_binary_stream_handler

    async def slow_open(*arguments: Any) -> Any:
        await released.wait()
        result = await real_open(*arguments)
        opened.append(result[2])
        return result

    monkeypatch.setattr(a._p2p, "call_binary_stream_handler", slow_open)
    with pytest.raises(PeerLost, match="did not answer"):
        a.connect(PeerAddress(b.identity), "data", timeout_s=0.5)
    a._directory.thread.loop.call_soon_threadsafe(released.set)
    until(lambda: opened and opened[0].is_closing())


@pytest.mark.parametrize("early", [0, 1, 100_000, 1_000_000])
def test_nothing_is_lost_when_a_socket_leaves_the_loop(early: int) -> None:
    data = os.urandom(early) + b"later"
    near, far = socket.socketpair()
    sender = threading.Thread(target=near.sendall, args=(data[:early],))
    sender.start()

    async def take() -> SocketWire:
        reader, writer = await asyncio.open_connection(sock=far)
        await asyncio.sleep(0.1)  # the loop reads ahead meanwhile
        return await detach("peer", reader, writer)

    wire = asyncio.run(take())
    threading.Thread(target=lambda: (sender.join(), near.sendall(data[early:]))).start()
    read = bytearray(len(data))
    wire.read_into(memoryview(read), SOON)
    assert read == data
    near.close()
    with pytest.raises(PeerLost, match="cut before its end mark"):
        wire.read_into(memoryview(bytearray(1)), SOON)
    wire.close()


@pytest.mark.slow
def test_two_peers_that_nobody_can_reach_meet_through_a_relay(start: Start) -> None:
    """They announce the relays' circuits only. libp2p takes a place at a relay within half a minute where it knows
    four of them, and waits three minutes where it knows fewer."""
    relays = [start(f"relay{n}", relays=True)._directory.addresses[0] for n in range(4)]
    circuits = [f"{relay}/p2p-circuit" for relay in relays]
    hidden = {"bootstrap": relays, "announce": circuits, "behind_nat": True, "reachability": "private"}
    a, b = start("a", **hidden), start("b", **hidden)
    b.allow([a.address()])
    assert all("/p2p-circuit/" in address for address in b.address().control)
    near = connect_patiently(a, b.address())
    far = b.accept("data", timeout_s=SOON)
    near.send(1, b"there", bytes(20_000))
    assert len(far.receive(timeout_s=SOON).payload) == 20_000
    far.send(1, b"and back")
    far.end()
    assert near.receive(timeout_s=SOON).head == b"and back"
    with pytest.raises(StreamEnded):
        near.receive(timeout_s=SOON)
    ways = [str(way) for peer in a._directory.call(a._p2p.list_peers()) for way in ways_to(peer, b.identity)]
    assert ways and all("p2p-circuit" in way for way in ways)


def ways_to(peer: Any, identity: str) -> list[Any]:
    return list(peer.addrs) if str(peer.peer_id) == identity else []


def connect_patiently(a: Libp2pTransport, address: PeerAddress) -> Stream:
    deadline = time.monotonic() + 90
    while True:
        try:
            return a.connect(address, "data", timeout_s=SOON)
        except PeerLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(5.5)  # libp2p does not dial again within five seconds


def test_a_shaped_stream_is_cut_like_any_other(mortal: Pair) -> None:
    a, b = (ShapedTransport(transport, Link(1e9, 1e9)) for transport in mortal)
    near = a.connect(mortal[1].address(), "data", timeout_s=SOON)
    far = b.accept("data", timeout_s=SOON)
    near.send(1, payload=bytes(300_000))
    assert len(far.receive(timeout_s=SOON).payload) == 300_000
    kill_daemon(mortal[0]._directory)
    with pytest.raises(PeerLost):
        far.receive(timeout_s=SOON)
