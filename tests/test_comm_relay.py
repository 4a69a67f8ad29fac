"""Streams through a relay: to an island that nobody can dial, with TLS from end to end."""

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from streams import until

from diloco.comm.transport import relay as module
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.relay import BYTES, CHANNEL, OPEN, Relay
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.errors import PeerLost, TransportError
from diloco.run.reachable import TRY_S, Reachability

SOON = 10.0


class Party:
    def __init__(self, name: str, **options) -> None:
        self.name, self.direct = name, DirectTransport(name, "127.0.0.1")
        self.told: list[tuple[str, str]] = []
        self.relay = Relay(self.direct, say=lambda peer, text: self.told.append((peer, text)), **options)
        self.address = self.direct.address("127.0.0.1")

    def know(self, *others: PeerAddress) -> None:
        self.direct.allow(others)
        self.relay.know({other.identity: other for other in others})

    def close(self) -> None:
        self.relay.close()
        self.direct.close()


@pytest.fixture
def parties(request) -> Iterator[tuple[Party, Party, Party]]:
    """A relay, an island whose port leads nowhere, and one that wants to reach it."""
    options = getattr(request, "param", {})
    with (
        closing(Party("relay", **options)) as relay,
        closing(Party("hidden")) as hidden,
        closing(Party("asker")) as asker,
    ):
        hidden.address = replace(hidden.address, port=9, relay="relay")
        relay.know(hidden.address, asker.address)
        asker.know(relay.address, hidden.address)
        hidden.know(relay.address, asker.address)
        yield relay, hidden, asker


def echoes(one: Stream, hidden: Party) -> bool:
    """Whether bytes go both ways between an open stream and the far end of it."""
    with closing(hidden.direct.accept("data", timeout_s=SOON)) as other:
        payload = bytes(range(256)) * 5000
        one.send(1, b"there", payload, timeout_s=SOON)
        there = other.receive(timeout_s=SOON)
        other.send(2, b"back", there.payload, timeout_s=SOON)
        return bytes(one.receive(timeout_s=SOON).payload) == payload and other.peer == "asker"


def test_a_member_says_whether_it_can_dial_another(parties) -> None:
    relay, hidden, asker = parties
    assert hidden.relay.can_be_dialled(relay.address) is False
    assert asker.relay.can_be_dialled(relay.address) is True
    assert asker.relay.can_be_dialled(replace(relay.address, port=9)) is None


def test_an_address_that_leads_to_another_machine_does_not_count(parties) -> None:
    relay, hidden, asker = parties
    relay.know(replace(hidden.address, port=asker.address.port), asker.address)
    assert hidden.relay.can_be_dialled(relay.address) is False


def test_a_member_measures_its_way_to_another(parties) -> None:
    relay, _, asker = parties
    assert asker.relay.bytes_per_s_from(relay.address) > 0


def test_streams_go_through_the_relay(parties) -> None:
    relay, hidden, asker = parties
    assert hidden.relay.be_served_by(relay.address) and hidden.relay.relay == "relay"
    until(lambda: relay.told == [("hidden", "others cannot dial it: its streams go through this island")])
    for _ in range(2):
        with closing(asker.relay.connect(hidden.address, "data", timeout_s=SOON)) as stream:
            assert stream.peer == "hidden" and echoes(stream, hidden)
    assert relay.relay.traffic["hidden"].bytes > 4 * 256 * 5000


def test_the_relay_itself_reaches_whom_it_serves(parties) -> None:
    relay, hidden, _ = parties
    assert hidden.relay.be_served_by(relay.address)
    until(lambda: relay.told)
    with closing(relay.relay.connect(hidden.address, "data", timeout_s=SOON)) as stream:
        far = hidden.direct.accept("data", timeout_s=SOON)
        stream.send(1, b"", b"hello", timeout_s=SOON)
        assert bytes(far.receive(timeout_s=SOON).payload) == b"hello" and far.peer == "relay"
        far.close()


def test_who_is_not_served_is_not_reached(parties) -> None:
    _, hidden, asker = parties
    with pytest.raises(PeerLost, match="relays nothing to it"):
        asker.relay.connect(hidden.address, "data", timeout_s=SOON)
    with pytest.raises(PeerLost, match="is not there"):
        asker.relay.connect(replace(hidden.address, relay="nobody"), "data", timeout_s=SOON)


@pytest.mark.parametrize("parties", [{"serves": False}], indirect=True)
def test_a_member_that_does_not_relay_says_so(parties) -> None:
    relay, hidden, _ = parties
    assert not hidden.relay.be_served_by(relay.address) and hidden.relay.relay == ""


def test_a_relay_that_changes_bytes_breaks_the_stream_and_nothing_else(parties, monkeypatch) -> None:
    relay, hidden, asker = parties
    assert hidden.relay.be_served_by(relay.address)
    passed = Relay._pass_on

    def changed(self: Relay, source: Stream, target: Stream, traffic: module.Traffic) -> None:
        with suppress(TransportError):
            while True:
                payload = bytearray(source.receive(module._chunk).payload)
                if len(payload) > 3000:  # after the handshake
                    payload[2000] ^= 1
                target.send(BYTES, b"", payload)
        source.close()
        target.close()

    monkeypatch.setattr(Relay, "_pass_on", changed)
    with closing(asker.relay.connect(hidden.address, "data", timeout_s=SOON)) as stream:
        far = hidden.direct.accept("data", timeout_s=SOON)
        with pytest.raises(TransportError):
            stream.send(1, b"", bytes(100_000), timeout_s=SOON)
            far.receive(timeout_s=SOON)
        far.close()
    monkeypatch.setattr(Relay, "_pass_on", passed)
    with closing(asker.relay.connect(hidden.address, "data", timeout_s=SOON)) as stream:
        assert echoes(stream, hidden)


def test_a_relay_that_ends_is_noticed_and_another_serves(parties) -> None:
    relay, hidden, asker = parties
    assert hidden.relay.be_served_by(relay.address)
    relay.close()
    until(lambda: hidden.relay.relay == "")
    with closing(Party("second")) as second:
        second.know(hidden.address, asker.address)
        hidden.know(second.address, asker.address)
        moved = replace(hidden.address, relay="second")
        asker.know(second.address, moved)
        assert hidden.relay.be_served_by(second.address)
        with closing(asker.relay.connect(moved, "data", timeout_s=SOON)) as stream:
            assert echoes(stream, hidden)


def hold_all(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a relay agree to everything, keep all connections open, and pass nothing on."""

    def hold(source: Stream, target: Stream, traffic: module.Traffic) -> None:
        with suppress(TransportError):
            while True:
                source.receive(module._chunk)

    monkeypatch.setattr(party.relay, "_pass_on", hold)
    monkeypatch.setattr(module, "TRY_S", 2.0)


def test_a_relay_that_passes_nothing_on_is_found_out(parties, monkeypatch) -> None:
    relay, hidden, _ = parties
    assert hidden.relay.be_served_by(relay.address)
    assert hidden.relay.passes_on(relay.address)
    hold_all(relay, monkeypatch)
    assert not hidden.relay.passes_on(relay.address)
    assert hidden.relay.relay == "relay"  # which looks well


def test_an_island_leaves_a_relay_that_passes_nothing_on_twice(parties, monkeypatch) -> None:
    relay, hidden, asker = parties
    asker.know(relay.address, replace(hidden.address, relay=""))
    addresses, told = {"relay": relay.address, "asker": asker.address}, []
    reachable = Reachability(hidden.relay, lambda: addresses, str.upper, told.append)
    reachable.look(0.0)
    assert hidden.relay.relay == "relay"
    hold_all(relay, monkeypatch)
    reachable.look(TRY_S)
    assert hidden.relay.relay == "relay"  # once may be a busy link
    reachable.look(TRY_S + 1)  # too soon to try again
    assert hidden.relay.relay == "relay"
    reachable.look(2 * TRY_S)
    assert hidden.relay.relay == "asker"
    assert told == [
        "others cannot dial this island: it is reached through RELAY",
        "RELAY passes nothing on: this island is reached through ASKER",
    ]


def test_tunnels_and_calls_are_bounded(parties, monkeypatch) -> None:
    relay, hidden, asker = parties
    monkeypatch.setattr(module, "MAX_TUNNELS_OF_ONE", 2)
    assert hidden.relay.be_served_by(relay.address)
    opened = [asker.relay.connect(hidden.address, "data", timeout_s=SOON) for _ in range(2)]
    with pytest.raises(PeerLost, match="too many tunnels"):
        asker.relay.connect(hidden.address, "data", timeout_s=SOON)
    for stream in opened:
        stream.close()
    until(lambda: not relay.relay._tunnels.total())
    asker.relay.connect(hidden.address, "data", timeout_s=SOON).close()


def test_nobody_answers_a_call_to_another(parties) -> None:
    """With a token that it was never given."""
    relay, hidden, asker = parties
    assert hidden.relay.be_served_by(relay.address)
    with closing(asker.direct.connect(relay.address, CHANNEL, timeout_s=SOON)) as thief:
        thief.send(module.BACK, bytes(16), timeout_s=SOON)
        with pytest.raises(TransportError):
            thief.receive(timeout_s=SOON)
    with closing(asker.direct.connect(relay.address, CHANNEL, timeout_s=SOON)) as odd:
        odd.send(OPEN + 40, b"", timeout_s=SOON)
        with pytest.raises(TransportError):
            odd.receive(timeout_s=SOON)


@pytest.mark.parametrize("parties", [{"bytes_per_s": 2_000_000.0}], indirect=True)
def test_a_relay_passes_on_at_its_owners_rate(parties) -> None:
    relay, hidden, asker = parties
    waited: list[float] = []
    relay.relay._bucket.sleep = waited.append
    assert hidden.relay.be_served_by(relay.address)
    with closing(asker.relay.connect(hidden.address, "data", timeout_s=SOON)) as stream:
        assert echoes(stream, hidden)
    assert max(waited) > 0.5, "two times 1.28 MB at 2 MB/s"
