"""Whom an island lets in: so many of an invite, in time, and those who were members always."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from invited import owner_in, ticket_in

from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.record import EVICT, REVOKE, Amendment, Head
from diloco.elastic.protocol.state import Admitted, RunState
from diloco.run.gate import PLACE_S, Gate


class Door:
    """A gate with a clock and a state of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 0.0, folder
        self.state = RunState(
            Head(0, 0, "0" * 64), ("F",), Ledger(epoch=100), owner=owner_in(folder).public_key.hex(),
            admitted=(Admitted("F", ""),),
        )  # fmt: skip
        self.gate = Gate(lambda: self.state, lambda: self.now)

    def knock(self, name: str, ticket: Ticket) -> str:
        island = Identity.load(self.folder / name)
        return self.gate.objection(island.peer_id, ticket.admission(island.public_key))

    def amend(self, **changes: list[str]) -> None:
        number = len(self.state.amendments) + 1
        made = Amendment.sign(owner_in(self.folder), number, json.dumps(changes))
        self.state = replace(self.state, amendments=(*self.state.amendments, made))


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


def test_an_invite_has_so_many_places_and_who_goes_leaves_its_own(door: Door, tmp_path: Path) -> None:
    ticket = ticket_in(tmp_path, islands=1)
    assert door.knock("one", ticket) == "" == door.knock("one", ticket)
    assert "places of its ticket are taken" in door.knock("two", ticket)
    door.now = PLACE_S + 1
    assert door.knock("two", ticket) == ""
    assert "taken" in door.knock("one", ticket)


def test_a_member_takes_no_place_and_needs_none(door: Door, tmp_path: Path) -> None:
    ticket, one = ticket_in(tmp_path, islands=2), Identity.load(tmp_path / "one").peer_id
    assert door.knock("one", ticket) == ""
    door.state = replace(door.state, admitted=(*door.state.admitted, Admitted(one, ticket.invite.key.hex())))
    assert door.knock("two", ticket) == ""
    door.amend(**{REVOKE: [ticket.invite.key.hex()]})
    assert door.knock("one", ticket) == "" and door.knock("three", ticket) == "its ticket was revoked"
    door.amend(**{EVICT: [one]})
    assert "taken it out" in door.knock("one", ticket) and one in door.gate.kept_out


def test_an_expired_ticket_lets_nobody_new_in(door: Door, tmp_path: Path) -> None:
    old = Ticket.issue(owner_in(tmp_path), [], now=1000.0, lifetime_s=60)
    assert door.knock("one", old) == "its ticket has expired"


@pytest.mark.parametrize("right", [Right.OBSERVE, Right.WATCH])
def test_who_may_only_look_can_be_revoked_too(door: Door, tmp_path: Path, right: Right) -> None:
    ticket = ticket_in(tmp_path, right=right)
    assert door.knock("one", ticket) == ""
    door.amend(**{REVOKE: [ticket.invite.key.hex()]})
    assert door.knock("one", ticket) == "its ticket was revoked"
