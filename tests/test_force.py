"""The owner forces a roster when too many islands are gone for good to be a quorum: its signature stands for that."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launched import wait_until
from nodes import STATE, options, those
from real_islands import open_islands, together
from records import record

from diloco.cli.owner import write_force
from diloco.comm.peers.identity import Identity
from diloco.elastic.protocol.messages import CatchUp, Heartbeat
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import FORCE, NO_BALLOT, Amendment, Head, Key
from diloco.elastic.protocol.state import RunState
from diloco.errors import RecordInvalid, SaveError
from diloco.history.log import newest_state
from diloco.run.folder import OUTER
from diloco.simulate.virtual.world import owner
from diloco.train.amend import amended, amendment_files, in_words, read_amendment, write_amendment

PAIR = Path(__file__).parent / "data" / "0.2.0" / "pair"
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
    assert in_words(amendment) == "only …A, …B go on"
    for broken in ("[1]", '{"force":1}', '{"force":{"round":"x","parent":"","keep":[]}}', '{"force":{"round":1}}'):
        assert Amendment(1, broken).kept(Key(1, "")) == ()


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two islands that have stopped, and a run that needs no quorum."""
    copy = Path(shutil.copytree(PAIR, tmp_path / "pair"))
    for key in copy.rglob("*.key"):
        key.chmod(0o600)  # git keeps no such mode
    return copy


def test_forcing_says_why_it_cannot_be(pair, command, tmp_path):
    def refused(*words: str) -> str:
        said = command("force-roster", str(pair), *words, "--yes")
        assert said.code == 2 and "Traceback" not in said.err
        return said.err

    assert "no such island; the run has" in refused("--keep", "nobody")
    assert "an empty name" in refused("--keep", "")
    assert "names an island twice" in refused("--keep", "island-1,island-1")
    assert "needs no quorum" in refused("--keep", "island-1")
    assert "does not exist: give the run's owner.key" in refused("--keep", "island-1", "--key", str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists(), "no key is made"
    assert "is not the key" in refused("--keep", "island-1", "--key", str(pair / "island-2" / "identity.key"))
    (pair / "island-1" / "owner.key").unlink()
    assert "founded elsewhere" in refused("--keep", "island-1")
    shutil.rmtree(pair / "island-1")
    assert "none of island-1 has its folder on this machine" in refused("--keep", "island-1")


def test_what_is_forced_waits_in_the_folder_of_one_who_is_kept_and_takes_the_place_of_what_waited(pair):
    folder = pair / "island-2"
    state = replace(newest_state(folder / OUTER), latch="x")
    owner_key = Identity.load(pair / "island-1" / "owner.key")
    write_amendment(folder, owner_key, 1, {"inner.lr": 0.5})
    kept = (Identity.load(folder / "identity.key").peer_id,)
    assert write_force(folder, owner_key, state, kept) == (1, ["change 1 (inner.lr=0.5)"])
    (path,) = amendment_files(folder)
    assert read_amendment(path).kept(state.key) == kept and state.accepts(read_amendment(path))
    with pytest.raises(SaveError, match="forced already"):
        write_force(folder, owner_key, state, kept)
    other = (*kept, "another")
    assert write_force(folder, owner_key, state, other)[0] == 1, "a list that was wrong can be corrected"
    assert [read_amendment(path).kept(state.key) for path in amendment_files(folder)] == [other]


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
        assert "continue without them: `diloco force-roster RUN --keep island-1,island-2`" in text
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
