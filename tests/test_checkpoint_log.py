"""`diloco log`: rounds as a table, every byte verified, the state of any round brought back."""

import fcntl
import json
import shutil
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from logs import ROUNDS
from safetensors.torch import load_file

from diloco.checkpoint.log.journal import NOTHING, Journal, Kind, record_frame
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.segments import Ahead, SegmentWriter
from diloco.checkpoint.log.snapshot import SnapshotContents, manifests, read_vectors, write_snapshot
from diloco.errors import SaveError
from diloco.history.find import find_logs
from diloco.history.log import headers, newest_state, state_of, verify
from diloco.run.folder import LOCK


def test_rounds_are_listed_and_the_state_of_each_comes_back(log):
    folder, digests = log
    found = headers(folder)
    assert [(row.round, row.fragment, row.step, row.tokens, row.total_tokens) for row in found] == [
        (number, 0, number, 100, 100 * number) for number in range(1, ROUNDS + 1)
    ]
    assert all([part.island for part in row.contributions] == ["A"] and row.size > 1000 for row in found)
    for number, digest in enumerate(digests):
        state, vectors = state_of(folder, number)
        assert (state.head.round, vectors_digest(vectors)) == (number, digest)
    with pytest.raises(SaveError, match="does not lead to round 9: it covers rounds 0 to 8"):
        state_of(folder, 9)


def test_rounds_that_were_removed_are_not_called_damaged(log):
    folder, _ = log
    for path in sorted(folder.glob("snapshot-*"))[:-1]:
        shutil.rmtree(path)
    with pytest.raises(SaveError, match="earlier ones were removed"):
        state_of(folder, 0)


def test_a_whole_log_is_verified(log):
    folder, _ = log
    found = verify(folder)
    assert found.problems == ()
    assert (found.first, found.last, found.snapshots) == (0, ROUNDS, 3)
    assert found.digests == ROUNDS


def test_a_result_that_is_coming_is_damage_only_if_nobody_trains_there(log):
    folder, _ = log
    writer = SegmentWriter(folder)
    writer.write_ahead(Ahead(), 0, b"the first part of a result", len(NOTHING))
    with (folder.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert verify(folder).problems == ()
    assert any("torn" in problem for problem in verify(folder).problems)
    writer.close()
    assert verify(folder).problems == ()


def test_a_snapshot_of_another_state_does_not_pass(log):
    """Whole by its digests, but not what the log leads to."""
    folder, _ = log
    manifest, path = manifests(folder)[1]
    vectors = read_vectors(path, manifest)
    vectors["parameters"][0] += 1
    shutil.rmtree(path)
    write_snapshot(folder, SnapshotContents(manifest.round, manifest.version, manifest.order, manifest.meta, vectors))
    problems = verify(folder).problems
    assert problems and all("it gives another state than there was" in problem for problem in problems)


def test_a_round_becomes_a_model(log, command, tmp_path):
    folder, digests = log
    run = folder.parent
    listed = json.loads(command("log", run, "--json").out)
    assert [row["round"] for row in listed] == list(range(1, ROUNDS + 1))
    assert "whole: 3 snapshots, rounds 0 to 8 replayed" in command("log", run, "--verify").out
    out = tmp_path / "round-5"
    assert f"round 5 is in {out}" in command("log", run, "--checkout", 5, out).out
    vectors = load_file(out / "save-00000005" / "outer.safetensors")
    assert vectors_digest(vectors) == digests[5]
    assert command("export", out, tmp_path / "exported").code == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert any(torch.equal(tensor.flatten()[:8], vectors["parameters"][:8]) for tensor in exported.values())
    assert command("sample", out, "def", "--tokens", 3, "--device", "cpu").code == 0
    for taken in (out, out / "save-00000005" / "facts.json"):
        assert "already exists" in command.refused("log", run, "--checkout", 5, taken)


def test_damage_ends_with_1_and_is_named(log, command):
    folder, _ = log
    path = folder / "log-00000001.seg"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    said = command("log", folder.parent, "--verify")
    assert said.code == 1 and "NOT whole" in said.out and "log-00000001.seg, round" in said.out
    assert command("log", folder.parent, "--verify", "--json").code == 1


@pytest.mark.parametrize("header", [b'{"of": "another time"}', None])
def test_a_record_at_the_end_that_cannot_be_read_is_named(log, command, header):
    """Its frame is whole, so only decoding finds it: garbage, and another record than its digest says."""
    folder, _ = log
    last = Journal.read(folder).leading_to(newest_state(folder).head.digest)[-1]
    wrong = replace(last, round=9, digest="f" * 64, parent=last.digest, header=header or last.header, payload=NOTHING)
    with closing(SegmentWriter(folder)) as segment:
        segment.write(Kind.RECORD, record_frame(wrong), wrong.header)
    said = command("log", folder.parent, "--verify")
    assert said.code == 1 and "NOT whole" in said.out and "the record of round 9" in said.out


def test_a_run_without_a_log_is_refused(tmp_path, command):
    with pytest.raises(SaveError, match="no log there"):
        find_logs(str(tmp_path))
    assert "no log there" in command.refused("log", tmp_path)
