"""Frames in files, and the log that is made of them: cut at every byte, changed at every byte, refused by the disk."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from logs import BASE, chain, entry, opened, write

from diloco.checkpoint.log.journal import NOTHING, Journal
from diloco.checkpoint.log.segments import Ahead, SegmentWriter, read_body, scan, segment_paths

KINDS = [(2, b"a promise", b""), (3, b"name", b"payload " * 9), (4, b"{}", b"record"), (5, b"", b"")]


def write_frames(folder: Path) -> Path:
    writer = SegmentWriter(folder)
    for kind, head, body in KINDS:
        writer.write(kind, head, body)
    writer.close()
    return writer.path


def test_frames_come_back_as_they_were_written(tmp_path):
    found = scan(write_frames(tmp_path))
    assert [(frame.kind, frame.head, read_body(frame.body)) for frame in found.frames] == KINDS
    assert found.damages == [] and found.torn is None


@pytest.mark.parametrize("known", [0, 1, 40, 72])
def test_a_body_that_is_written_ahead_makes_the_same_file(tmp_path, known):
    whole = write_frames(tmp_path).read_bytes()
    writer, ahead = SegmentWriter(tmp_path), Ahead()
    for kind, head, body in KINDS:
        if body.startswith(b"payload"):
            for at in range(known):
                writer.write_ahead(ahead, at, body[at : at + 1], len(head))
                assert len(scan(writer.path).frames) == 1, "a torn tail until it is whole"
        writer.write(kind, head, body, ahead)
    writer.close()
    assert writer.path.read_bytes() == whole


def test_a_body_ahead_makes_way_for_another_frame_and_is_written_with_its_own(tmp_path):
    writer, ahead, other = SegmentWriter(tmp_path), Ahead(), Ahead()
    writer.write_ahead(ahead, 0, b"pay", 4)
    writer.write(2, b"a promise")
    assert writer.path.stat().st_size == writer.size
    writer.write_ahead(ahead, 3, b"load", 4)
    assert writer.path.stat().st_size == writer.size, "it is too late"
    writer.write(3, b"name", b"payload", ahead)
    writer.write_ahead(other, 0, b"of an attempt that failed", 4)
    writer.close()
    writer.write_ahead(other, 25, b"more", 4)
    found = scan(writer.path)
    assert [read_body(frame.body) for frame in found.frames] == [b"", b"payload"] and found.torn is None


def test_a_body_ahead_has_no_gap_where_a_part_could_not_be_written(tmp_path, monkeypatch):
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    writer, ahead, late = SegmentWriter(tmp_path), Ahead(), Ahead()
    writer.write_ahead(late, 3, b"what came before was never written", 4)
    assert writer.path.stat().st_size == 0
    writer.write_ahead(ahead, 0, b"pay", 4)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(os, "pwrite", full)
        writer.write_ahead(ahead, 3, b"lo", 4)
    writer.write_ahead(ahead, 5, b"ad", 4)
    writer.write(3, b"name", b"payload", ahead)
    writer.close()
    (found,) = scan(writer.path).frames
    assert read_body(found.body) == b"payload"


def test_a_file_cut_anywhere_gives_every_whole_frame_and_says_where_it_is_torn(tmp_path):
    path = write_frames(tmp_path)
    whole, ends = path.read_bytes(), [frame.end for frame in scan(path).frames]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = scan(path)
        assert [frame.end for frame in found.frames] == [end for end in ends if end <= length]
        assert found.torn == (None if length in (0, *ends) else max([0, *(end for end in ends if end <= length)]))
        assert found.damages == []


def test_a_changed_byte_costs_one_frame_and_hides_no_other(tmp_path):
    path = write_frames(tmp_path)
    whole, frames = path.read_bytes(), scan(path).frames
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
        found = scan(path)
        hit = next(number for number, frame in enumerate(frames) if position < frame.end)
        assert found.frames == frames[:hit] + frames[hit + 1 :]
        if hit == len(frames) - 1:  # nobody can tell it from a torn one
            assert found.torn == frames[hit].start and not found.damages
        else:
            assert [damage.offset for damage in found.damages] == [frames[hit].start] and found.torn is None


def test_a_body_that_changed_after_it_was_found_is_not_given(tmp_path):
    path = write_frames(tmp_path)
    place = scan(path).frames[1].body
    raw = bytearray(path.read_bytes())
    raw[place.offset] ^= 1
    path.write_bytes(raw)
    assert read_body(place) is None
    path.unlink()
    assert read_body(place) is None


def test_a_log_gives_back_records_results_promises_and_digests(tmp_path):
    records = chain(3)
    store, _ = opened(tmp_path)
    write(store, records)
    store.remember(b"first")
    store.remember(b"promise")
    store.record_digest(records[2][0].digest, "d" * 64)
    store.close()
    store, told = opened(tmp_path, records[2][0].digest, 3)
    assert store.journal.chain(BASE) == [record for record, _ in records]
    assert [store.journal.payload(record.payload) for record, _ in records] == [payload for _, payload in records]
    assert store.journal.memory == b"promise"
    assert store.journal.states == {records[2][0].digest: "d" * 64}
    assert told == [] and store.durable == 3
    store.close()


def test_records_without_a_result_need_no_bytes(tmp_path):
    store, _ = opened(tmp_path)
    store.append(entry(1, BASE))
    store.close()
    journal = Journal.read(tmp_path)
    assert len(journal.chain(BASE)) == 1 and journal.payload(NOTHING) == b""


def test_what_was_told_to_be_durable_is_there_whenever_the_writer_dies(tmp_path):
    """`then` runs when everything before it can be read back."""
    store, _ = opened(tmp_path / "log")
    seen = []

    def look(count: int) -> None:
        shutil.copytree(tmp_path / "log", tmp_path / "copy", dirs_exist_ok=True)
        seen.append((count, len(Journal.read(tmp_path / "copy").chain(BASE)), store.durable))

    for count, record in enumerate(chain(5), start=1):
        write(store, [record])
        store.then(lambda count=count: look(count))
    store.close()
    assert [count for count, _, _ in seen] == [1, 2, 3, 4, 5]
    assert all(found >= count and durable >= count for count, found, durable in seen)


def test_the_last_record_of_a_parent_counts(tmp_path):
    store, _ = opened(tmp_path)
    one, other = chain(3), chain(2, word="another branch")
    write(store, one)
    write(store, other)
    store.close()
    assert Journal.read(tmp_path).chain(BASE) == [record for record, _ in other]


def test_a_log_cut_anywhere_keeps_a_beginning_of_its_chain_and_goes_on(tmp_path):
    records = chain(3)
    store, _ = opened(tmp_path / "whole")
    write(store, records)
    store.close()
    (path,) = segment_paths(tmp_path / "whole")
    raw = path.read_bytes()
    for length in range(0, len(raw) + 1, 7):
        folder = tmp_path / f"cut-{length}"
        folder.mkdir()
        (folder / path.name).write_bytes(raw[:length])
        store, told = opened(folder)
        kept = store.journal.chain(BASE)
        assert kept == [record for record, _ in records[: len(kept)]]
        assert all("torn" in what and "bytes are torn" in text for what, text in told)
        write(store, records[len(kept) :])
        store.close()
        assert Journal.read(folder).chain(BASE) == [record for record, _ in records]
        assert Journal.read(folder).troubles == []  # it was cut off
        shutil.rmtree(folder)


@pytest.mark.parametrize("part", ["payload 2", "record 2 after"])
def test_a_damaged_record_in_the_middle_is_named_by_its_round_and_ends_the_chain(tmp_path, part):
    records = chain(4)
    store, _ = opened(tmp_path)
    write(store, records)
    store.close()
    (path,) = segment_paths(tmp_path)
    path.write_bytes(path.read_bytes().replace(part.encode(), part.upper().encode(), 1))
    store, told = opened(tmp_path, records[0][0].digest, 1)
    assert [(what, "round 2" in text) for what, text in told] == [("damaged", True)]
    assert store.journal.chain(BASE) == [records[0][0]]
    write(store, records[1:])  # as peers give it
    store.close()
    assert Journal.read(tmp_path).chain(BASE) == [record for record, _ in records]


def test_old_results_are_read_back_for_peers_and_checked(tmp_path):
    records = chain(2)
    store, _ = opened(tmp_path)
    write(store, records)
    store.close()
    (path,) = segment_paths(tmp_path)
    raw = path.read_bytes()
    store, told = opened(tmp_path, records[1][0].digest, 2)
    item = store.item(records[0][0].payload)
    assert bytes(item.data) == records[0][1] and item.sha256 == records[0][0].payload
    assert store.item("f" * 64) is None
    path.write_bytes(raw.replace(b"payload 2", b"PAYLOAD 2", 1))
    assert store.item(records[1][0].payload) is None and not store.has(records[1][0].payload)
    assert [what for what, _ in told] == ["damaged"]
    path.write_bytes(raw.replace(b"payload 1", b"PAYLOAD 1", 1))  # after its digests were taken
    with pytest.raises(OSError, match="other bytes"):
        item.chunk(0)
    path.write_bytes(raw[: raw.index(b"payload 1") + 3])
    with pytest.raises(OSError, match="shorter"):
        item.chunk(0)
    store.close()


def test_segments_are_cut_by_size_and_carry_the_last_promise(tmp_path):
    store, _ = opened(tmp_path, segment_bytes=500)
    store.remember(b"promise")
    write(store, chain(10))
    store.close()
    paths = segment_paths(tmp_path)
    assert len(paths) > 3
    for path in paths[:-1]:
        path.unlink()
    assert Journal.read(tmp_path).memory == b"promise"


def test_a_result_lies_in_the_segment_of_its_record(tmp_path):
    """However small segments are: whoever prunes one takes both or none."""
    store, _ = opened(tmp_path / "all", segment_bytes=1)
    write(store, chain(4))
    store.close()
    for number, path in enumerate(segment_paths(tmp_path / "all")):
        (tmp_path / str(number)).mkdir()
        path.rename(tmp_path / str(number) / path.name)
        journal = Journal.read(tmp_path / str(number))
        assert all(journal.has(entry.payload) for entry in journal.entries.values())
    assert number == 4  # each record its own, and one that was just begun
