"""An island whose link is far slower than the others' takes part in every k-th round only."""

from dataclasses import replace

import pytest
from nodes import STATE, options

from diloco.elastic.protocol.messages import Note
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.pacing import Pacing
from diloco.elastic.protocol.record import Offer

OFFER = Offer(0, 0, 1, 10, ())
OFFERS = dict.fromkeys("ABC", OFFER)
RATES = {"A": 1000, "B": 1000, "C": 10}


@pytest.fixture
def pacing() -> Pacing:
    """Exchanges of A and B took 2 s, at 1,000 bytes a second."""
    found = Pacing(Node("A", STATE, options(), now=0.0).own)
    for _ in range(3):
        found.committed("AB", RATES, 2.0)
    return found


def at_round(pacing: Pacing, number: int) -> None:
    state = pacing.own.state
    pacing.own.state = replace(state, head=replace_round(state.head, number - 1))


def replace_round(head, number: int):
    return head._replace(round=number)


def test_a_slow_one_comes_in_at_once_then_only_every_so_many_rounds(pacing):
    at_round(pacing, 10)
    assert pacing.in_turn(OFFERS, RATES, 10.0).keys() == set("ABC")
    (note,) = [effect for effect in pacing.own.effects if isinstance(effect, Note)]
    assert (
        note.kind == "slow" and note.peer == "C" and "one of 198 rounds" in note.text
    )  # 200 s - 2 s, at 1 s of each round
    pacing.committed("ABC", RATES, 200.0)
    at_round(pacing, 207)
    assert pacing.in_turn(OFFERS, RATES, 10.0).keys() == set("AB") and pacing.is_out_of_turn("C")
    at_round(pacing, 208)
    assert pacing.in_turn(OFFERS, RATES, 10.0).keys() == set("ABC")


def test_its_own_long_exchanges_do_not_change_what_is_thought_of_the_link(pacing):
    at_round(pacing, 10)
    pacing.in_turn(OFFERS, RATES, 10.0)
    pacing.committed("ABC", RATES, 200.0)
    at_round(pacing, 11)
    assert pacing.in_turn(OFFERS, RATES, 10.0).keys() == set("AB")
    faster = RATES | {"C": 500}
    assert pacing.in_turn(OFFERS, faster, 10.0).keys() == set("ABC"), "4 s are not twice as long as a round"


def test_nobody_is_left_out_while_rates_or_rounds_are_not_known(pacing):
    assert pacing.in_turn(OFFERS, RATES | {"C": 0}, 10.0) == OFFERS
    assert pacing.in_turn(OFFERS, RATES, None) == OFFERS
    assert Pacing(pacing.own).in_turn(OFFERS, RATES, 10.0) == OFFERS


def test_where_all_links_are_slow_nobody_is(pacing):
    slow = dict.fromkeys("ABC", 10)
    pacing.committed("ABC", slow, 200.0)
    assert pacing.in_turn(OFFERS, slow, 200.0) == OFFERS
