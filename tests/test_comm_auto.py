"""Which way a connection takes: scripted ways for the decisions, real ones for a black hole and a dead daemon."""

import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from streams import HERE, SOON, kill_daemon
from transports import Two, auto_pair, started_directories

from diloco.comm.peers.directory import Directory
from diloco.comm.transport.auto import RETRY_DIRECT_S, AutoTransport
from diloco.comm.transport.transport import Inbox, PeerAddress, Transport
from diloco.errors import PeerLost, PeerRefused, TransportError, TransportTimeout, WrongPeer

PEER = PeerAddress("peer", "10.0.0.7", 31337, b"certificate")
LOST = PeerLost("peer: gone")


@dataclass
class Scripted:
    """A way that answers with its own name, or with an error while it has one."""

    name: str
    inbox: Inbox
    tried: list[str]
    error: TransportError | None = None
    identity: str = "me"
    given_s: list[float] = field(default_factory=list)
    allowed: list[PeerAddress] = field(default_factory=list)

    def allow(self, peers: list[PeerAddress]) -> None:
        self.allowed = peers

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Any:
        self.tried.append(self.name)
        self.given_s.append(timeout_s)
        if self.error:
            raise self.error
        return self.name


class Scene:
    def __init__(self) -> None:
        inbox = Inbox()
        self.tried: list[str] = []
        self.now = 0.0
        self.direct, self.libp2p = Scripted("direct", inbox, self.tried), Scripted("libp2p", inbox, self.tried)
        ways: Any = (self.direct, self.libp2p)
        self.auto = AutoTransport(*ways, clock=lambda: self.now)

    def connect(self, peer: PeerAddress = PEER) -> list[str]:
        """The ways that were tried, in order; the last one is the one that was taken."""
        self.tried.clear()
        taken: Any = self.auto.connect(peer, "data", timeout_s=SOON)
        assert taken == self.tried[-1]
        return list(self.tried)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_direct_is_preferred(scene: Scene) -> None:
    assert [scene.connect(), scene.connect()] == [["direct"], ["direct"]]


@pytest.mark.parametrize("lacking", [{"host": ""}, {"certificate_der": b""}])
def test_without_a_direct_address_libp2p_it_is(scene: Scene, lacking: dict[str, Any]) -> None:
    peer = replace(PEER, **lacking)
    assert scene.connect(peer) == ["libp2p"]
    scene.auto.allow([peer, PEER])
    assert (scene.direct.allowed, scene.libp2p.allowed) == ([PEER], [peer, PEER])


@pytest.mark.parametrize("error", [LOST, TransportTimeout("peer: no greeting")])
def test_where_direct_fails_libp2p_is_taken_and_remembered_for_a_while(scene: Scene, error: TransportError) -> None:
    scene.direct.error = error
    assert scene.connect() == ["direct", "libp2p"]
    scene.now = RETRY_DIRECT_S - 1
    assert scene.connect() == ["libp2p"]
    scene.now = RETRY_DIRECT_S
    assert scene.connect() == ["direct", "libp2p"]
    scene.now = RETRY_DIRECT_S * 1.5
    assert scene.connect() == ["libp2p"]
    scene.now, scene.direct.error = RETRY_DIRECT_S * 2.5, None
    assert [scene.connect(), scene.connect()] == [["direct"], ["direct"]]


@pytest.mark.parametrize("change", [{"port": 4}, {"identity": "other"}])
def test_a_new_address_or_another_peer_is_a_new_chance(scene: Scene, change: dict[str, Any]) -> None:
    scene.direct.error = LOST
    scene.connect()
    assert scene.connect(replace(PEER, **change)) == ["direct", "libp2p"]


def test_a_remembered_way_that_breaks_gives_way_to_the_other(scene: Scene) -> None:
    scene.direct.error = LOST
    scene.connect()
    scene.direct.error, scene.libp2p.error = None, LOST
    assert [scene.connect(), scene.connect()] == [["libp2p", "direct"], ["direct"]]


def test_a_peer_that_is_away_is_not_held_to_libp2p(scene: Scene) -> None:
    scene.direct.error, scene.libp2p.error = LOST, PeerLost("peer: not found")
    with pytest.raises(PeerLost, match="peer: not found; peer: gone"):
        scene.connect()
    scene.direct.error = scene.libp2p.error = None
    assert scene.connect() == ["direct"]


@pytest.mark.parametrize("way", ["direct", "libp2p"])
def test_a_refusal_is_an_answer(scene: Scene, way: str) -> None:
    scene.direct.error, scene.libp2p.error = (PeerRefused("no"), None) if way == "direct" else (LOST, PeerRefused("no"))
    with pytest.raises(PeerRefused):
        scene.connect()
    assert scene.tried[-1] == way


def test_somebody_else_at_the_peers_address_is_no_answer(scene: Scene) -> None:
    scene.direct.error = WrongPeer("another certificate")
    assert scene.connect() == ["direct", "libp2p"]


def test_the_first_way_leaves_time_for_the_second(scene: Scene) -> None:
    scene.direct.error = LOST
    scene.connect()
    scene.auto.connect(replace(PEER, identity="other"), "data", timeout_s=600.0)
    assert scene.direct.given_s == [4.0, 5.0]


def test_the_log_names_the_way_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene.direct.error = LOST
    for scene.now in (0.0, 1.0, RETRY_DIRECT_S + 1, RETRY_DIRECT_S + 2):
        scene.connect()
    scene.direct.error, scene.now = None, 5 * RETRY_DIRECT_S
    scene.connect()
    assert [record.getMessage() for record in caplog.records] == [
        "me reaches peer through libp2p",
        "me reaches peer directly",
    ]


@pytest.fixture
def real(directories: list[Directory]) -> Iterator[Two]:
    pair = auto_pair(directories)
    yield pair
    pair.close()


def exchange(a: Transport, b: Transport, address: PeerAddress, *, timeout_s: float = SOON) -> str:
    """Sends a frame over a new stream; the kind of wire that carried it."""
    near: Any = a.connect(address, "data", timeout_s=timeout_s)
    far = b.accept("data", timeout_s=SOON)
    near.send(1, b"hello")
    assert (far.peer, far.receive(timeout_s=SOON).head) == (a.identity, b"hello")
    near.close()
    return type(near.carrier.wire).__name__


def test_a_black_hole_costs_a_share_of_the_time_once(real: Two) -> None:
    a, b = real.a, real.b
    with socket.create_server((HERE, 0)) as silent:  # takes connections and never says a word
        address = replace(real.address_b, port=silent.getsockname()[1])
        assert exchange(a, b, address, timeout_s=3.0) == "SocketWire"
        silent.settimeout(0)
        silent.accept()[0].close()
        assert exchange(a, b, address) == "SocketWire"
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Two]:
    """With daemons of their own, for a test that ends one."""
    with started_directories(tmp_path) as directories:
        pair = auto_pair(directories)
        yield pair
        pair.close()


def test_without_its_daemon_a_peer_goes_on_directly(mortal: Two) -> None:
    a, b, address = cast(AutoTransport, mortal.a), mortal.b, mortal.address_b
    closed = replace(address, port=1)
    assert [exchange(a, b, closed), exchange(a, b, address)] == ["SocketWire", "TlsWire"]
    near = a.connect(address, "old", timeout_s=SOON)
    far = b.accept("old", timeout_s=SOON)
    kill_daemon(a.libp2p._directory)
    a.libp2p._watching.result(SOON)
    near.send(1, b"still there")
    assert far.receive(timeout_s=SOON).head == b"still there"
    assert exchange(a, b, address) == "TlsWire"
    with pytest.raises(PeerLost, match=r"p2pd has ended.*; .*cannot be reached at 127"):
        a.connect(closed, "data", timeout_s=SOON)
