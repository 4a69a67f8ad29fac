"""A version of the outer state that others read while updates go on: none of it is copied that nobody changes."""

import hashlib
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diloco.checkpoint.log.library import Library
from diloco.checkpoint.log.pinned import PinnedState
from diloco.checkpoint.log.replica import Replica, vector_name, vectors_digest
from diloco.checkpoint.log.snapshot import SnapshotContents, read_manifest, read_vectors, write_snapshot

LEAF, COUNT = 4, 18  # values: the last leaf is short


def replica_of(folder: Path | None) -> Replica:
    vectors = {"momentum": torch.arange(COUNT, dtype=torch.float32), "parameters": torch.ones(COUNT)}
    return Replica(vectors, Library(), "v0", b"meta", folder=folder, leaf=LEAF)


def add_one(replica: Replica, *ranges: tuple[int, int]) -> None:
    def change(vectors):
        for vector in vectors.values():
            for lo, hi in ranges:
                vector[lo:hi] += 1

    replica.apply(change, "v1", b"", ranges)


def bytes_of(state: PinnedState) -> dict[str, bytes]:
    return {name: state.read(name, 0, size) for name, size in state.sizes.items()}


def test_a_pinned_version_stays_as_it_was_whatever_is_applied(tmp_path):
    replica = replica_of(tmp_path)
    then = {name: vector.clone() for name, vector in replica.vectors.items()}
    state = replica.pin_now()
    add_one(replica, (1, 3), (15, 18))
    first = bytes_of(state)
    add_one(replica, (0, COUNT))
    assert first == bytes_of(state) == {name: vector.numpy().tobytes() for name, vector in then.items()}
    assert state.digest() == vectors_digest(then) != replica.digest() == vectors_digest(replica.vectors)
    assert state.read("momentum", 3, 30) == then["momentum"].numpy().tobytes()[3:30]  # across leaves
    assert list(tmp_path.iterdir()) == []  # what was kept has no name: a crash leaves nothing
    state.release()
    with pytest.raises(OSError, match="released"):
        state.read("momentum", 0, 4)


def test_only_what_updates_overtake_is_kept(tmp_path, monkeypatch):
    replica, kept = replica_of(tmp_path), list[int]()
    state, once = replica.pin_now(), replica.pin_now(once=True)
    parts = once.parts("parameters")
    read = [next(parts), next(parts)]
    monkeypatch.setattr("diloco.checkpoint.log.pinned.os.pwrite", lambda file, raw, at: kept.append(at) or len(raw))
    add_one(replica, (5, 6))
    assert sorted(kept) == [16, 16, 72 + 16]  # leaf 1 of both vectors; of the one that is read once, what is to come
    assert len(b"".join(read)) == 4 * 2 * LEAF
    add_one(replica, (5, 6))
    assert len(kept) == 3
    state.release()
    once.release()


def test_a_snapshot_is_that_of_its_version_while_updates_go_on(tmp_path):
    replica = replica_of(tmp_path)
    then = {name: vector.clone() for name, vector in replica.vectors.items()}
    contents = SnapshotContents(1, "ab" * 32, (1,), {}, replica.pin_now(once=True))
    path = write_snapshot(tmp_path, contents, shard_values=7, rest=lambda: add_one(replica, (0, COUNT)))
    manifest = read_manifest(path)
    assert manifest.state == vectors_digest(then)
    assert all(torch.equal(vector, then[name]) for name, vector in read_vectors(path, manifest).items())
    assert replica.vectors["parameters"][0] > 5  # it went on all the time


def test_a_disk_that_refuses_fails_readers_and_no_update(tmp_path):
    replica = replica_of(tmp_path / "missing")
    state = replica.pin_now()
    add_one(replica, (0, 1))
    assert replica.vectors["parameters"][0] == 2
    with pytest.raises(OSError, match="missing"):
        state.read("parameters", 0, 4)


def test_a_version_that_the_disk_refused_is_offered_no_longer_and_others_are(tmp_path):
    (tmp_path / "there").mkdir()
    replica = replica_of(tmp_path / "there")
    assert replica.pin("v0") == b"meta"
    shutil.rmtree(tmp_path / "there")
    add_one(replica, (0, 1))
    assert replica.pin("v0") is None, "whoever began with it begins anew"
    assert replica.pin("v1") == b"" and replica.library.held(vector_name("v0", "parameters")) is None


def test_a_disk_with_less_room_than_the_state_is_left_to_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=1, f_frsize=8 * COUNT - 1))
    replica = replica_of(tmp_path)
    state = replica.pin_now()
    add_one(replica, (0, 1))
    assert state.failed and not any(tmp_path.iterdir())


def test_peers_get_the_version_that_they_began_with(tmp_path):
    replica = replica_of(tmp_path)
    then = replica.digest()
    assert replica.pin() == b"meta"
    item = replica.library.held(vector_name("v0", "parameters"))
    add_one(replica, (0, COUNT))
    manifest = item.description()
    assert hashlib.sha256(item.chunk(0)).digest() == manifest.digests[0]
    assert bytes(item.data) == torch.ones(COUNT).numpy().tobytes()
    assert replica.pinned_digest("v0") == then and replica.pinned_digest("v1") is None
    assert replica.pin("v1") == b"" and replica.pin("v2") is None


def test_a_digest_waits_for_no_update_and_no_update_for_it(tmp_path):
    """An update comes while the digest is worked out, which is that of the state before."""
    replica = replica_of(tmp_path)
    then, state = replica.digest(), replica.pin_now(once=True)
    reached, go_on, found = threading.Event(), threading.Event(), list[str]()

    def rest() -> None:
        reached.set()
        assert go_on.wait(20)

    thread = threading.Thread(target=lambda: found.append(state.digest(rest)))
    thread.start()
    assert reached.wait(20)
    add_one(replica, (0, COUNT))  # it would wait for ever
    go_on.set()
    thread.join()
    assert found == [then]
