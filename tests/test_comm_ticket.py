"""Tickets: whole, signed, in time, for this run and this peer; anything else is refused with the reason."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import PREFIX, TEXT_LIMIT, Ticket, check_greeting, run_id_of
from diloco.errors import TicketError

NOW = 1_800_000_000.0
ADDRESS = "/ip4/10.0.0.7/tcp/31337/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
URL_SAFE = string.ascii_letters + string.digits + "-_"


def admit(ticket: Ticket, run_id: bytes, key: bytes, now: float = NOW, *, known: bool = False) -> None:
    check_greeting(ticket.render().encode(), run_id, key, now, known=known)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load(tmp_path_factory.mktemp("owner") / "key")


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load(tmp_path_factory.mktemp("peer") / "key")


@pytest.fixture
def ticket(owner: Identity) -> Ticket:
    return Ticket.issue(owner, [ADDRESS], now=NOW, lifetime_s=3600)


@given(
    addresses=st.lists(st.text(URL_SAFE + ".:%", min_size=1, max_size=200).map("/dns4/{}".format), max_size=8),
    lifetime_s=st.floats(1, 1e9),
    bound=st.none() | st.binary(min_size=32, max_size=32),
)
def test_what_is_rendered_is_parsed(
    owner: Identity, addresses: list[str], lifetime_s: float, bound: bytes | None
) -> None:
    ticket = Ticket.issue(owner, addresses, now=NOW, lifetime_s=lifetime_s, peer=bound)
    text = ticket.render()
    assert Ticket.parse(text, NOW) == ticket
    assert set(text) <= set(URL_SAFE) and text.startswith(PREFIX)


def test_the_longest_ticket_fits(owner: Identity) -> None:
    longest = Ticket.issue(owner, ["/" + "a" * 254] * 8, now=NOW, lifetime_s=1, peer=bytes(32))
    assert len(longest.render()) <= TEXT_LIMIT
    assert Ticket.parse(f"  {longest.render()}\n", NOW) == longest


def test_any_changed_character_is_refused(ticket: Ticket) -> None:
    text = ticket.render()
    for position, old in enumerate(text):
        for new in {*URL_SAFE, "=", " ", "+", "é"} - {old}:
            with pytest.raises(TicketError):
                Ticket.parse(text[:position] + new + text[position + 1 :], NOW)


def test_open_tickets_admit_anybody(ticket: Ticket, owner: Identity, peer: Identity) -> None:
    for key in (owner.public_key, peer.public_key):
        admit(ticket, run_id_of(owner.public_key), key)


def test_bound_tickets_admit_one_peer(owner: Identity, peer: Identity) -> None:
    bound = Ticket.issue(owner, [ADDRESS], now=NOW, lifetime_s=60, peer=peer.public_key)
    admit(bound, bound.run_id, peer.public_key)
    with pytest.raises(TicketError, match="another peer"):
        admit(bound, bound.run_id, owner.public_key)


def test_an_expired_ticket_keeps_out_newcomers_only(ticket: Ticket, owner: Identity, peer: Identity) -> None:
    run_id, late = run_id_of(owner.public_key), NOW + 3601
    admit(ticket, run_id, peer.public_key)
    admit(ticket, run_id, peer.public_key, late, known=True)
    with pytest.raises(TicketError, match="expired"):
        admit(ticket, run_id, peer.public_key, late)
    with pytest.raises(TicketError, match="for run"):
        admit(ticket, bytes(32), peer.public_key, late, known=True)


def test_expired_tickets_say_when(ticket: Ticket) -> None:
    Ticket.parse(ticket.render(), NOW + 3599)
    with pytest.raises(TicketError, match="expired at 2027-01-15 09:00:00 UTC: ask"):
        Ticket.parse(ticket.render(), NOW + 3600)


def test_foreign_tickets_name_both_runs(ticket: Ticket, peer: Identity) -> None:
    here = run_id_of(peer.public_key)
    with pytest.raises(TicketError, match=f"for run {ticket.run_id.hex()[:12]}, not for run {here.hex()[:12]}"):
        admit(ticket, here, peer.public_key)


def test_tampered_tickets_are_refused(ticket: Ticket, peer: Identity) -> None:
    for changed in (
        replace(ticket, expires_at=ticket.expires_at + 1),
        replace(ticket, addresses=("/ip4/6.6.6.6/tcp/1",)),
        replace(ticket, owner=peer.public_key),
        replace(ticket, peer=peer.public_key),
    ):
        with pytest.raises(TicketError, match="changed or is forged"):
            admit(changed, ticket.run_id, peer.public_key)


@pytest.mark.parametrize(
    "text", ["", "hello", PREFIX, PREFIX + "A", PREFIX + "é", PREFIX + "A" * 10**6, "diloco2-" + "A" * 300, "\0"]
)
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(TicketError, match="no whole ticket"):
        Ticket.parse(text, NOW)


@pytest.mark.parametrize(
    "address", ["10.0.0.7:31337", "/ip4/1.2.3.4/tcp/1,/ip4/6.6.6.6/tcp/1", "/a b", "/" + "a" * 255]
)
def test_bad_addresses_are_refused_when_issued(owner: Identity, address: str) -> None:
    with pytest.raises(TicketError, match="no ticket can be made"):
        Ticket.issue(owner, [address], now=NOW, lifetime_s=60)


def test_bad_arguments_are_refused_when_issued(owner: Identity) -> None:
    for arguments in ({"lifetime_s": 0.0}, {"lifetime_s": 1e30}, {"lifetime_s": 60.0, "peer": b"short"}):
        with pytest.raises(TicketError):
            Ticket.issue(owner, [ADDRESS], now=NOW, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TicketError):
        Ticket.issue(owner, [ADDRESS] * 9, now=NOW, lifetime_s=60)
