"""Islands that come back: from their own disks, from each other, or all of them when only their disks are left."""

import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import SMALL, TestIsland, assert_agreed, at_round, introduce, stand_still, training, wait_for
from launched import events_of, islands, last_agreed, pids, processes_at, rounds_with, started, wait_until

from diloco.bench.bare import DIGEST
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import Entry, Journal
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.snapshot import manifests, snapshots
from diloco.checkpoint.log.store import Store
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.transport.memory import MemoryNetwork
from diloco.elastic.protocol.messages import Done, Goodbye, Heartbeat, Held, Memory, Promise, Ready, Vow
from diloco.elastic.protocol.record import Ballot, Contribution, Key, Offer, Proposal, Record, Settings
from diloco.elastic.protocol.wire import encode
from diloco.elastic.runtime.applier import Applier, RunContext
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import points_of, restore
from diloco.train.outer import apply_record

NAMES = ("A", "B", "C")


class Kept(TestIsland):
    """With a folder of its own, in which it may have lived before."""

    def __init__(
        self, name: str, network: MemoryNetwork, folder: Path, life: int = 1, *, keep: int = 2, **options: Any
    ):
        self.told: list[tuple[str, str]] = []
        self.store = DiskStore(folder / name, lambda what, text: self.told.append((what, text)), keep=keep)
        self.restored = restore(self.store.folder, self.store.journal, SMALL.run, self.store.report)
        origin = self.restored or SMALL.beginning(NAMES)
        head, known = origin.state.head, self.restored is not None
        self.store.begin(DIGEST, head.digest, head.round, known=known)
        setting = replace(SMALL, **options)
        super().__init__(network.transport(name), origin, setting, incarnation=life, store=self.store)

    def close(self) -> None:
        super().close()
        self.store.close()


@contextmanager
def living(
    folder: Path, names: tuple[str, ...] = NAMES, life: int = 1, **options: Any
) -> Iterator[tuple[MemoryNetwork, list[Kept]]]:
    network = MemoryNetwork()
    team = [Kept(name, network, folder, life, **options) for name in names]
    with training(team):
        yield network, team


def test_all_stop_and_come_back_in_another_order_where_they_were(tmp_path):
    with living(tmp_path) as (_, team):
        at_round(team, 14)
    network = MemoryNetwork()
    back = [Kept(name, network, tmp_path, 2) for name in ("C", "A", "B")]
    rounds = [island.restored.state.head.round for island in back]
    with training(back):
        assert min(rounds) >= 13  # all but the one that was being written
        at_round(back, max(rounds) + 5)
        stand_still(back)
        assert_agreed(back)
        assert [island.told for island in back] == [[], [], []]


def test_who_comes_back_alone_keeps_its_work_for_the_branch_of_those_who_are_away(tmp_path):
    with living(tmp_path, ("A", "B")) as (network, team):
        at_round(team, 5)
        away = team.pop()
        network.peers.pop(away.name).close()
        away.close()
        wait_for(lambda: team[0].state.roster == ("A",), team)
    back = Kept("A", MemoryNetwork(), tmp_path, 2, rejoin_s=1.0)
    with training([back]):
        at_round([back], back.state.head.round + 6)
        stand_still([back])
        pieces = back.session.works[0].pieces
        assert back.state.roster == ("A",) and pieces[0].lo == 0 and pieces[-1].hi > 4


def test_the_state_from_disk_is_that_of_the_run(tmp_path):
    with living(tmp_path, ("A",)) as (_, (island,)):
        at_round([island], 13)
        stand_still([island])
        node, work = island.driver.node, island.session.works[0]
        wait_for(lambda: island.state.mark(node.me, node.incarnation, 0) == work.hi, [island])  # what it offered last
        digest, head = island.driver.replica.digest(), island.state.head
    store = DiskStore(tmp_path / "A", lambda what, text: None)
    again = restore(store.folder, store.journal, SMALL.run, store.report)
    assert again.state.head == head
    assert again.state.ledger.leases == island.state.ledger.leases and again.state == island.state
    assert vectors_digest(again.vectors) == digest


@pytest.mark.parametrize(("rounds", "story"), [(4, "rounds"), (10, "the whole state of round")])
def test_who_was_away_takes_its_own_disk_and_from_others_what_it_lacks(tmp_path, rounds, story):
    """From their disks: nobody has that much in memory. Where that is more than the whole state, it takes that."""
    with living(tmp_path, pace_s=0.15) as (network, team):
        at_round(team, 3)
        away = team.pop()
        network.peers.pop(away.name).close()
        away.close()
        at_round(team, away.state.head.round + rounds)
        back = Kept("C", network, tmp_path, 2)
        introduce([*team, back])
        back.start()
        try:
            wait_for(lambda: back.contained > 2, [*team, back])
            assert [note for note in back.notes if "mended" in note.kind] == []  # what it did not need stays away
        finally:
            back.close()
        assert back.restored.state.head.round >= 3
        first = next(note.text for note in back.notes if note.kind == "caught up")
        assert first.startswith(story)


def damage(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x40
    path.write_bytes(raw)


def damage_result(folder: Path, number: int) -> tuple[Entry, Path]:
    """Of that round; its record, and the file that it lies in."""
    journal = Journal.read(folder)
    hurt = next(entry for entry in journal.entries.values() if entry.round == number)
    place = journal.payloads[hurt.payload]
    damage(place.path, place.offset + 100)
    return hurt, place.path


def test_a_damaged_record_is_named_and_fetched_from_peers(tmp_path):
    with living(tmp_path, keep=0) as (_, team):
        at_round(team, 14)
    _, path = damage_result(tmp_path / "B", 7)
    with living(tmp_path, life=2, keep=0) as (_, team):
        (trouble,) = team[1].told
        assert trouble[0] == "damaged" and f"{path.name}, round 7: the bytes of a result" in trouble[1]
        assert team[1].restored.state.head.round >= 13  # the snapshot of round 10 needs no round 7
        wait_for(lambda: any(note.kind == "mended" for note in team[1].notes), team)
    chain = Journal.read(tmp_path / "B").chain(DIGEST)
    assert [entry.round for entry in chain[:13]] == list(range(1, 14))


def test_a_log_is_not_mended_by_more_than_a_whole_state(tmp_path):
    """Eight results are more than two vectors."""
    with living(tmp_path, keep=0) as (_, team):
        wait_for(lambda: all(island.state.updates > 12 for island in team), team)
    journal = Journal.read(tmp_path / "B")
    hurt = [place for _, place in zip(range(8), journal.payloads.values(), strict=False)]
    for place in hurt:
        damage(place.path, place.offset)
    with living(tmp_path, life=2, keep=0) as (_, team):
        wait_for(lambda: any(note.kind == "not mended" for note in team[1].notes), team)
    assert len(Journal.read(tmp_path / "B").troubles) == len(hurt)


def test_a_peer_that_has_lost_a_late_result_gives_its_whole_state(tmp_path):
    """After a restart its last results are on its disk, not in its memory."""
    with living(tmp_path, ("A",)) as (_, (island,)):
        at_round([island], 8)
    kept = Kept("A", MemoryNetwork(), tmp_path, 2)
    try:
        assert kept.driver.log.after(DIGEST) is not None
        hurt, _ = damage_result(tmp_path / "A", 6)
        assert kept.driver.library.get(f"payload/{hurt.payload}") is None
        assert kept.driver.log.after(DIGEST) is None
        assert kept.driver.log.after(hurt.digest)[0].round == 7
    finally:
        kept.driver.close()
        kept.store.close()


def test_a_record_that_is_damaged_after_the_last_snapshot_comes_from_peers(tmp_path):
    with living(tmp_path) as (_, team):
        at_round(team, 8)
    damage_result(tmp_path / "B", 5)
    with living(tmp_path, life=2) as (_, team):
        assert team[1].restored.state.head.round == 4
        at_round(team, 12)
        stand_still(team)
        assert_agreed(team)


def test_a_damaged_snapshot_is_set_aside_and_the_older_one_gives_the_same(tmp_path):
    with living(tmp_path, ("A",)) as (_, (island,)):
        at_round([island], 14)
        stand_still([island])
        digest = island.driver.replica.digest()
    newest = manifests(tmp_path / "A")[-1][1]
    damage(newest / "momentum-00000.safetensors", 5000)
    with living(tmp_path, ("A",), life=2) as (_, (island,)):
        assert [what for what, _ in island.told] == ["damaged"]
        assert str(newest / "momentum-00000.safetensors") in island.told[0][1]
        assert island.restored.memory is not None
        assert newest not in snapshots(tmp_path / "A")
        assert vectors_digest(island.restored.vectors) == digest


def test_snapshots_of_all_islands_are_the_same_files(tmp_path):
    with living(tmp_path, keep=0) as (_, team):
        at_round(team, 13)
    files = [
        {(path.name, file.name): file.read_bytes() for path in snapshots(tmp_path / name) for file in path.iterdir()}
        for name in NAMES
    ]
    common = set(files[0]) & set(files[1]) & set(files[2])
    assert len({key[0] for key in common}) >= 2
    assert all(one[key] == files[0][key] for one in files for key in common)


def test_a_result_that_was_held_when_everything_stopped_is_the_one_that_is_committed(tmp_path):
    """It may have been committed by one whose disk is lost: nothing else can be proposed in its place."""
    store = DiskStore(tmp_path / "A", lambda what, text: None)
    begun = SMALL.beginning(NAMES)
    state = begun.state
    offer = Offer(0, 0, 1, 100, (), incarnation=7)
    contributions = (Contribution("B", offer, 100),)
    settings, step = SMALL.options.decide(state, 0, contributions)
    proposal = Proposal(state.key, 0, contributions, NAMES, (), (), settings, step)
    payload = CODECS[SMALL.codec].encode(torch.ones(SMALL.count), NoiseKey(1, 0, "result"))
    record, ballot = Record(proposal, hashlib.sha256(payload.numpy()).hexdigest()), Ballot(3, "B", 0)
    store.begin(DIGEST, state.head.digest, 0, known=False)
    applier = Applier(SMALL.run, state, begun.vectors, store, lambda state, digest: None)
    applier.hold(record.payload, payload)
    store.remember(encode(Memory((Vow(state.head, ballot, Held(ballot, record)),), 3)))
    store.close()
    with living(tmp_path, life=2) as (_, team):  # the disks of the others are empty
        at_round(team, 2)
        assert team[0].restored.memory.vows[0].held.record == record
        assert {island.driver.records[0].digest for island in team} == {record.digest}


def test_a_result_of_a_round_long_past_is_not_called_lost(log):
    """The log keeps the last rounds only, and what was promised before them is still remembered."""
    folder, _ = log
    journal = Journal.read(folder)
    (kept, end), *_ = ((point.kept, point.end.head) for point in points_of(folder, journal))
    run = RunContext(b"", kept.genesis, Fragments(kept.fragments), apply_record)
    for behind, expected in ((5, []), (0, ["result lost"])):
        head, ballot, told = end._replace(round=end.round - behind), Ballot(3, "B", 0), []
        record = Record(Proposal(Key(head.round + 1, head.digest), -1, (), NAMES, (), (), Settings(), 0), "ab" * 32)
        journal.memory = encode(Memory((Vow(head, ballot, Held(ballot, record)),), 3))
        found = restore(folder, journal, run, lambda what, text, told=told: told.append(what))
        assert told == expected and found is not None and found.memory.vows[0].held is None


class Gate(Store):
    """A disk that takes its time."""

    def __init__(self) -> None:
        self.open, self.waiting = True, []

    def then(self, act: Callable[[], None]) -> None:
        if self.open and not self.waiting:
            act()
        else:
            self.waiting.append(act)

    def release(self) -> None:
        self.open = True
        while self.waiting:
            self.waiting.pop(0)()


def two_islands(network: MemoryNetwork, second: Store) -> list[TestIsland]:
    stores = {"A": Store(), "B": second}
    return [TestIsland(network.transport(n), SMALL.beginning(("A", "B")), store=store) for n, store in stores.items()]


def test_nothing_is_said_before_it_is_durable_but_signs_of_life():
    network, gate, said = MemoryNetwork(), Gate(), []
    team = two_islands(network, gate)
    mailbox = team[1].driver.mailbox
    send, mailbox.send = mailbox.send, lambda to, message: (said.append(type(message)), send(to, message))
    with training(team):
        at_round(team, 3)
        assert {Promise, Ready, Done} <= set(said)
        gate.open = False
        wait_for(lambda: len(gate.waiting) > 1, team)
        said.clear()
        wait_for(lambda: len(said) > 5, team)
        assert set(said) == {Heartbeat}
        gate.release()
        at_round(team, max(island.state.head.round for island in team) + 3)


def test_who_leaves_waits_until_its_goodbye_may_be_said():
    network, gate, said, at_the_end = MemoryNetwork(), Gate(), [], []
    team = two_islands(network, gate)
    driver = team[1].driver
    send, driver.mailbox.send = driver.mailbox.send, lambda to, message: (said.append(type(message)), send(to, message))

    def leave() -> None:
        driver.leave(timeout_s=30)
        at_the_end.append(Goodbye in said)

    leaving = threading.Thread(target=leave)
    with training(team):
        at_round(team, 2)
        stand_still(team)
        gate.open = False
        leaving.start()
        wait_for(lambda: any(isinstance(getattr(act, "args", [0])[-1], Goodbye) for act in gate.waiting), team)
        leaving.join(0.2)  # were it not to wait, it would be over
        gate.release()
        leaving.join(30)
        assert at_the_end == [True]


@contextmanager
def island_alone(tmp_path: Path, name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    ticket, folder = (str(tmp_path / "run" / file) for file in ("ticket", name))
    with started("join", ticket, "--name", name, "--dir", folder, *words, stderr=subprocess.STDOUT) as process:
        yield process


def joined(tmp_path: Path, name: str) -> list[str]:
    events = events_of(tmp_path, name)
    own = [event for event in events if event["event"] == "elastic" and event["island"] == name]
    return [event["text"] for event in own if event["what"] == "joined"]


@pytest.mark.soak
def test_a_run_whose_islands_were_all_killed_goes_on_from_their_disks_in_any_order(tmp_path):
    """With the old ticket, whose addresses nobody has listened to meanwhile."""
    own = ("--set", "island.batch=8", "--set", "island.device=cpu")
    with islands(tmp_path, "inner.steps=100") as process:
        assert wait_until(lambda: len(rounds_with(tmp_path, "island-1", "island-2")) > 3)
        for pid in pids(tmp_path).values():
            os.kill(pid, signal.SIGKILL)
        process.kill()
    committed = max(rounds_with(tmp_path, name, name)[-1] for name in ("island-1", "island-2"))
    assert wait_until(lambda: processes_at(tmp_path) == [])
    with island_alone(tmp_path, "island-2", *own) as second:
        assert wait_until(lambda: joined(tmp_path, "island-2")[-1].endswith("from its own disk"))
        with island_alone(tmp_path, "island-1", *own) as first:
            for process in (first, second):
                out, _ = process.communicate(timeout=120)
                assert process.returncode == 0, out
    found = [int(joined(tmp_path, name)[-1].split()[3]) for name in ("island-1", "island-2")]
    assert max(found) >= committed
    assert last_agreed(tmp_path, "island-1") == last_agreed(tmp_path, "island-2")
    rounds = [event for event in events_of(tmp_path, "island-1") if event["event"] == "round"]
    assert rounds[-1]["step"] == 100
    digests = {event["round"]: event["digest"] for event in rounds}
    assert len({(event["round"], event["digest"]) for event in rounds}) == len(digests)  # one branch
