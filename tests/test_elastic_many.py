"""Among many islands, a front hears and speaks for the others, answers wait for a tick, and vectors go in two levels.

The limits are set low here, so that a few islands are many.
"""

import lzma
from dataclasses import replace
from functools import partial

import pytest
from disasters import commits_of
from islands import agree, at_round, team
from nodes import options, said

from diloco.bench import bare
from diloco.elastic.protocol import liveness
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Begin, Collect, Goodbye, Heartbeat, Promise, Ready, Send
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.record import NO_BALLOT, Ballot, Contribution, Head, Offer, Proposal, Settings
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import (
    MAX_MESSAGE,
    PACK_BYTES,
    PACKED,
    decode,
    decode_message,
    dump,
    encode_message,
    to_plain,
)
from diloco.elastic.runtime import reducing
from diloco.errors import MessageRefused
from diloco.simulate.virtual import chances
from diloco.simulate.virtual.campaign import Campaign

NAMES = tuple("ABCDEFGH")
STATE = RunState(Head(0, 0, "0" * 64), NAMES, Ledger(epoch=1000))
AHEAD = Head(9, 1, "1" * 64)
OFFER = Offer(0, 0, 1, 10, (), incarnation=1)
BEAT = Heartbeat(STATE.head, NO_BALLOT, incarnation=1, sequence=1)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    monkeypatch.setattr(liveness, "FRONT", 2)


def node(me: str, flat_up_to: int = 1) -> Node:
    return Node(me, STATE, options(flat_up_to=flat_up_to), now=0.0, incarnation=1)


def beats(effects) -> dict[str, Heartbeat]:
    return {e.to: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Heartbeat)}


def test_the_front_tells_everybody_whom_it_misses_and_the_rest_tell_the_front():
    assert beats(node("E").tick(0.1)).keys() == {"A", "B"}
    first = node("A")
    first.tick(0.1)
    for peer in "BCDE":
        first.receive(peer, BEAT, 1.5)
    told = beats(first.tick(1.6))
    assert told.keys() == set(NAMES) - {"A"}
    assert {beat.missed for beat in told.values()} == {(5, 6, 7)}


def test_among_few_everybody_tells_everybody_and_nobody_speaks_for_others():
    told = beats(node("E", flat_up_to=64).tick(0.1))
    assert told.keys() == set(NAMES) - {"E"}
    assert {beat.missed for beat in told.values()} == {None}


def test_who_is_quiet_takes_the_fronts_word():
    quiet = node("E")
    quiet.tick(0.1)
    for now in (1.0, 2.0, 3.0):
        quiet.receive("A", replace(BEAT, missed=(5,)), now)
        quiet.receive("B", replace(BEAT, missed=(5,)), now)
    assert quiet.liveness.alive(3.1) == set(NAMES) - {"E", "F"}
    assert quiet.liveness.coordinator(3.1) == "A"


def test_who_has_lost_the_front_believes_nobodys_word():
    lonely = node("C")
    lonely.tick(0.1)
    lonely.receive("A", replace(BEAT, missed=()), 0.5)
    told = [beats(lonely.tick(now)).keys() for now in (1.0, 1.5, 2.0, 2.6)]
    assert told[-1] == set(NAMES) - {"C"} != told[0], "it has not heard the front for long: it broadcasts"
    lonely.receive("H", replace(BEAT, missed=()), 2.7)
    assert lonely.peers.reports == {}
    assert "A" not in lonely.liveness.alive(2.8), "the others were vouched for, and are given time; the front is gone"
    assert lonely.liveness.alive(2.8) == {"D", "E", "F", "G", "H"}
    assert lonely.liveness.coordinator(2.8) == "C"


def test_who_leads_believes_nobodys_word():
    leader = node("C")
    leader.tick(0.1)
    for peer in "AB":
        leader.receive(peer, BEAT, 0.15)
        leader.closed(peer, 0.2)
    leader.tick(0.6)
    assert leader.own.term is not None
    for peer in "AB":  # they are back, and it still leads
        leader.receive(peer, BEAT, 0.7)
    assert beats(leader.tick(1.1)).keys() == set(NAMES) - {"C"}
    leader.receive("D", replace(BEAT, missed=()), 1.2)
    assert leader.peers.reports == {}


def test_one_that_nobody_vouched_for_is_not_brought_back_by_silence():
    alone = node("H")
    for now in range(1, 12):
        alone.tick(float(now))
    assert alone.liveness.alive(12.0) == set()
    assert alone.liveness.coordinator(12.0) == "H"


def test_who_is_behind_is_answered_by_those_who_are_quiet():
    quiet = node("E")
    quiet.tick(0.1)
    quiet.caught_up(replace(STATE, head=Head(9, 1, "1" * 64)), 0.15)
    assert beats(quiet.receive("G", BEAT, 0.2)).keys() == {"G"}


def test_heartbeats_that_miss_whom_nobody_knows_do_no_harm():
    quiet = node("E")
    quiet.tick(0.1)
    quiet.receive("A", replace(BEAT, missed=(-1, 10**9)), 0.2)
    assert quiet.liveness.coordinator(0.3) == "A"


def test_a_coordinator_of_many_looks_at_answers_when_it_ticks():
    first, offer = node("A"), Offer(0, 0, 1, 10, (), incarnation=1)
    first.tick(0.1)
    first.offer(offer, 0.15)
    for peer in NAMES[1:]:
        first.receive(peer, Promise(STATE.key, 1, 1, 0, None), 0.2)
        first.receive(peer, Ready(STATE.key, 1, (offer,)), 0.2)
    assert first.own.term is not None and first.own.term.begin is None
    assert [begin.members for begin in said(first.tick(0.3), Begin)] == [NAMES] * 7


def test_those_who_have_heard_are_seldom_told_again():
    first = node("A")
    first.tick(0.1)
    for peer in NAMES[1:]:
        first.receive(peer, Promise(STATE.key, 1, 1, 0, None), 0.2)
    asked = []
    for number in range(1, 17):
        for peer in NAMES[1:]:
            first.receive(peer, replace(BEAT, promise=Ballot(1, "A", 0)), 0.6 * number)
        asked.append(len(said(first.tick(0.6 * number), Collect)))
    assert sorted(asked) == [0] * 14 + [7] * 2


def many_that_promise(behind: str = "", starving: str = "") -> Node:
    """A coordinator whom all have promised, but those in `behind`, whose heartbeats show an older head."""
    first = Node("A", replace(STATE, head=AHEAD), options(flat_up_to=1), now=0.0, incarnation=1)
    first.own.lead_at = 0.0  # it is not one that returns
    first.tick(0.1)
    for peer in NAMES[1:]:
        if peer in behind:
            first.receive(peer, BEAT, 0.2)
        else:
            first.receive(peer, Promise(first.state.key, 1, 1, 8 * (peer in starving), None), 0.2)
            first.receive(peer, Ready(first.state.key, 1, (OFFER,)), 0.2)
    return first


def test_one_that_has_not_heard_of_the_last_commit_yet_is_waited_for():
    first = many_that_promise("GH")
    first.offer(OFFER, 0.3)
    assert not said(first.tick(0.4), Begin)
    for peer in "GH":
        first.receive(peer, Promise(first.state.key, 1, 1, 0, None), 0.5)
        first.receive(peer, Ready(first.state.key, 1, (OFFER,)), 0.5)
    assert {begin.members for begin in said(first.tick(0.6), Begin)} == {NAMES}


def test_one_that_stays_behind_is_not_waited_for():
    first = many_that_promise("GH")
    first.offer(OFFER, 0.3)
    assert not said(first.tick(0.6), Begin)
    for peer in "GH":
        first.receive(peer, replace(BEAT, sequence=2), 1.1)
    for peer in NAMES[1:6]:
        first.receive(peer, replace(BEAT, sequence=2, head=first.state.head), 1.1)
    assert {begin.members for begin in said(first.tick(1.2), Begin)} == {NAMES[:6]}


def test_what_a_member_offered_before_it_crashed_is_asked_for_again():
    first = many_that_promise()
    back = first.receive("H", replace(BEAT, head=AHEAD, incarnation=2), 0.3)
    assert said(back, Collect, to="H")
    first.offer(OFFER, 0.4)
    assert not said(first.tick(0.5), Begin), "it is there, and has not promised anew"
    first.receive("H", Promise(first.state.key, 1, 2, 0, None), 0.6)
    assert {begin.members for begin in said(first.tick(0.7), Begin)} == {NAMES[:7]}


def test_one_of_many_that_lacks_samples_waits_for_the_next_round():
    assert not said(many_that_promise(starving="H").tick(0.3), Begin)
    assert said(many_that_promise(starving="GH").tick(0.3), Begin), "if more than an eighth do, a record leases some"


def large() -> Begin:
    names = tuple(f"{name:052}" for name in range(200))
    parts = tuple(Contribution(name, Offer(0, 0, 1, 10, ()), 10) for name in names)
    proposal = Proposal(STATE.key, 0, parts, names, (), (), Settings(), 0)
    return Begin(STATE.key, Ballot(1, names[0], 0), proposal, names, (1,) * 200)


def test_large_messages_are_packed():
    raw = encode_message(large())
    assert raw.startswith(PACKED) and len(raw) < PACK_BYTES / 2
    assert decode_message(raw) == large()
    assert not encode_message(Goodbye("x")).startswith(PACKED)


@pytest.mark.parametrize("damage", ["cut", "more", "noise", "bomb"])
def test_packed_messages_that_are_damaged_or_swell_are_refused(damage):
    raw = encode_message(large())
    bad = {
        "cut": raw[:-9], "more": raw + b"x", "noise": PACKED + b"\xff" * 99,
        "bomb": PACKED + lzma.compress(b'["Goodbye",' + b" " * MAX_MESSAGE),
    }[damage]  # fmt: skip
    with pytest.raises(MessageRefused):
        decode_message(bad)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"1" + b"0" * 400, b"NaN", b"Infinity"])
def test_a_number_that_no_float_holds_is_refused(number):
    """Not left to whoever computes with it: a member's norm, for one, goes into what a coordinator sends to all."""
    offer = to_plain(Offer(0, 0, 1, 1, (), norm=0.25))
    with pytest.raises(MessageRefused):
        decode(Offer, dump(offer).replace(b"0.25", number))


@pytest.mark.parametrize("front", [1, 2])
def test_disasters_violate_nothing_with_a_front(monkeypatch, front):
    monkeypatch.setattr(liveness, "FRONT", front)
    monkeypatch.setattr(chances, "Options", partial(Options, flat_up_to=1))
    assert commits_of(range(5), Campaign(islands=6)) > 0


def test_islands_agree_bit_by_bit_with_a_front_and_two_levels(monkeypatch):
    """Real threads and streams; one is lost on the way."""
    monkeypatch.setattr(bare, "Options", partial(Options, flat_up_to=1))
    monkeypatch.setattr(reducing, "FLAT_UP_TO", 3)
    with team(NAMES[:7], silence_s=5.0) as (network, islands):
        at_round(islands, 3)
        gone = islands.pop(5)
        network.peers.pop(gone.name).close()
        at_round(islands, max(island.state.head.round for island in islands) + 3)
        assert [island.name for island in islands if island.driver.node.liveness.broadcasts] == ["A", "B"]
        agree(islands)
        assert gone.name not in islands[0].state.roster
        gone.close()


def test_a_coordinator_of_many_asks_those_who_were_not_heard_of_late_and_leaves_out_who_is_silent():
    first, offer = node("A"), Offer(0, 0, 1, 10, (), incarnation=1)
    first.tick(0.1)
    first.offer(offer, 0.15)
    for peer in NAMES[1:-1]:
        first.receive(peer, Promise(STATE.key, 1, 1, 0, None), 0.2)
        first.receive(peer, Ready(STATE.key, 1, (offer,), 1000), 0.2)
    first.receive("H", Promise(STATE.key, 1, 1, 0, None), 0.2)  # it still trains
    for peer in NAMES[2:]:
        first.receive(peer, replace(BEAT, sequence=2), 0.9)
    effects = first.receive("H", Ready(STATE.key, 1, (offer,), 1000), 1.0) + first.tick(1.01)
    assert [send.to for send in effects if isinstance(send, Send) and isinstance(send.message, Collect)] == ["B"]
    assert not said(effects, Begin)
    for now in (1.1, 1.3):
        for peer in NAMES[2:]:
            first.receive(peer, replace(BEAT, sequence=3), now)
        assert not said(first.tick(now), Begin)
    begins = said(first.tick(1.45), Begin) + said(first.tick(1.46), Begin)
    assert {begin.members for begin in begins} == {("A", "C", "D", "E", "F", "G", "H")}
