"""Who leads, as each island judges it by whom it hears and who says to hear it."""

from dataclasses import replace

import pytest
from nodes import OFFER, STATE, beat, begin, options, said, those

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.leading import SPREAD, STUCK_SILENCES
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Ballot, Head

SILENCE_S = options().silence_s


def places(names: str, roster: str) -> tuple[int, ...]:
    return tuple(roster.index(name) for name in names)


def node(me: str, heard: dict[str, str], roster: str = "ABC", **changes) -> Node:
    """One island that hears these others, each with those that it says to hear, and after a / those it is linked with.

    Without a / these are the same.
    """
    state = replace(STATE, roster=tuple(roster))
    made = Node(me, state, options(**changes), now=0.0, incarnation=1)
    for peer, told in heard.items():
        hears, _, linked = told.partition("/")
        made.receive(peer, beat(hears=places(hears, roster), linked=places(linked or hears, roster)), 0.0)
    return made


@pytest.mark.parametrize("me", "ABC")
@pytest.mark.parametrize("partition", ["merge", "quorum"])
def test_with_the_first_pair_cut_all_follow_the_one_that_hears_both(me, partition):
    hears = {"A": "AC", "B": "BC", "C": "ABC"}
    heard = {peer: hears[peer] for peer in hears[me] if peer != me}
    assert node(me, heard, partition=partition).leading.coordinator(0.1) == "C"


def test_one_that_is_heard_and_hears_nobody_is_not_followed():
    second = node("B", {"A": "A", "C": "ABC/BC"})
    assert second.leading.coordinator(0.1) == "B" and second.leading.linked(0.1) == ["C"]
    assert said(second.receive("A", msg.Collect(STATE.head, 1), 0.1), msg.Follows), "and is promised nothing"


def test_over_a_link_that_carries_one_way_nobody_follows():
    """A hears B, and B does not hear A: all follow the one that both are linked with."""
    assert node("A", {"B": "BC", "C": "ABC"}).leading.coordinator(0.1) == "C"
    assert node("B", {"C": "ABC"}).leading.coordinator(0.1) == "C"
    assert node("C", {"A": "ABC/AC", "B": "BC"}).leading.coordinator(0.1) == "C"


def test_of_four_the_half_with_the_first_member_outranks_the_other_half():
    assert (
        node("B", {"A": "AB", "C": "BC"}, "ABCD", partition="quorum").leading.coordinator(0.1) == "B"
    )  # it hears three
    assert node("C", {"D": "CD", "A": "AC"}, "ABCD", partition="quorum").leading.coordinator(0.1) == "C"
    assert node("D", {"C": "CD", "A": "AD"}, "ABCD", partition="quorum").leading.coordinator(0.1) == "D"
    outside = Node("X", replace(STATE, roster=tuple("ABCD")), options(partition="quorum"), now=0.0, incarnation=1)
    outside.receive("A", beat(hears=(0, 1)), 0.0)
    outside.receive("D", beat(hears=(2, 3)), 0.0)
    assert outside.leading.coordinator(0.1) == "A", "D hears as many, and they are no quorum"


def test_one_at_another_head_is_not_followed():
    second = node("B", {"C": "ABC/BC"})
    second.receive("A", beat(Head(0, 0, "")), 0.1)  # less than ours
    assert second.leading.coordinator(0.1) == "B"


def test_a_leader_needs_half_of_those_it_is_linked_with():
    first = node("A", {})
    for peer, follows in (("B", "B"), ("C", "B")):
        first.receive(peer, beat(follows=follows), 0.0)
    assert first.leading.coordinator(0.1) == "A" and not first.leading.may_lead(0.1)
    first.receive("C", beat(follows="A"), 0.1)
    assert first.leading.may_lead(0.1)


def test_nobody_leads_before_it_knows_whether_the_others_are_there():
    first = node("A", {"B": "AB"})
    assert first.leading.coordinator(0.1) == "A" and not first.leading.may_lead(0.1)
    for tenth in range(1, 30):
        first.receive("B", beat(hears=(0, 1)), tenth / 10)
        first.tick(tenth / 10)
    assert first.leading.may_lead(3.0), "C has been silent for long enough"


def running() -> Node:
    """C, which takes part in an attempt of B's."""
    third = node("C", {"B": "ABC"})
    third.receive("B", begin(Ballot(1, "B", 0), members=("B", "C")), 0.1)
    return third


def test_the_coordinator_of_a_running_attempt_is_followed_while_it_is_linked():
    third = running()
    third.receive("A", beat(), 0.2)
    assert third.leading.coordinator(0.3) == "B", "A came later"
    third.receive("B", beat(hears=(1,)), 0.4)  # it does not hear C any more
    assert third.leading.coordinator(0.5) == "A"


def test_where_a_quorum_decides_a_coordinator_without_one_loses_its_followers():
    third = running()
    third.receive("A", beat(hears=(0, 2)), 0.2)
    third.own.state = replace(third.state, roster=tuple("ABCDE"))
    third.own.options = options(partition="quorum")
    third.receive("B", beat(hears=(1, 2)), 0.3)
    assert third.leading.coordinator(0.3) == "C"


def test_of_orphans_the_lowest_leads_but_not_where_a_quorum_decides():
    """All of the roster are gone, and observers remain."""
    for partition, leader in (("merge", "X"), ("quorum", "")):
        observer = Node("Y", STATE, options(partition=partition), now=0.0, incarnation=1)
        for half in range(1, 20):
            observer.receive("X", beat(hears=()), half / 2)
            observer.tick(half / 2)
        assert observer.leading.coordinator(9.5) == leader


def test_where_no_byte_moves_for_long_anybody_may_lead_and_be_promised():
    third = node("C", {"A": "ABC", "B": "ABC"})
    third.offer(OFFER, 0.5)
    third.receive("A", msg.Collect(STATE.head, 1), 0.5)
    assert not third.leading.may_promise("B", 1.0)
    third.moved(3.0)
    long = 3.0 + STUCK_SILENCES * SILENCE_S
    assert not third.leading.is_stuck(long), "the last byte counts"
    assert third.leading.is_stuck(long + 0.1) and third.leading.may_promise("B", long + 0.1)
    assert third.leading.may_lead(long + SPREAD * SILENCE_S)


def test_while_no_quorum_is_there_nobody_is_stuck():
    """Else all would be when it comes back: each would drop its term, and wait by chance, in place of the round."""
    third = node("C", {"A": "ABC"}, partition="quorum")
    third.offer(OFFER, 0.1)
    alone = 2 * STUCK_SILENCES * SILENCE_S
    for tenth in range(round(10 * alone) + 1):
        for _ in those(third.tick(tenth / 10), msg.Remember):
            third.remembered(tenth / 10)
    assert not third.leading.is_stuck(alone)
    third.receive("A", beat(sequence=2), alone)
    third.tick(alone)
    assert not third.leading.is_stuck(alone + STUCK_SILENCES * SILENCE_S)
    assert third.leading.is_stuck(alone + STUCK_SILENCES * SILENCE_S + 0.2), "though it is back"


def test_one_with_nothing_to_offer_promises_to_anybody_once_its_coordinator_is_idle_for_long():
    """It waits for samples, say: what others wait for it cannot tell, and without its promise there is no quorum."""
    third = node("C", {"A": "ABC", "B": "ABC"})
    third.receive("A", msg.Collect(STATE.head, 1), 0.5)
    third.remembered(0.5)
    third.moved(3.0)
    long = 3.0 + STUCK_SILENCES * SILENCE_S
    beats = {peer: replace(beat(sequence=2), follows="A") for peer in "AB"}
    third.receive("A", replace(beats["A"], leading=True), long)
    third.receive("B", beats["B"], long)
    assert not third.leading.may_promise("B", long + 0.1), "others may be training"
    third.receive("A", replace(beats["A"], sequence=3), long)
    assert not third.leading.may_promise("B", long), "the last byte counts"
    assert third.leading.coordinator(long + 0.1) == "A" and third.leading.may_promise("B", long + 0.1)
    assert not third.leading.is_stuck(long + 0.1), "it need not lead itself"
