"""A machine as a peer: where it listens, and how others see it."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from invited import ticket_in
from streams import until

from diloco.comm.peers.addressbook import refuse_taken
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import ConfigError, DirectoryError, JoinRefused, PeerRefused
from diloco.run.join import Search, ask_members
from diloco.run.local import Connection
from diloco.run.machine import host_towards, listen_host
from diloco.run.peer import REOPENINGS, REOPENINGS_S, Peer

ELSEWHERE = "203.0.113.7"  # nobody's: for documentation


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("127.0.0.1", "127.0.0.1"),
        (ELSEWHERE, "0.0.0.0"),
        ("2001:db8::7", "::"),
        ("localhost", "127.0.0.1"),
    ],
)
def test_who_is_seen_under_an_address_of_another_machine_listens_anywhere(host: str, listens: str) -> None:
    assert listen_host(host) == listens


@pytest.mark.parametrize("host", ["a..b", "no-such-machine.invalid"])
def test_a_name_that_does_not_resolve_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}: there is no machine of that name"):
        listen_host(host)


def test_a_joiner_finds_its_own_address_towards_a_name_too() -> None:
    assert host_towards(("/dns4/localhost/tcp/1/p2p/x",)) == "127.0.0.1"


@pytest.fixture
def peer_of(tmp_path: Path) -> Callable[..., Peer]:
    with ExitStack() as stack:

        def make(name: str, host: str, ticket: Ticket | None = None) -> Peer:
            (tmp_path / name).mkdir()
            peer = Peer(tmp_path / name, ticket or ticket_in(tmp_path), Connection(host, name=name))
            stack.callback(peer.close)
            return peer

        yield make


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_that_is_taken_is_named_with_two_that_are_free(tmp_path: Path, taken: int) -> None:
    with ExitStack() as stack:
        port = first_of_two_ports()
        stack.enter_context(socket.create_server(("127.0.0.1", port + taken)))
        text = (
            f"--port {port} takes the ports {port} and {port + 1}, and {port + taken} cannot be had: "
            "another program listens there. Use two that are free: --port "
        )
        with pytest.raises(DirectoryError, match=text) as refused:
            Peer(tmp_path, ticket_in(tmp_path), Connection(port=port), lonely=True)
        free = int(str(refused.value).split()[-1])
        for number in (free, free + 1):
            stack.enter_context(socket.create_server(("127.0.0.1", number)))


@pytest.mark.slow
def test_a_founder_says_in_one_line_that_its_port_is_taken(tmp_path: Path) -> None:
    config, port = tmp_path / "run.yaml", first_of_two_ports()
    config.write_text(yaml.safe_dump({**SMALL, "checkpoint": {"dir": str(tmp_path / "run")}}))
    with socket.create_server(("127.0.0.1", port + 1)):
        command = [sys.executable, "-m", "diloco", "run", str(config), "--islands", "1", "--port", str(port)]
        said = subprocess.run(command, capture_output=True, text=True)
    (line,) = said.stderr.splitlines()
    assert line.startswith(f"error[directory]: --port {port} takes the ports") and said.returncode == 2


def first_of_two_ports() -> int:
    """Return one that nobody uses now, nor the next one."""
    while True:
        with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", 0)) as first:
            socket.create_server(("127.0.0.1", first.getsockname()[1] + 1)).close()
            return int(first.getsockname()[1])


def test_an_island_that_was_killed_leaves_its_ports_in_time() -> None:
    listener = socket.create_server(("127.0.0.1", port := first_of_two_ports()))
    leaving = threading.Timer(0.5, listener.close)
    leaving.start()
    refuse_taken("127.0.0.1", port, within_s=60)
    leaving.join()


def test_an_address_that_is_led_here_is_what_others_are_told(peer_of: Callable[..., Peer]) -> None:
    assert peer_of("mapped", ELSEWHERE).addresses[0].startswith(f"/ip4/{ELSEWHERE}/tcp/")


def test_peers_meet_at_a_name(peer_of: Callable[..., Peer], tmp_path: Path) -> None:
    owner = Identity.load(tmp_path / "owner.key")
    now, lifetime_s = os.stat(tmp_path).st_mtime, 1e6
    one = peer_of("one", "localhost", Ticket.issue(owner, [], now=now, lifetime_s=lifetime_s))
    two = peer_of("two", "127.0.0.1", Ticket.issue(owner, one.addresses, now=now, lifetime_s=lifetime_s))
    one.publish()
    two.publish(expires_s=10.0)
    address = two.find_peers()[one.id]
    assert address.host == "localhost" and one.find_peers()[two.id].host == "127.0.0.1"
    stream = two._direct.connect(address, "hello", timeout_s=10.0)
    accepted = one.plain.accept("hello", timeout_s=10.0)
    assert accepted.peer == two.id
    until(lambda: two.id not in one.find_peers())
    with pytest.raises(PeerRefused):  # as one that has shaken hands while it had a record
        one._direct.inbox.put("fetch", accepted)
    stream.close()


def test_a_daemon_that_ends_again_and_again_does_not_end_its_island(
    peer_of: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger can make p2pd run out of memory, as often as it likes."""
    peer, opened = peer_of("flooded", "127.0.0.1"), []
    monkeypatch.setattr(peer.directory, "reopen", lambda: opened.append(1))
    assert all(peer._reopen() for _ in range(REOPENINGS))
    assert not peer._reopen() and not peer._reopen() and len(opened) == REOPENINGS
    assert caplog.text.count("rounds go on: it ended 5 times within 60 s") == 1
    peer._reopened_at = [at - REOPENINGS_S for at in peer._reopened_at]
    assert peer._reopen() and len(opened) == REOPENINGS + 1


def test_a_daemon_that_does_not_start_does_not_end_its_island(
    peer_of: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise DirectoryError("it ended at once")

    peer = peer_of("flooded", "127.0.0.1")
    monkeypatch.setattr(peer.directory, "reopen", fail)
    assert not peer._reopen() and "cannot be started again; rounds go on: it ended at once" in caplog.text
    peer.publish(60.0)
    peer.find_peers()


def test_a_search_outlives_a_network_daemon_that_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Peer(tmp_path, ticket_in(tmp_path), Connection(), lonely=True)) as peer:

        def refused(now: float) -> bool:
            raise DirectoryError("the network failed: Connection refused. Try again")

        monkeypatch.setattr(peer, "reach_lost", refused)
        with pytest.raises(JoinRefused, match="Connection refused"):
            ask_members(peer, lambda *_: "an answer", Search(0.1))
