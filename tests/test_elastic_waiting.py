"""Where a quorum decides and too few are there, an island says for whom it waits."""

from dataclasses import replace

from nodes import STATE, beat, options, those

from diloco.elastic.protocol.messages import Note
from diloco.elastic.protocol.node import Node


def told(node: Node, until: float, since: float = 0.0) -> list[str]:
    """What it says of waiting, second by second."""
    notes = [note for now in range(int(since), int(until)) for note in those(node.tick(float(now)), Note)]
    return [note.text for note in notes if note.kind == "waiting"]


def test_whom_it_waits_for_is_said_once_a_minute():
    node = Node("B", STATE, options(partition="quorum"), now=0.0)
    (text,) = told(node, 60)
    assert text.startswith("for A, C: 1 of 3 members are here, that is no quorum") and "--keep B`" in text
    assert len(told(node, 180, 60)) == 2


def test_nothing_is_said_while_a_quorum_is_there_nor_under_merge():
    node = Node("B", STATE, options(partition="quorum"), now=0.0)
    for now in range(30):
        node.receive("C", beat(sequence=now + 1), now)
        assert not told(node, now + 1, now)
    assert not told(Node("B", STATE, options(), now=0.0), 60)


def test_of_many_only_those_who_hear_everybody_say_it():
    """The others hear a few members only, and would think the rest gone."""
    state = replace(STATE, roster=tuple("ABCDEFGHIJKL"))
    node = Node("L", state, options(partition="quorum", flat_up_to=1), now=0.0)
    for now in range(60):
        for front in "ABCD":
            node.receive(front, beat(sequence=now + 1, missed=()), float(now))
        assert not told(node, now + 1, now)
