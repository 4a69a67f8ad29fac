"""Tickets: whole, signed, in time, for this run and this peer; anything else is refused with the reason."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.comm.peers.admission import Right, check_admission
from diloco.comm.peers.identity import Identity, run_id_of
from diloco.comm.peers.ticket import OLD_PREFIX, PREFIX, TEXT_LIMIT, Ticket
from diloco.errors import TicketError

NOW = 1_800_000_000.0
ADDRESS = "/ip4/10.0.0.7/tcp/31337/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
URL_SAFE = string.ascii_letters + string.digits + "-_"


def admit(ticket: Ticket, run_id: bytes, key: bytes) -> None:
    check_admission(ticket.admission(key).pack(), run_id, key)


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
        for new in {*URL_SAFE, "=", "+", "é"} - {old}:
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


def test_expired_tickets_say_when(ticket: Ticket) -> None:
    Ticket.parse(ticket.render(), NOW + 3599)
    with pytest.raises(TicketError, match="expired at 2027-01-15 09:00:00 UTC: ask"):
        Ticket.parse(ticket.render(), NOW + 3600)


def test_foreign_tickets_are_refused_without_a_word_of_which_run_is_here(ticket: Ticket, peer: Identity) -> None:
    here = run_id_of(peer.public_key)
    with pytest.raises(TicketError, match="for another run") as refused:
        admit(ticket, here, peer.public_key)
    assert here.hex()[:4] not in str(refused.value)


def test_tampered_tickets_are_refused(ticket: Ticket, owner: Identity, peer: Identity) -> None:
    invite, other = ticket.invite, Ticket.issue(owner, [], now=NOW, lifetime_s=60)
    for changed in (
        replace(invite, expires_at=invite.expires_at + 1),
        replace(invite, islands=invite.islands + 1),
        replace(invite, right=Right.WITNESS),
        replace(invite, owner=peer.public_key),
    ):
        with pytest.raises(TicketError, match="changed or is forged"):
            Ticket.parse(replace(ticket, invite=changed).render(), NOW)
        with pytest.raises(TicketError, match=r"not signed|for another run"):
            admit(replace(ticket, invite=changed), ticket.run_id, peer.public_key)
    with pytest.raises(TicketError, match="private key is not that"):
        Ticket.parse(replace(ticket, secret=other.secret).render(), NOW)


def test_nobody_can_use_the_admission_of_another(ticket: Ticket, owner: Identity, peer: Identity) -> None:
    for each in (ticket, Ticket.issue(owner, [], now=NOW, lifetime_s=60, peer=peer.public_key)):
        stolen = each.admission(peer.public_key).pack()
        check_admission(stolen, each.run_id, peer.public_key)
        with pytest.raises(TicketError, match="another key"):
            check_admission(stolen, each.run_id, owner.public_key)


def test_any_changed_byte_of_an_admission_is_refused(ticket: Ticket, peer: Identity) -> None:
    raw = ticket.admission(peer.public_key).pack()
    for position in range(len(raw)):
        with pytest.raises(TicketError):
            check_admission(
                raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :], ticket.run_id, peer.public_key
            )
    for cut in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(TicketError):
            check_admission(cut, ticket.run_id, peer.public_key)


def test_the_private_key_is_in_no_admission_and_no_text_for_people(ticket: Ticket, peer: Identity) -> None:
    assert ticket.secret not in ticket.admission(peer.public_key).pack()
    assert ticket.secret.hex() not in repr(ticket) and repr(ticket.secret) not in repr(ticket)


def test_a_ticket_that_a_terminal_has_wrapped_can_be_pasted(ticket: Ticket) -> None:
    text = ticket.render()
    wrapped = "\n   ".join(text[start : start + 60] for start in range(0, len(text), 60))
    assert Ticket.parse(wrapped, NOW) == ticket


def test_a_ticket_of_an_earlier_version_says_so() -> None:
    with pytest.raises(TicketError, match="of diloco with protocol 6 or before"):
        Ticket.parse(OLD_PREFIX + "A" * 200, NOW)


def test_the_same_invite_at_other_addresses(ticket: Ticket) -> None:
    moved = ticket.at(["/ip4/10.0.0.8/tcp/1"], (3, b"d" * 32))
    assert moved.invite == ticket.invite and moved.head == (3, b"d" * 32)
    assert Ticket.parse(moved.render(), NOW) == moved


@pytest.mark.parametrize("islands", [0, 2**16])
def test_a_ticket_is_for_some_islands(owner: Identity, islands: int) -> None:
    with pytest.raises(TicketError, match=f"for {islands} islands"):
        Ticket.issue(owner, [], now=NOW, lifetime_s=60, islands=islands)


@pytest.mark.parametrize(
    "text", ["", "hello", PREFIX, PREFIX + "A", PREFIX + "é", PREFIX + "A" * 10**6, "diloco3-" + "A" * 300, "\0"]
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
