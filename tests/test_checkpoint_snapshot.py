"""Snapshots: the same bytes everywhere, all at once or not at all, every byte checked; and what is kept of them."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from alone import HERE
from conftest import read_events
from disks import fill, small_disk
from logs import BASE, chain, entry, frozen, opened, settle, take_snapshot, write
from safetensors.torch import load_file

from diloco.bench.team import Heard
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import Journal
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.segments import SegmentWriter, segment_paths
from diloco.checkpoint.log.snapshot import clean, manifests, read_manifest, read_vectors, snapshots, write_snapshot
from diloco.checkpoint.save.facts import saves
from diloco.errors import SnapshotDamaged
from diloco.report.events import Note, of_kind
from diloco.report.sinks import Events, JsonLines
from diloco.run.join import alone
from diloco.train.trainer import Trainer


def test_a_snapshot_comes_back_bit_by_bit_whatever_the_size_of_its_files(tmp_path):
    state = frozen()
    for values in (7, 50, 1000):
        (tmp_path / str(values)).mkdir()
        path = write_snapshot(tmp_path / str(values), state, shard_values=values)
        manifest = read_manifest(path)
        vectors = read_vectors(path, manifest)
        assert all(torch.equal(vectors[name], state.vectors[name]) for name in state.vectors)
        assert (manifest.round, manifest.version, manifest.meta) == (20, "c" * 64, state.meta)
        assert manifest.state == vectors_digest(state.vectors)
        assert len(list(path.glob("*.safetensors"))) == 2 * -(-50 // values)
        loaded = load_file(path / "parameters-00000.safetensors")  # as any reader of them does
        assert torch.equal(loaded["parameters"], state.vectors["parameters"][:values])


def test_any_changed_byte_is_found_and_its_file_named(tmp_path):
    path = write_snapshot(tmp_path, frozen(count=20))
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for position in range(len(raw)):
            file.write_bytes(raw[:position] + bytes([raw[position] ^ 0x04]) + raw[position + 1 :])
            with pytest.raises(SnapshotDamaged, match=file.name):
                read_vectors(path, read_manifest(path))
        for wrong in (raw[:-1], raw + b"\0", b""):
            file.write_bytes(wrong)
            with pytest.raises(SnapshotDamaged, match=file.name):
                read_vectors(path, read_manifest(path))
        file.write_bytes(raw)
    read_vectors(path, read_manifest(path))


def test_a_missing_file_is_named(tmp_path):
    path = write_snapshot(tmp_path, frozen())
    (path / "momentum-00000.safetensors").unlink()
    with pytest.raises(SnapshotDamaged, match=r"momentum-00000.safetensors cannot be read \(No such file"):
        read_vectors(path, read_manifest(path))


def test_a_manifest_written_in_another_way_is_not_believed(tmp_path):
    path = write_snapshot(tmp_path, frozen()) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    with pytest.raises(SnapshotDamaged, match="its digest does not fit"):
        read_manifest(path.parent)


def test_what_a_dying_writer_left_is_no_snapshot_and_goes_away(tmp_path):
    path = write_snapshot(tmp_path, frozen())
    half = tmp_path / "snapshot-00000040-dddddddd.part"
    half.mkdir()
    gone = tmp_path / "snapshot-00000001-eeeeeeee.gone"
    gone.mkdir()
    assert snapshots(tmp_path) == [path]
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def follow(store: DiskStore, count: int) -> list[str]:
    """Every third record has a snapshot."""
    heads = []
    for number, (record, payload) in enumerate(chain(count), start=1):
        write(store, [(record, payload)], rotate=number % 3 == 0)
        heads.append(record.digest)
        if number % 3 == 0:
            take_snapshot(store, number, record.digest)
    return heads


@pytest.mark.parametrize("keep", [1, 2, 0])
def test_the_last_snapshots_stay_with_the_log_since_the_oldest_of_them(tmp_path, keep):
    store, told = opened(tmp_path, keep=keep)
    take_snapshot(store, 0, BASE)
    heads = follow(store, 14)
    store.close()
    rounds = [manifest.round for manifest, _ in manifests(tmp_path)]
    assert rounds == {1: [12], 2: [9, 12], 0: [0, 3, 6, 9, 12]}[keep]
    journal = Journal.read(tmp_path)
    for manifest, _ in manifests(tmp_path):
        assert [entry.digest for entry in journal.chain(manifest.version)] == heads[manifest.round :]
    assert (journal.chain(BASE) == []) == (keep > 0)
    assert told == []


def test_a_snapshot_of_a_heavier_branch_is_newer_whatever_its_round(tmp_path):
    store, _ = opened(tmp_path)
    take_snapshot(store, 0, BASE, (0, 0))
    take_snapshot(store, 9, "a" * 64, (100, 9))
    store.follow("b" * 64, 7)
    take_snapshot(store, 7, "b" * 64, (200, 7))
    store.close()
    assert [manifest.round for manifest, _ in manifests(tmp_path)] == [9, 7]


def test_after_a_move_to_another_branch_nothing_is_durable_before_its_snapshot(tmp_path):
    store, _ = opened(tmp_path)
    take_snapshot(store, 0, BASE)
    write(store, chain(2))
    store.follow("b" * 64, 7)
    settle(store)
    assert store.durable == 2 and store.wants_snapshot
    take_snapshot(store, 7, "b" * 64)
    settle(store)
    assert store.durable == 7 and not store.wants_snapshot
    store.close()


def listening(store: DiskStore) -> list[str]:
    heads: list[str] = []
    store.on_durable = heads.append
    return heads


def test_a_head_is_told_of_after_the_sync(tmp_path, monkeypatch):
    (record, payload), synced = chain(1)[0], []
    store, _ = opened(tmp_path)
    sync = SegmentWriter.sync
    monkeypatch.setattr(SegmentWriter, "sync", lambda self: (sync(self), synced.append(True)))
    take_snapshot(store, 0, BASE)
    settle(store)
    synced.clear()
    told: list[tuple[str, int]] = []
    store.on_durable = lambda version: told.append((version, len(synced)))
    write(store, [(record, payload)])
    settle(store)
    assert told and told[-1][0] == record.digest and all(syncs for version, syncs in told if version == record.digest)
    store.close()


def test_a_head_that_was_moved_to_is_told_of_after_its_snapshot(tmp_path):
    store, _ = opened(tmp_path)
    take_snapshot(store, 0, BASE)
    settle(store)
    heads = listening(store)
    store.follow("b" * 64, 7)
    store.await_durable("b" * 64)
    settle(store)
    assert "b" * 64 not in heads
    take_snapshot(store, 7, "b" * 64)
    settle(store)
    assert heads[-1] == "b" * 64
    store.close()


def test_whoever_asks_when_a_head_is_durable_already_is_told_at_once(tmp_path):
    """The writer may be quicker than whoever handed the record in."""
    ((record, payload),) = chain(1)
    store, _ = opened(tmp_path)
    write(store, [(record, payload)])
    settle(store)
    heads = listening(store)
    store.await_durable("b" * 64)
    assert heads == []
    store.await_durable(record.digest)
    assert heads == [record.digest]
    store.close()


def test_nobody_waits_for_a_disk_that_refuses(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        store, _ = opened(folder / "outer")
        take_snapshot(store, 0, BASE)
        settle(store)
        heads = listening(store)
        fill(folder)
        for record, payload in chain(2):
            write(store, [(record, payload * 100)])
            settle(store)
            assert heads[-1] == record.digest and store.durable == 0
        store.close()


def test_a_gap_that_a_move_has_made_is_no_damage(tmp_path):
    """Neither before the snapshot of the other branch, nor when only a later one was written, nor after a restart."""
    store, _ = opened(tmp_path)
    take_snapshot(store, 0, BASE)
    write(store, chain(2))
    store.follow("b" * 64, 7)
    after = [(entry(8, "b" * 64, b"eight"), b"eight")]
    after.append((entry(9, after[0][0].digest, b"nine"), b"nine"))
    write(store, after[:1])
    settle(store)
    assert store.broken_after() is None
    take_snapshot(store, 8, after[0][0].digest)
    write(store, after[1:])
    settle(store)
    assert store.broken_after() is None
    store.close()
    store, _ = opened(tmp_path, after[1][0].digest, 9)
    assert [entry.round for entry in store.entries()] == [8, 9] and store.broken_after() is None
    store.close()


def test_a_record_that_is_being_written_is_no_damage(tmp_path):
    store, _ = opened(tmp_path)
    take_snapshot(store, 0, BASE)
    written = threading.Event()
    write(store, chain(2000))
    store.then(written.set)
    while not written.is_set():
        assert store.broken_after() is None
    store.close()


@pytest.mark.parametrize("part", ["payload 5", "record 5 after"])
def test_damage_after_such_a_gap_is_found_where_it_is(tmp_path, part):
    store, _ = opened(tmp_path, keep=0)
    take_snapshot(store, 0, BASE)
    before, records = chain(2, word="another branch"), chain(9)
    write(store, before)
    store.follow(records[2][0].digest, 3)
    settle(store)
    take_snapshot(store, 3, records[2][0].digest)
    write(store, records[3:7])
    settle(store)
    take_snapshot(store, 7, records[6][0].digest)
    write(store, records[7:])
    store.close()
    for path in segment_paths(tmp_path):
        path.write_bytes(path.read_bytes().replace(part.encode(), part.upper().encode(), 1))
    store, told = opened(tmp_path, records[8][0].digest, 9)
    assert [what for what, _ in told] == ["damaged"]
    assert store.broken_after() == records[3][0].digest
    store.put(records[4][0].payload, records[4][1])
    store.mend(records[4][0])
    settle(store)
    assert store.broken_after() is None
    store.close()


def test_a_full_disk_is_told_of_and_durability_comes_back_with_space(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.checkpoint.log.diskstore.RETRY_S", 0.0)
    with small_disk(tmp_path / "disk") as folder:
        store, told = opened(folder / "outer")
        take_snapshot(store, 0, BASE)
        records = chain(12)
        write(store, records[:3])
        settle(store)
        ballast, done = fill(folder), []
        for record, payload in records[3:6]:
            write(store, [(record, payload * 100)])
            store.then(lambda: done.append(store.durable))
            settle(store)
        assert done == [3, 3, 3]  # it goes on, and is not called durable
        assert [what for what, _ in told] == ["not durable"]
        assert "(No space left on device)" in told[0][1]
        assert "would lose what this island did after round 3" in told[0][1]
        take_snapshot(store, 6, records[5][0].digest)
        assert [manifest.round for manifest, _ in manifests(folder / "outer")] == [0]
        ballast.unlink()
        write(store, records[6:8])
        settle(store)
        assert store.durable == 3 and store.wants_snapshot  # rounds 4 to 6 are missing
        take_snapshot(store, 8, records[7][0].digest)
        write(store, records[8:])
        store.close()
        assert store.durable == 12
        assert [what for what, _ in told] == ["not durable", "durable again"]
        again = Journal.read(folder / "outer")
        assert again.troubles == []
        assert [entry.round for entry in again.chain(BASE)] == [1, 2, 3]
        assert [entry.round for entry in again.chain(records[7][0].digest)] == [9, 10, 11, 12]


def test_a_folder_that_cannot_be_written_is_told_of_and_used_again_when_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.checkpoint.log.diskstore.RETRY_S", 0.0)
    with small_disk(tmp_path / "disk") as folder:
        store, _ = opened(folder / "outer")
        take_snapshot(store, 0, BASE)
        records = chain(6)
        write(store, records[:3])
        store.close()
        assert os.system(f"mount -o remount,ro {folder}") == 0
        store, told = opened(folder / "outer", records[2][0].digest, 3)
        write(store, records[3:4])
        settle(store)
        assert [what for what, _ in told] == ["not durable"] and "(Read-only file system)" in told[0][1]
        assert os.system(f"mount -o remount,rw {folder}") == 0
        write(store, records[4:])
        settle(store)
        take_snapshot(store, 6, records[5][0].digest)
        store.close()
        assert [what for what, _ in told] == ["not durable", "durable again"] and store.durable == 6


def test_a_snapshot_that_does_not_fit_leaves_nothing_and_the_log_goes_on(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        store, told = opened(folder / "outer")
        take_snapshot(store, 0, BASE)
        record = chain(1)
        write(store, record)
        store.snapshot(frozen(1, record[0][0].digest, count=200_000))
        while not told:
            settle(store)
        store.close()
        assert [what for what, _ in told] == ["snapshot failed"] and store.durable == 1
        assert [path.name for path in (folder / "outer").glob("*.part")] == []


def test_segments_that_hold_the_log_since_an_old_snapshot_are_not_dropped(tmp_path):
    store, _ = opened(tmp_path, keep=1)
    take_snapshot(store, 0, BASE)
    records = chain(2)
    write(store, records[:1])  # not followed by a new segment
    take_snapshot(store, 1, records[0][0].digest)
    write(store, records[1:])
    store.close()
    assert [entry.round for entry in Journal.read(tmp_path).chain(records[0][0].digest)] == [2]
    assert len(segment_paths(tmp_path)) == 1


def test_a_full_disk_does_not_end_training_and_loses_events_by_number(tmp_path, small):
    with small_disk(tmp_path / "disk", "2m") as disk:
        config = small(inner={"steps": 20}, checkpoint={"dir": str(disk / "run"), "snapshot_every": 1})
        events, heard = Events([JsonLines(disk / "events.jsonl")]), Heard()
        events.attach(heard)
        trainer = Trainer(config, HERE, events)
        with alone(trainer):
            ballast = fill(disk)
            while trainer.step_count < 15:
                trainer.advance()
            trainer.saver.wait()
            ballast.unlink()
            trainer.run()
        notes = [event.text for event in of_kind(heard.events, Note)]
        assert len(notes) == 3 and all("No space left" in text for text in notes)
        told = read_events(disk / "events.jsonl")
        (lost,) = [event["events"] for event in told if event["event"] == "lost"]
        assert lost + len(told) - 1 == len(heard.events) and told[-1]["event"] == "agreed"
        assert len(saves(Path(config.dir))) == 1
