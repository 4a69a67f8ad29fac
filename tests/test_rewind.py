"""A new run from an earlier round of another one: the same state, other settings, nothing of the old one touched."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import read_events
from launched import wait_until
from logs import ROUNDS

from diloco.checkpoint.log.journal import Journal
from diloco.checkpoint.log.replica import vectors_digest
from diloco.comm.peers.identity import Identity, run_id_of
from diloco.config.file import load_config
from diloco.elastic.runtime.restoring import restore
from diloco.errors import ConfigError, JoinRefused, MessageRefused, SaveError
from diloco.history.find import find_logs
from diloco.history.log import newest_state, state_of, verify
from diloco.history.rewind import rewind
from diloco.history.rounds import history_of
from diloco.island.layout import Layout, fragments_of
from diloco.run.folder import OUTER
from diloco.run.genesis import Genesis, Parent, read_genesis, write_genesis
from diloco.run.join import run_of
from diloco.train.schedule import Schedule

ROUND = 5


def bytes_of(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_state_of_a_round_is_the_beginning_of_a_new_run(log):
    """Parameters, momentum, clock, turn, samples: all but who had leased what."""
    folder, digests = log
    before = bytes_of(folder.parent)
    branch = rewind(str(folder.parent), ROUND)
    assert bytes_of(folder.parent) == before
    assert branch.folder == folder.parent.with_name("run-round-5") and branch.islands == 1
    old, _ = state_of(folder, ROUND)
    new, vectors = state_of(branch.folder / OUTER, 0)
    assert vectors_digest(vectors) == digests[ROUND] and set(vectors) == {"parameters", "momentum"}
    assert new == branch.genesis.state()
    assert (new.head.round, new.head.tokens, new.step) == (0, old.head.tokens, old.step)
    assert (new.ledger.next, new.ledger.leases, new.marks) == (old.ledger.next, (), ())
    assert verify(branch.folder / OUTER).problems == ()


def test_its_genesis_names_its_parent_and_another_owner(log):
    folder, digests = log
    branch = rewind(str(folder.parent), ROUND)
    genesis, old = read_genesis(branch.folder / OUTER), read_genesis(folder)
    state, _ = state_of(folder, ROUND)
    assert genesis == branch.genesis and Genesis.parse(genesis.raw) == genesis
    assert genesis.parent.genesis == old.digest and genesis.parent.chain == state.head.digest
    assert (genesis.parent.round, genesis.parent.vectors) == (ROUND, digests[ROUND])
    assert genesis.digest != old.digest and genesis.config == old.config
    owner = Identity.load(branch.folder / "owner.key").public_key
    assert genesis.owner == owner.hex() and Genesis.given(genesis.raw, run_id_of(owner)) == genesis
    with pytest.raises(MessageRefused, match="of another run"):
        Genesis.given(genesis.raw, bytes(32))
    with pytest.raises(SaveError, match="rewound is another one"):
        read_genesis(folder, run_id_of(owner))  # an island of the old run that comes with a ticket of the new one


@pytest.mark.parametrize(
    "forged", [{"founder": "somebody"}, {"config": {}}, {"signature": ""}, {"signature": "no hex"}]
)
def test_a_first_record_that_the_owner_has_not_signed_is_refused(log, forged):
    """A member has the owner's public key, and could give any other settings with it."""
    branch = rewind(str(log[0].parent), ROUND)
    genesis, run = branch.genesis, run_id_of(Identity.load(branch.folder / "owner.key").public_key)
    bad = replace(genesis, **forged)
    with pytest.raises(MessageRefused, match="not signed by its owner"):
        Genesis.given(bad.raw, run)
    folder = branch.folder / "other"
    folder.mkdir()
    write_genesis(folder, run, bad)
    assert read_genesis(folder) is None and read_genesis(folder, run) is None
    write_genesis(folder, run, genesis)  # which a peer has given instead
    assert read_genesis(folder, run) == genesis


def test_the_signature_is_no_part_of_what_is_signed(log):
    genesis = read_genesis(log[0])
    assert replace(genesis, signature="").digest == genesis.digest != replace(genesis, samples=1).digest


def test_a_first_record_that_makes_no_sense_is_refused(log):
    genesis = rewind(str(log[0].parent), ROUND).genesis
    tree = json.loads(genesis.raw)
    for parent in ([], [1] * 8, "round 5", {"round": 5}):
        with pytest.raises(JoinRefused, match="cannot be read"):
            Genesis.parse(json.dumps({**tree, "parent": parent}).encode())


def test_an_island_goes_on_from_it(log, small):
    folder, digests = log
    branch = rewind(str(folder.parent), ROUND, folder.parent.with_name("again"))
    config, genesis, outer = load_config(branch.folder / "config.yaml"), branch.genesis, branch.folder / OUTER
    genesis.refuse_changes(config)
    assert config.dir == str(branch.folder)
    fragments = fragments_of(Layout(genesis.names, genesis.shapes), 1, "strided", ())
    told: list = []
    own = restore(outer, Journal.read(outer), run_of(genesis, config, fragments), lambda *said: told.append(said))
    assert own.state == genesis.state() and vectors_digest(own.vectors) == digests[ROUND]
    assert told == []


def test_other_settings_go_into_the_new_run(log):
    folder, _ = log
    branch = rewind(str(folder.parent), 7, overrides=["inner.lr=1e-4", "sync.every=3", "island.batch=16"])
    config = load_config(branch.folder / "config.yaml")
    assert (config.inner.lr, config.sync.every, config.island.batch) == (1e-4, 3, 16)
    assert branch.genesis.config["inner"]["lr"] == 1e-4 and branch.genesis.config["island"]["batch"] == 16
    branch.genesis.refuse_changes(config)
    assert branch.genesis.state().updates == 2  # by its clock, rounds after step 3 and step 6 are behind it


@pytest.mark.parametrize(
    ("number", "override", "reason"),
    [
        (5, "model.width=64", "model.width cannot change: the state of round 5 was made with 32"),
        (5, "seed=3", "seed cannot change"),
        (5, "data.sequence=64", "data.sequence cannot change"),
        (5, "sync.fragments=2", "sync.fragments cannot change"),
        (5, "outer={optimizer: adam, lr: 1e-3}", "outer.optimizer cannot change"),
        (5, "inner.steps=5", "ends the run: take an earlier round, or train on with --set inner.steps=10"),
        (5, "inner.lr=-1", "inner.lr=-1"),
        (9, "inner.lr=1", "covers rounds 0 to 8"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(log, number, override, reason):
    folder, _ = log
    with pytest.raises((ConfigError, SaveError)) as refused:
        rewind(str(folder.parent), number, overrides=[override])
    assert reason in str(refused.value)
    assert [path.name for path in folder.parent.parent.iterdir()] == ["run"]


def test_a_folder_that_is_there_stays(log):
    folder, _ = log
    rewind(str(folder.parent), ROUND)
    with pytest.raises(SaveError, match="already exists: name another folder"):
        rewind(str(folder.parent), ROUND)


def test_a_disk_that_refuses_leaves_nothing(log, monkeypatch):
    folder, _ = log

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diloco.run.branch.write_snapshot", full)
    with pytest.raises(SaveError, match=r"No space left on device.*nothing was changed"):
        rewind(str(folder.parent), ROUND)
    assert [path.name for path in folder.parent.parent.iterdir()] == ["run"]


def test_a_run_of_several_islands_is_rewound_as_a_whole(log):
    """By the island whose log leads furthest; each gets a folder to go on in."""
    folder, digests = log
    whole = folder.parent.with_name("fleet")
    for name in ("island-1", "island-2"):
        shutil.copytree(folder.parent, whole / name)
    (whole / "config.yaml").write_text(yaml.safe_dump({}))
    sorted((whole / "island-1" / OUTER).glob("log-*.seg"))[-1].unlink()
    branch = rewind(str(whole), ROUNDS, overrides=["inner.steps=90"])
    assert (branch.folder, branch.islands) == (whole.with_name(f"fleet-round-{ROUNDS}"), 2)
    logs = find_logs(str(branch.folder))
    assert [path.parent.name for path in logs] == ["island-1", "island-2"]
    assert [vectors_digest(state_of(path, 0)[1]) for path in logs] == [digests[ROUNDS]] * 2
    assert [(path.parent / "owner.key").exists() for path in logs] == [True, False]
    assert load_config(branch.folder / "config.yaml").dir == str(branch.folder)


def test_an_island_alone_goes_back_like_any_other(run, command):
    said = command("rewind", run, 3, "--set", "inner.steps=90")
    assert said.code == 0 and "round 3" in said.out
    assert "no log there" in command.refused("rewind", "nowhere", 1)


def test_what_an_earlier_diloco_left_without_a_log_is_told_how_to_be_taken_over(run, command):
    shutil.rmtree(run / OUTER)
    assert "`diloco export` reads it" in command.refused("rewind", run, 1)


def test_samples_that_somebody_had_leased_are_to_be_had_again(log, monkeypatch):
    state, vectors = state_of(log[0], ROUND)
    leased, _ = state.ledger.grant("A#1", 10)
    state = replace(state, ledger=leased.consume("A#1", ((0, 4),)))
    monkeypatch.setattr("diloco.history.rewind.state_of", lambda *_: (state, vectors))
    ledger = rewind(str(log[0].parent), ROUND).genesis.state().ledger
    assert ledger.leases == () and ledger.free == ((4, 10),) and ledger.next == 10
    assert ledger.epoch == state.ledger.epoch > 0


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_launches_behind_the_clock_are_the_updates_of_a_run(small, fragments):
    config = small(sync={"every": 6, "fragments": fragments}, inner={"steps": 40})
    schedule, step = Schedule.of(config.sync, config.inner), 0
    for updates in range(1, len(schedule.launches) + 1):
        step = schedule.next(step)
        assert schedule.behind(step) == updates
    longer = Schedule.of(config.sync, config.inner.model_copy(update={"steps": 80}))
    assert longer.behind(step) == sum(launch <= 40 for launch in longer.launches)


def test_the_commands_say_what_happened_and_what_next(log, command):
    folder, _ = log
    said = command("rewind", folder.parent, ROUND, "--set", "inner.lr=1e-4")
    new = folder.parent.with_name("run-round-5")
    assert f"{new} is a new run that begins with round 5 of {folder.parent}, at step 5" in said.out
    assert f"diloco run {new}/config.yaml --resume" in said.out
    parent = read_genesis(new / OUTER).parent
    assert isinstance(parent, Parent)
    assert f"rewound: it begins with round 5 (step 5, {parent.chain[:12]})" in command("log", new).out
    changed = command("set", new, "inner.lr=1e-3", "inner.steps=11")
    assert f"change 1 of {new}: inner.lr=0.001, inner.steps=11" in changed.out
    assert "change 2" in command("set", new, "outer.lr=0.5").out
    assert "outer.lr is 0.5 already" in command.refused("set", new, "outer.lr=0.5")
    assert "the run is at step 5 already" in command.refused("set", new, "inner.steps=4")
    assert "is part of what the run is" in command.refused("set", new, "model.width=64")
    assert "only its owner changes it" in command.refused("set", folder.parent, "inner.lr=1e-3")


@pytest.mark.soak
def test_a_run_is_rewound_and_changed_before_it_goes_on_and_while_it_does(log, command, tmp_path):
    """A real process: what waits in the folder holds from the first record on, what comes later from a later one."""
    folder, _ = log
    new = tmp_path / "new"
    lasting = "inner.steps=100000"
    command("rewind", folder.parent, ROUND, new, "--set", "log.every=1", "--set", lasting, "--set", "evaluate.every=0")
    command("set", new, "inner.lr=1e-4", "outer.lr=0.5")
    with (tmp_path / "said").open("w") as said:
        words = [sys.executable, "-m", "diloco", "run", str(new / "config.yaml"), "--resume"]
        running = subprocess.Popen(words, stdout=said, stderr=said)
    try:
        wait_until(lambda: newest_state(new / OUTER).updates > 2 or running.poll() is not None, 120)
        last = newest_state(new / OUTER).step + 40
        command("set", new, f"inner.steps={last}")
        assert running.wait(120) == 0
    finally:
        running.kill()
    told = (tmp_path / "said").read_text()
    assert "by the run's owner: inner.lr=0.0001, outer.lr=0.5\n" in told
    assert f"by the run's owner: inner.steps={last}\n" in told
    rates = {e["step"]: e["lr"] for e in read_events(new / "events.jsonl") if e["event"] == "step"}
    assert min(rates) == ROUND + 1 and max(rates) >= last and 0 < max(rates.values()) <= 1e-4
    assert [row["amendment"] for row in history_of([new / OUTER]).plain() if row["amendment"]] == [
        "inner.lr=0.0001, outer.lr=0.5", f"inner.steps={last}",
    ]  # fmt: skip
    found = verify(new / OUTER)
    assert found.problems == () and newest_state(new / OUTER).is_of(read_genesis(new / OUTER).owner)
