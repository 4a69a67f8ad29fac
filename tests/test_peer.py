"""A machine as a peer: where it listens, and how others see it."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from invited import ticket_in

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import ConfigError
from diloco.run.peer import Connection, Peer, host_towards, listen_host

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


def test_an_address_that_is_led_here_is_what_others_are_told(peer_of: Callable[..., Peer]) -> None:
    assert peer_of("mapped", ELSEWHERE).addresses[0].startswith(f"/ip4/{ELSEWHERE}/tcp/")


def test_peers_meet_at_a_name(peer_of: Callable[..., Peer], tmp_path: Path) -> None:
    owner = Identity.load(tmp_path / "owner.key")
    now, lifetime_s = os.stat(tmp_path).st_mtime, 1e6
    one = peer_of("one", "localhost", Ticket.issue(owner, [], now=now, lifetime_s=lifetime_s))
    two = peer_of("two", "127.0.0.1", Ticket.issue(owner, one.addresses, now=now, lifetime_s=lifetime_s))
    for peer in (one, two):
        peer.publish()
    address = two.find_peers()[one.id]
    assert address.host == "localhost" and one.find_peers()[two.id].host == "127.0.0.1"
    stream = two._direct.connect(address, "hello", timeout_s=10.0)
    assert one.plain.accept("hello", timeout_s=10.0).peer == two.id
    stream.close()
