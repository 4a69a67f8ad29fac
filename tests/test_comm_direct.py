"""What is special about direct connections: pinned certificates, among hostile records and silent strangers."""

import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from streams import HERE, SOON, until

from diloco.comm.transport import certificate
from diloco.comm.transport import direct as module
from diloco.comm.transport.direct import MAX_HANDSHAKES, DirectTransport
from diloco.comm.transport.socketwire import tune
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.errors import PeerLost, PeerRefused, WrongPeer


@dataclass
class Two:
    a: DirectTransport
    b: DirectTransport

    def streams(self) -> tuple[Stream, Stream]:
        return self.a.connect(self.b.address(HERE), "data", timeout_s=SOON), self.b.accept("data", timeout_s=SOON)


@pytest.fixture
def two() -> Iterator[Two]:
    pair = Two(DirectTransport("a", HERE), DirectTransport("b", HERE))
    pair.b.allow([pair.a.address(HERE)])
    yield pair
    pair.a.close()
    pair.b.close()


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x30\x82\x01\x00"])
def test_a_record_with_junk_for_a_certificate_keeps_nobody_else_out(
    two: Two, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    two.b.allow([PeerAddress("mallory", HERE, 1, junk), two.a.address(HERE)])
    assert "b does not admit mallory: unreadable certificate" in caplog.text
    assert two.streams()[1].peer == "a"


@pytest.mark.parametrize("junk", [b"", b"junk"])
def test_a_peer_with_junk_for_a_certificate_is_lost(two: Two, junk: bytes) -> None:
    with pytest.raises(PeerLost, match="b: the certificate of its record is unreadable"):
        two.a.connect(replace(two.b.address(HERE), certificate_der=junk), "data", timeout_s=SOON)


@pytest.mark.parametrize("mallory_first", [True, False])
def test_a_certificate_that_two_claim_is_that_of_whom_it_names(
    two: Two, mallory_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    claims = [two.a.address(HERE), replace(two.a.address(HERE), identity="mallory")]
    two.b.allow(reversed(claims) if mallory_first else claims)
    assert "b: a, mallory claim the same certificate, of a" in caplog.text
    assert two.streams()[1].peer == "a"


def test_whose_certificate_two_others_claim_is_refused(two: Two) -> None:
    two.b.allow([replace(two.a.address(HERE), identity=name) for name in ("mallory", "trudy")])
    with pytest.raises(PeerRefused):
        two.a.connect(two.b.address(HERE), "data", timeout_s=SOON)


def test_who_may_connect_is_worked_out_anew_only_where_it_changed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("for nothing")

    monkeypatch.setattr(certificate, "server_context", refuse)
    two.b.allow([two.a.address(HERE), two.a.address("elsewhere")])
    with pytest.raises(AssertionError):
        two.b.allow([])


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")
def test_connections_need_no_disk(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    assert two.streams()[1].peer == "a"


def test_without_descriptors_a_peer_is_lost_for_now(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(certificate, "client_context", fail)
        with pytest.raises(PeerLost, match="Too many open files"):
            two.streams()
    assert two.streams()[1].peer == "a"


@pytest.mark.parametrize("host", ["a..b", 70 * "a", "\0"])
def test_a_record_with_junk_for_a_host_is_a_lost_peer(two: Two, host: str) -> None:
    with pytest.raises(PeerLost, match="cannot be reached"):
        two.a.connect(replace(two.b.address(HERE), host=host), "data", timeout_s=SOON)


def test_silent_strangers_keep_no_member_out(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 10 * SOON)  # they would hold on for that long
    where = (HERE, two.b.address(HERE).port)
    strangers = [socket.create_connection(where, SOON) for _ in range(MAX_HANDSHAKES)]
    assert two.streams()[1].peer == "a"
    assert strangers[0].recv(1) == b""  # the oldest made way
    strangers[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        strangers[-1].recv(1)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(("strangers", "member"), [("192.0.2.1", "198.51.100.1"), ("2001:db8::{}", "2001:db8:1::1")])
def test_a_flood_from_one_place_ends_its_own_handshakes_only(
    monkeypatch: pytest.MonkeyPatch, strangers: str, member: str
) -> None:
    """Seen with 400 connections a second: a member 100 ms away never came to the end of a handshake."""
    ended: list[Any] = []
    monkeypatch.setattr(module, "_wake", ended.append)
    handshakes, slow, flood = module.Handshakes(), object(), [object() for _ in range(10 * MAX_HANDSHAKES)]
    handshakes.add(slow, member)  # type: ignore[arg-type]
    for number, connection in enumerate(flood, 1):
        handshakes.add(connection, strangers.format(f"{number:x}"))  # type: ignore[arg-type]
    assert ended == flood[: 1 - MAX_HANDSHAKES]
    assert handshakes.remove(slow)  # type: ignore[arg-type]


def test_connections_that_break_at_once_fill_no_log(
    two: Two, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers made 3000 warnings in two seconds so."""
    caplog.set_level(logging.INFO)

    class Broken:
        def wrap_socket(self, *_: Any, **__: Any) -> None:
            raise OSError("Closed before TLS handshake with data in recv buffer.")

    monkeypatch.setattr(two.b, "_context", Broken())
    with socket.socket() as plain:
        two.b.take_in(plain, HERE)
    assert [record.levelno for record in caplog.records if "b lost a connection" in record.message] == [logging.INFO]


def test_a_handshake_that_makes_way_is_logged(
    two: Two, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 1)
    with socket.create_connection((HERE, two.b.address(HERE).port), SOON) as stranger:
        two.streams()
        assert stranger.recv(1) == b""
        until(lambda: "b refused a connection from 127.0.0.1" in caplog.text)


def test_one_deadline_holds_for_all_steps_of_a_connect(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    def reach(where: Any, timeout_s: float, connect: Any = socket.create_connection) -> socket.socket:
        given.append(timeout_s)
        now[0] += 3.0
        connection: socket.socket = connect(where, timeout_s)
        return connection

    def open_late(stream: Stream, channel: str, timeout_s: float, opening: Any = module.open_channel) -> Any:
        given.append(timeout_s)
        return opening(stream, channel, timeout_s)

    monkeypatch.setattr(module, "deadline_in", lambda timeout_s: now[0] + timeout_s)
    monkeypatch.setattr(module, "seconds_to", lambda deadline: max(0.0, deadline - now[0]))
    monkeypatch.setattr(module.socket, "create_connection", reach)
    monkeypatch.setattr(module, "open_channel", open_late)
    two.a.connect(two.b.address(HERE), "data", timeout_s=SOON)
    assert given == [SOON, SOON - 3.0]
    with pytest.raises(PeerLost, match=r"no TLS \(timed out"):
        two.a.connect(two.b.address(HERE), "data", timeout_s=3.0)


def test_connections_notice_a_peer_that_vanished() -> None:
    with socket.socket() as connection:
        tune(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        wanted = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
        known = {name: value for name, value in wanted.items() if hasattr(socket, name)}
        assert known == {name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in known}


def test_a_server_with_another_certificate_is_refused(two: Two) -> None:
    forged = replace(two.b.address(HERE), certificate_der=certificate.create_certificate("b").der)
    with pytest.raises(WrongPeer, match="b: its certificate is not that of its record"):
        two.a.connect(forged, "data", timeout_s=SOON)


def test_garbage_on_the_port_disturbs_nobody(two: Two) -> None:
    a, b = two.streams()
    where = (HERE, two.b.address(HERE).port)
    silent = [socket.create_connection(where) for _ in range(5)]
    for _ in range(20):
        with socket.create_connection(where) as garbage:
            garbage.sendall(os.urandom(500))
    a.send(1, payload=bytes(100_000))
    assert len(b.receive(timeout_s=SOON).payload) == 100_000
    two.streams()
    for connection in silent:
        connection.close()


def test_it_is_tls_1_3(two: Two) -> None:
    a, _ = two.streams()
    assert a.carrier.wire._socket.version() == "TLSv1.3"
