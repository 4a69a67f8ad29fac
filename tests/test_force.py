"""The owner forces a roster when too many islands are gone for good to be a quorum: its signature stands for that."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from launched import wait_until
from nodes import STATE, options, those
from real_islands import open_islands, together
from records import record

from diloco.elastic.protocol.messages import CatchUp, Heartbeat
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import FORCE, NO_BALLOT, Amendment, Head, Key
from diloco.elastic.protocol.state import RunState
from diloco.errors import RecordInvalid
from diloco.simulate.virtual.world import owner
from diloco.train.amend import amended, in_words

OWNED = replace(STATE, owner=owner().public_key.hex(), roster=tuple("ABCDE"), latch="0")


def force(key: Key, *kept: str) -> Amendment:
    told = {"round": key.round, "parent": key.parent, "keep": kept}
    return Amendment.sign(owner(), 1, json.dumps({FORCE: told}))


def test_those_who_are_kept_decide_one_record_all_of_them_and_are_its_roster():
    amendment = force(OWNED.key, "A", "B")
    assert OWNED.is_decided(amendment, "AB") and not OWNED.is_decided(amendment, "ACDE")
    assert not OWNED.is_decided(None, "AB")
    state = OWNED.after(record(OWNED, amendment=amendment, roster=("A", "B")))
    assert state.roster == ("A", "B") and state.forces == 1
    assert state.is_decided(None, "A") and not state.is_decided(None, "B"), "from there on, a quorum of them"
    for roster in (("A", "B", "C"), ("A",)):
        with pytest.raises(RecordInvalid, match="not the one that the run's owner has forced"):
            OWNED.after(record(OWNED, amendment=amendment, roster=roster))


def test_one_for_another_record_forces_nothing_and_bars_no_other_change():
    late = force(Key(99, "elsewhere"), "A", "B")
    assert not OWNED.is_decided(late, "AB")
    state = OWNED.after(record(OWNED, amendment=late, roster=OWNED.roster))
    assert state.forces == 0 and len(state.amendments) == 1 and state.roster == OWNED.roster


def test_nobody_but_the_owner_forces_anything():
    own = replace(force(OWNED.key, "A"), signature="00")
    with pytest.raises(RecordInvalid, match="not the owner's next change"):
        OWNED.after(record(OWNED, amendment=own, roster=("A",)))


def test_whoever_has_gone_on_without_it_follows_though_it_has_more_tokens():
    beat = Heartbeat(Head(5, 1, "forced"), NO_BALLOT, 1, 1)
    far: RunState = replace(OWNED, head=Head(1000, 30, "far"))
    for rank, moves in ((1, False), (2, True)):
        node = Node("C", far, options(partition="quorum"), now=0.0)
        effects = node.receive("A", replace(beat, rank=rank), 0.1) + node.tick(0.2)
        assert bool(those(effects, CatchUp)) == moves


def test_it_changes_no_setting_and_people_can_read_it(small):
    amendment = force(OWNED.key, "A", "B")
    assert amended(small(), [amendment]) == small()
    assert in_words(amendment) == "force-roster A,B"
    for broken in ("[1]", '{"force":1}', '{"force":{"round":"x","parent":"","keep":[]}}', '{"force":{"round":1}}'):
        assert Amendment(1, broken).kept(Key(1, "")) == ()


@pytest.mark.soak
def test_two_of_five_go_on_when_three_are_gone_for_good(tmp_path):
    with open_islands(tmp_path, {"elastic": {"silence_s": 3, "partition": "auto"}}) as start:
        islands = [start(number) for number in range(1, 6)]
        assert wait_until(lambda: together(islands)), [island.process.poll() for island in islands]
        for island in islands[2:]:
            island.process.kill()
        left = islands[:2]
        assert wait_until(lambda: left[0].told("waiting")), left[0].process.poll()
        (text, *_) = left[0].told("waiting")
        assert "`diloco force-roster RUN --keep island-1,island-2` goes on without" in text
        before = [len(island.events("round")) for island in left]
        names = ("--keep", "island-1,island-2")
        command = [sys.executable, "-m", "diloco", "force-roster", str(tmp_path / "island-1"), *names]
        asked = subprocess.run(command, input="n\n", capture_output=True, text=True)
        assert asked.returncode == 1 and "island-3, island-4, island-5 commit" in asked.stdout
        done = subprocess.run([*command, "--yes"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert wait_until(lambda: all(len(i.events("round")) > n + 3 for i, n in zip(left, before, strict=True))), left[
            0
        ].told("refused")
        back = start(3, resume="")
        assert wait_until(lambda: together([*left, back])), back.process.poll()
