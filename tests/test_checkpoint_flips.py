"""Every byte of a log and its snapshots counts: whichever is another one, `diloco log --verify` names its file, and so
does an island that starts."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from logs import write_log

from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import Journal
from diloco.checkpoint.log.segments import segment_paths
from diloco.checkpoint.log.snapshot import read_manifest, read_vectors, snapshots
from diloco.elastic.runtime.applier import RunContext
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import restore
from diloco.errors import SnapshotDamaged
from diloco.history.log import verify
from diloco.island.layout import Layout
from diloco.run.genesis import FILE, Genesis, read_genesis
from diloco.simulate.virtual.world import owner
from diloco.train.outer import apply_record

VALUES, ROUNDS = 20, 3
VERIFIED = int(os.environ.get("DILOCO_FLIPS_VERIFIED", "13"))  # each so-manieth byte is verified, too; 1: all


@pytest.fixture
def log(small, tmp_path) -> tuple[Path, RunContext]:
    """With a snapshot before the first round and after the second."""
    genesis, folder = Genesis.of(small(), Layout(("w",), ((VALUES,),)), None, "A").signed(owner()), tmp_path / "log"
    run = RunContext(genesis.raw, genesis.digest, Fragments.whole(VALUES), apply_record, 2)
    write_log(folder, genesis, run, {"parameters": torch.randn(VALUES), "momentum": torch.zeros(VALUES)}, ROUNDS)
    return folder, run


def flips(file: Path, positions: Iterable[int], random: Random) -> Iterator[int]:
    """One byte after the other is another one."""
    raw = file.read_bytes()
    for position in positions:
        changed = raw[position] ^ random.randrange(1, 256)
        file.write_bytes(raw[:position] + bytes([changed]) + raw[position + 1 :])
        yield position
    file.write_bytes(raw)


def test_every_changed_byte_is_found_by_verify_and_at_load_and_its_file_named(log, monkeypatch):
    """All of a manifest, a segment and the genesis; some of the vectors."""
    monkeypatch.setattr("diloco.history.log.WRITING_S", 0.0)
    folder, _ = log
    random, newest, (segment, *_) = Random(11), snapshots(folder)[-1], segment_paths(folder)
    shards = sorted(folder.glob("snapshot-*/*.safetensors"))
    assert verify(folder).problems == () and len(shards) == 4
    for file in (newest / "manifest.json", segment, folder / FILE, *shards):
        size = file.stat().st_size
        for position in flips(file, random.sample(range(size), 12) if file in shards else range(size), random):
            assert named_at_load(file, folder), (file, position)
            if position % VERIFIED == 0:
                assert any(file.name in problem for problem in verify(folder).problems), (file, position)
    assert verify(folder).problems == ()


def named_at_load(file: Path, folder: Path) -> bool:
    """Nothing is cut off or set aside by only reading it."""
    if file.name == FILE:
        return read_genesis(folder) is None
    if file.suffix == ".seg":
        (trouble,) = Journal.read(folder).troubles
        return trouble.path == file and str(trouble).startswith(file.name) and "damaged" in str(trouble)
    try:
        read_vectors(file.parent, read_manifest(file.parent))
    except SnapshotDamaged as damaged:
        return file.name in str(damaged)
    return False


def test_an_island_that_starts_tells_which_files_are_damaged(log):
    folder, run = log
    newest, (segment, *_) = snapshots(folder)[-1], segment_paths(folder)
    told: list[str] = []
    for file in (newest / "manifest.json", segment):
        next(flips(file, [file.stat().st_size // 2], Random(3)))
    store = DiskStore(folder, lambda what, text: told.append(text), keep=0)
    restore(folder, store.journal, run, store.report)
    assert [any(name in text for text in told) for name in ("manifest.json", segment.name)] == [True, True]
