"""Which heartbeats and terms a node believes."""

import pytest
from nodes import STATE, beat, options, said, those

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Ballot


def leader() -> Node:
    """A, which B hears and follows."""
    made = Node("A", STATE, options(), now=0.0, incarnation=1)
    made.receive("B", beat(), 0.0)
    return made


def test_who_comes_back_from_a_pause_is_heard_though_it_counts_from_anew():
    before, after, other = leader(), leader(), Node("B", STATE, options(), now=0.0, incarnation=1)
    for now in range(1, 40):
        other.receive("A", said(before.tick(float(now)), msg.Heartbeat)[0], float(now))
    assert not other.member.on_heartbeat("A", said(after.tick(50.0), msg.Heartbeat)[0], 50.0), "it counts from 1"
    after.number_beats_after(before.own.sequence, 51.0)
    assert other.member.on_heartbeat("A", said(after.tick(60.0), msg.Heartbeat)[0], 60.0)


FAR = Ballot(2**62, "B", 0)


CLAIMS = [beat(STATE.head, promise=FAR), msg.Collect(STATE.head, FAR.term), msg.Nack(STATE.key, FAR)]


@pytest.mark.parametrize("far", CLAIMS, ids=lambda far: type(far).__name__)
def test_a_term_from_nowhere_is_not_counted_from(far):
    node = leader()
    node.tick(0.0)
    effects = node.receive("B", far, 0.1)
    assert node.own.highest_term < 10 and "excluded" in [note.kind for note in those(effects, msg.Note)]
