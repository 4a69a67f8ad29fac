"""The owner takes an island out of a run: it leaves the roster for good, and stops if it is alive."""

import json
from dataclasses import replace

import pytest
from nodes import STATE, options, those
from records import contribution, record

from diloco.elastic.protocol.messages import Note
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.proposer import propose
from diloco.elastic.protocol.record import EMPTY, EVICT, Amendment, Record, Settings
from diloco.errors import RecordInvalid, SaveError
from diloco.history.find import island_named
from diloco.run.names import Names
from diloco.simulate.virtual.world import owner
from diloco.train.amend import amended, in_words

OWNED = replace(STATE, owner=owner().public_key.hex())
WITHOUT_C = Amendment.sign(owner(), 1, json.dumps({EVICT: ["C"]}))
GONE = replace(OWNED, roster=("A", "B"), amendments=(WITHOUT_C,))


def test_who_is_taken_out_leaves_the_roster_with_that_record_and_its_lease_returns():
    ledger, _ = OWNED.ledger.grant("C#1", 8)
    state = replace(OWNED, ledger=ledger)
    proposal = propose(
        state, 0, {}, {"A": 1, "B": 1, "C": 1}, {"C": 8}, lambda *_: (Settings(), 0), WITHOUT_C, roster=("A", "B", "C")
    )
    assert proposal.roster == ("A", "B") and proposal.releases == ("C#1",) and not proposal.grants
    assert state.after(Record(proposal, EMPTY)).evicted == {"C"}


def test_a_record_that_keeps_one_who_is_taken_out_is_none():
    for state, changes in ((OWNED, {"amendment": WITHOUT_C}), (GONE, {"roster": ("A", "B", "C")})):
        with pytest.raises(RecordInvalid, match="taken a member of it out"):
            state.after(record(state, **changes))
    with pytest.raises(RecordInvalid, match="taken a member of it out"):
        GONE.after(record(GONE, contribution("C", 0, 1)))


def test_the_one_who_is_taken_out_says_so_and_falls_silent():
    node = Node("C", GONE, options(), now=0.0)
    (note,) = those(node.tick(0.1), Note)
    assert note.kind == "evicted" and node.own.leaving and node.tick(0.2) == []


def test_nobody_waits_for_one_who_is_taken_out():
    node = Node("A", replace(GONE, roster=("A", "B", "C")), options(), now=0.0)
    assert node.liveness.alive(0.1) == {"B"} and not node.liveness.is_alive("C", 0.1)


def test_it_changes_no_setting_and_people_can_read_it(small):
    assert amended(small(), [WITHOUT_C]) == small()
    assert in_words(WITHOUT_C) == "…C is taken out"
    assert Amendment(1, "[1]").evicts == Amendment(1, "{").evicts == Amendment(1, '{"evict":1}').evicts == frozenset()


def test_islands_are_found_by_the_names_that_people_see():
    roster, names = ("12D3KooWabcdefgh", "12D3KooWijklmnop"), Names({"12D3KooWabcdefgh": "one"})
    assert island_named("one", roster, names) == roster[0] and island_named("ijklmnop", roster, names) == roster[1]
    with pytest.raises(SaveError, match=r"no such island; the run has one .*unknown \(…ijklmnop\)"):
        island_named("two", roster, names)
    assert island_named("three", roster, Names({**names.known, "gone": "three"}), ["gone"]) == "gone"
    both = Names({**names.known, "gone": "one"})
    assert island_named("one", roster, both, ["gone"]) == roster[0], "one of now goes first"
    assert island_named("one (ijklmnop)", roster, Names(dict.fromkeys(roster, "one"))) == roster[1]
    with pytest.raises(SaveError, match="two islands are called that"):
        island_named("one", roster, Names(dict.fromkeys(roster, "one")))
