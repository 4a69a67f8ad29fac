"""Who becomes a member: islands with an admission in the record that makes them one, as many as their invite allows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from invited import owner_in, ticket_in
from nodes import options, said

from diloco.comm.peers.admission import Right
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import EMPTY, REVOKE, Amendment, Head, Offer, Proposal, Record, Settings
from diloco.elastic.protocol.state import Admitted, RunState
from diloco.errors import RecordInvalid


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def founder(folder: Path) -> Identity:
    return Identity.load(folder / "founder")


@pytest.fixture(scope="module")
def islands(folder: Path) -> list[Identity]:
    """In the order of their ids."""
    return sorted((Identity.load(folder / str(number)) for number in range(3)), key=lambda each: each.peer_id)


@pytest.fixture(scope="module")
def state(folder: Path, founder: Identity) -> RunState:
    roster, owner = (founder.peer_id,), owner_in(folder).public_key.hex()
    return RunState(
        Head(0, 0, "0" * 64), roster, Ledger(epoch=1000), owner=owner, admitted=(Admitted(founder.peer_id, ""),)
    )  # fmt: skip


def hexed(ticket: Ticket, island: Identity) -> str:
    return ticket.admission(island.public_key).pack().hex()


def following(state: RunState, *new: tuple[Identity, str], witnesses: tuple[str, ...] = (), **changes) -> RunState:
    roster = (*state.roster, *(island.peer_id for island, _ in new))
    admissions = tuple((island.peer_id, admission) for island, admission in new if admission)
    proposal = Proposal(
        state.key, -1, (), roster, (), (), Settings(), 0, witnesses=witnesses, admissions=admissions, **changes
    )
    return state.after(Record(proposal, EMPTY))


def test_a_record_with_its_admission_makes_an_island_a_member(folder: Path, state: RunState, islands) -> None:
    ticket = ticket_in(folder)
    after = following(state, (islands[0], hexed(ticket, islands[0])))
    assert after.invites[islands[0].peer_id] == ticket.invite.key.hex()
    gone = following(replace(after, roster=state.roster))
    assert following(gone, (islands[0], "")).roster[-1] == islands[0].peer_id, "a known key needs none"


def test_without_one_it_is_no_member(folder: Path, state: RunState, islands) -> None:
    for admission in ("", "zz", hexed(ticket_in(folder), islands[1])):
        with pytest.raises(RecordInvalid, match="cannot be a member"):
            following(state, (islands[0], admission))


def test_a_record_admits_nobody_whom_it_does_not_make_a_member(folder: Path, state: RunState, islands) -> None:
    spare = ((islands[0].peer_id, hexed(ticket_in(folder), islands[0])),)
    proposal = Proposal(state.key, -1, (), state.roster, (), (), Settings(), 0, admissions=spare)
    with pytest.raises(RecordInvalid, match="does not make members"):
        state.after(Record(proposal, EMPTY))


def test_an_invite_is_used_up_and_keys_count_for_ever(folder: Path, state: RunState, islands) -> None:
    ticket = ticket_in(folder, islands=1)
    after = following(state, (islands[0], hexed(ticket, islands[0])))
    gone = following(replace(after, roster=state.roster))
    with pytest.raises(RecordInvalid, match="used up: 1 island came in by it"):
        following(gone, (islands[1], hexed(ticket, islands[1])))
    with pytest.raises(RecordInvalid, match="used up"):
        following(state, *((each, hexed(ticket, each)) for each in islands[:2]))


@pytest.mark.parametrize("right", [Right.OBSERVE, Right.WATCH])
def test_who_may_only_look_is_no_member(folder: Path, state: RunState, islands, right: Right) -> None:
    with pytest.raises(RecordInvalid, match=f"allows it to {right.name.lower()} only"):
        following(state, (islands[0], hexed(ticket_in(folder, right=right), islands[0])))


def test_a_witness_by_its_ticket_is_a_witness_only(folder: Path, state: RunState, islands) -> None:
    new = islands[0], hexed(ticket_in(folder, right=Right.WITNESS), islands[0])
    with pytest.raises(RecordInvalid, match="allows it to witness only"):
        following(state, new)
    after = following(state, new, witnesses=(islands[0].peer_id,))
    assert after.witnesses == (islands[0].peer_id,)
    with pytest.raises(RecordInvalid, match="may only be a witness"):
        following(after)
    assert after.objection(islands[0].peer_id, "") == "its ticket allows it to witness only"
    assert not after.objection(islands[0].peer_id, "", witness=True)


def test_a_revoked_invite_lets_nobody_new_in(folder: Path, state: RunState, islands) -> None:
    ticket = ticket_in(folder)
    before = following(state, (islands[0], hexed(ticket, islands[0])))
    revocation = Amendment.sign(owner_in(folder), 1, json.dumps({REVOKE: [ticket.invite.key.hex()]}))
    after = following(before, amendment=revocation)
    with pytest.raises(RecordInvalid, match="was revoked"):
        following(after, (islands[1], hexed(ticket, islands[1])))
    assert following(after).roster == before.roster, "who came in with it stays"


def test_an_id_that_is_none_is_refused_and_ends_nothing(state: RunState) -> None:
    for odd in ("0", "", "l", "1" * 64, "é", "12D3KooW"):
        proposal = Proposal(state.key, -1, (), (*state.roster, odd), (), (), Settings(), 0)
        with pytest.raises(RecordInvalid, match="cannot be a member"):
            state.after(Record(proposal, EMPTY))


def leading(state: RunState, founder: Identity, *islands: Identity) -> Node:
    node = Node(founder.peer_id, state, options(partition="merge"), now=0.0, incarnation=1)
    node.tick(0.0)
    for island in islands:
        node.receive(island.peer_id, msg.Heartbeat(state.head, node.own.promise, 1, 1, follows=founder.peer_id), 0.0)
    return node


def offered(node: Node, island: Identity, admission: str) -> list[msg.Effect]:
    key, term = node.state.key, node.own.term.number
    effects = node.receive(island.peer_id, msg.Promise(key, term, 1, 0, None, admission=admission), 0.2)
    return effects + node.receive(
        island.peer_id, msg.Ready(key, term, (Offer(0, 0, 1, 10, (), incarnation=1),), 0), 0.3
    )


def test_a_coordinator_takes_no_more_newcomers_than_an_invite_allows(folder, state, founder, islands) -> None:
    node, ticket = leading(state, founder, *islands[:2]), ticket_in(folder, islands=1)
    for island in islands[:2]:
        offered(node, island, hexed(ticket, island))
    effects = node.offer(Offer(0, 0, 1, 10, (), incarnation=1), 0.4) + node.tick(9.0) + node.tick(9.5)
    (begun, *_) = said(effects, msg.Begin)
    assert set(begun.proposal.roster) == {founder.peer_id, islands[0].peer_id}
    assert begun.proposal.admissions == ((islands[0].peer_id, hexed(ticket, islands[0])),)


def test_a_coordinator_excludes_one_that_has_no_admission(state, founder, islands) -> None:
    node = leading(state, founder, islands[0])
    effects = offered(node, islands[0], "")
    notes = [(effect.kind, effect.peer) for effect in effects if isinstance(effect, msg.Note)]
    assert ("excluded", islands[0].peer_id) in notes
    begun = said(node.offer(Offer(0, 0, 1, 10, (), incarnation=1), 0.4), msg.Begin)
    assert [begin.proposal.roster for begin in begun] in ([], [(founder.peer_id,)])
