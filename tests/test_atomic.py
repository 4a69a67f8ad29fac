"""Files and folders that appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from diloco import atomic
from diloco.atomic import ASIDE, PART, appearing, create_file, publish, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path, durable):
    write_file(tmp_path / "ticket", b"one", durable=durable)
    write_file(tmp_path / "ticket", "two", durable=durable)
    assert (tmp_path / "ticket").read_text() == "two" and names(tmp_path) == ["ticket"]


def test_a_write_that_fails_changes_nothing_and_leaves_nothing(tmp_path):
    write_file(tmp_path / "ticket", "one")
    with pytest.raises(OSError, match="No space left"), appearing(tmp_path / "ticket") as draft:
        draft.write_text("tw")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "ticket").read_text() == "one" and names(tmp_path) == ["ticket"]


def test_what_is_durable_is_synced_before_and_after_it_gets_its_name(tmp_path, monkeypatch):
    synced: list[tuple[bool, bool]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), (tmp_path / "genesis").exists()))
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    write_file(tmp_path / "genesis", b"one")
    assert synced == []
    (tmp_path / "genesis").unlink()
    write_file(tmp_path / "genesis", b"one", durable=True)
    assert synced == [(False, False), (True, True)]


def test_a_file_that_is_there_is_not_created_again(tmp_path):
    assert create_file(tmp_path / "key", b"one", mode=0o600, durable=True)
    assert not create_file(tmp_path / "key", b"two", mode=0o600)
    assert (tmp_path / "key").read_bytes() == b"one" and names(tmp_path) == ["key"]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_folder_takes_the_place_of_another(tmp_path):
    for content in ("one", "two"):
        with appearing(tmp_path / "out", durable=True) as draft:
            draft.mkdir()
            (draft / "model").write_text(content)
    assert (tmp_path / "out" / "model").read_text() == "two" and names(tmp_path) == ["out"]


def test_what_a_writer_left_when_it_died_is_cleared_away(tmp_path):
    (tmp_path / f".out{PART}" / "half").mkdir(parents=True)
    with appearing(tmp_path / "out") as draft:
        draft.mkdir()
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == []


def test_an_earlier_folder_comes_back_if_the_new_one_cannot_have_its_name(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").write_text("one")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / f"out{PART}", tmp_path / "out")
    assert (tmp_path / "out" / "model").read_text() == "one" and not (tmp_path / f"out{ASIDE}").exists()
