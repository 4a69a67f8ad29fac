"""A witness stores and votes, and trains nothing: with it, two islands go on when either of them is lost."""

import os
import signal
import time
from dataclasses import replace

import pytest
from launched import wait_until
from nodes import STATE, options, said
from real_islands import Island, end, open_islands, together
from records import record

from diloco.elastic.protocol.messages import Collect, Promise
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import EMPTY, Contribution, Grant, Offer, Record
from diloco.elastic.protocol.rules import ALL
from diloco.errors import RecordInvalid
from diloco.report.board import Board
from diloco.report.events import WitnessStart
from diloco.report.terminal import sentence

QUORUM = {"elastic": {"silence_s": 3, "partition": "auto"}}
OFFER = Offer(0, 0, 1, 10, (), incarnation=1)


def test_a_witness_says_so_when_it_promises_and_wants_no_samples():
    node = Node("C", STATE, options(witness=True), now=0.0, rules=replace(ALL, follow_the_linked=False))
    (promise,) = said(node.receive("A", Collect(STATE.head, 1), 0.1), Promise)
    assert promise.witness and promise.want == 0


def test_a_record_in_which_a_witness_contributes_or_leases_is_none():
    plain = record(STATE, Contribution("A", OFFER, 10)).proposal
    with pytest.raises(RecordInvalid, match="a witness contributes"):
        STATE.after(Record(replace(plain, witnesses=("A",)), EMPTY))
    leases = replace(record(STATE).proposal, grants=(Grant("B#1", ((0, 4),)),))
    STATE.after(Record(leases, EMPTY))
    with pytest.raises(RecordInvalid, match="leases samples"):
        STATE.after(Record(replace(leases, witnesses=("B",)), EMPTY))


def test_people_are_told_who_is_a_witness():
    event = WitnessStart(time=1.0, run="r", dir="d", trained_parameters=2000, steps=9, round=4)
    assert sentence(event) == "r: witness from round 4 on: it stores 2k parameters and votes"
    board = Board.of(["w"])
    board.hear("w", event)
    assert board.rows["w"].state == "witness"


@pytest.mark.soak
@pytest.mark.parametrize("lost", [0, 1])
def test_two_islands_and_a_witness_go_on_when_either_island_is_killed(tmp_path, lost):
    with open_islands(tmp_path, QUORUM) as start:
        islands = [start(1), start(2), start(3, witness="")]
        left, witness = islands[1 - lost], islands[2]
        assert wait_until(lambda: together(islands))
        killed_at = time.time()
        islands[lost].process.kill()
        assert wait_until(lambda: len(contributed(left, killed_at + 1)) > 3), left.process.poll()
        (says,) = witness.events("witness")
        assert says["trained_parameters"] > 0 and not witness.events("step") and not witness.events("save")
        assert not any("island-3" in event["contributors"] for event in left.events("round"))
        os.kill(witness.process.pid, signal.SIGINT)
        assert witness.process.wait(60) == 0
        agreed, rounds = witness.events("agreed")[-1], {e["round"]: e["digest"] for e in left.events("round")}
        assert wait_until(lambda: "island-3" in {e["island"] for e in left.events("elastic") if e["what"] == "left"})
        assert rounds.get(agreed["round"], agreed["chain"]) == agreed["chain"]
        words = end(witness.process)
        assert "saying goodbye" in words and "step" not in words


@pytest.mark.soak
def test_an_island_alone_of_two_waits_and_says_for_whom(tmp_path):
    with open_islands(tmp_path, {"elastic": {"silence_s": 3, "partition": "quorum"}}) as start:
        founder, joiner = islands = [start(1), start(2)]
        assert wait_until(lambda: together(islands))
        founder.process.kill()
        assert wait_until(lambda: joiner.told("waiting")), joiner.process.poll()
        (text,) = joiner.told("waiting")
        assert text.startswith("for island-1: 1 of 2 members are here, that is no quorum")
        assert "continue without them: `diloco force-roster RUN --keep island-2`" in text
        rounds = len(joiner.events("round"))
        start(1, resume="")
        assert wait_until(lambda: len(joiner.events("round")) > rounds), "together, they go on"


def contributed(island: Island, since: float) -> list[int]:
    """The rounds with contributions that an island has seen since then."""
    return [e["round"] for e in island.events("round") if e["contributors"] and (e["applied_at"] or 0) > since]
