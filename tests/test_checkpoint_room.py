"""Where a download goes: a file that a restart finds again, and memory once the disk refuses."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from diloco.checkpoint.log.library import Library
from diloco.checkpoint.log.replica import Replica
from diloco.checkpoint.log.room import FileRoom, bytes_of, check_of, fill
from diloco.checkpoint.log.writing import PIECE

VALUES = torch.randn(2 * PIECE // 4 + 5)
DATA = bytes_of(VALUES)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Have the kernel refuse larger files to this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def written(room: FileRoom) -> FileRoom:
    for at in reversed(range(0, len(DATA), 1 << 20)):
        room[at : at + (1 << 20)] = DATA[at : at + (1 << 20)]
    return room


def is_right(room: FileRoom) -> bool:
    vector = torch.empty_like(VALUES)
    right = fill({"one": vector}, {"one": room}) == check_of({"one": bytes_of(VALUES)})
    return right and torch.equal(vector, VALUES) and room[3:17] == DATA[3:17]


def test_what_was_written_is_there_even_when_the_file_is_removed(tmp_path):
    path = tmp_path / "part"
    room = written(FileRoom(path, len(DATA)))
    assert len(room) == len(DATA) == path.stat().st_size
    assert is_right(FileRoom(path, len(DATA)))
    path.unlink()
    assert is_right(room)


def test_a_file_that_is_too_short_is_an_error_and_no_crash(tmp_path):
    room = FileRoom(tmp_path / "part", len(DATA))
    with pytest.raises(OSError, match="part is shorter"):
        room[20:40]
    assert is_right(written(room))
    (tmp_path / "part").write_bytes(b"")  # somebody cuts it: a mapping would end the process
    with pytest.raises(OSError, match="part is shorter"):
        is_right(room)


@pytest.mark.parametrize("limit", [0, len(DATA) // 2, len(DATA) - 10])
def test_a_disk_that_refuses_in_between_loses_nothing(tmp_path, limit, caplog):
    room = FileRoom(tmp_path / "part", len(DATA))
    half = 1 << 20
    room[:half] = DATA[:half]
    with files_up_to(limit):
        written(room)
    assert is_right(room) and len(caplog.messages) == 1


@pytest.mark.parametrize("path", ["missing/part", "/dev/full"])
def test_a_file_that_cannot_be_written_at_all_is_memory(tmp_path, path, caplog):
    assert is_right(written(FileRoom(tmp_path / path, len(DATA)))) and len(caplog.messages) == 1


def test_a_state_that_comes_back_with_other_bytes_is_not_taken_over(tmp_path):
    room = written(FileRoom(tmp_path / "part", len(DATA)))
    room[8:12] = memoryview(b"1234")
    replica = Replica({"parameters": torch.zeros_like(VALUES)}, Library(), "before", b"")
    with pytest.raises(OSError, match="with other bytes"):
        replica.replace({"parameters": room}, check_of({"parameters": bytes_of(VALUES)}), "after", b"")
    assert replica.version == "before"
    written(room)
    replica.replace({"parameters": room}, check_of({"parameters": bytes_of(VALUES)}), "after", b"")
    assert replica.version == "after" and torch.equal(replica.vectors["parameters"], VALUES)
