"""Files as bytes: virtual concatenation, the standard library, folders of text."""

import hashlib
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.files import KEPT_OPEN, Files
from diloco.data.samples import Samples
from diloco.data.source import ByteFiles
from diloco.data.text import stdlib_source, text_source
from diloco.errors import DataError


def files_with(folder: Path, *contents: bytes) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@given(contents=st.lists(st.binary(max_size=9), min_size=1, max_size=9), data=st.data())
def test_files_read_as_one(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], data) -> None:
    whole = b"".join(contents)
    if not whole:
        return
    source = ByteFiles(files_with(tmp_path_factory.mktemp("f"), *contents), "some files")
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert len(source) == len(whole)
    assert source.read(start, stop).tobytes() == whole[start:stop]


def test_no_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mine has no data: 2 files, 0 bytes"):
        ByteFiles(files_with(tmp_path, b"", b""), "mine")
    with pytest.raises(DataError, match="0 files"):
        ByteFiles([], "mine")


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    one = ByteFiles(files_with(tmp_path / "a", b"hello ", b"world"), "a")
    same = ByteFiles(files_with(tmp_path / "b", b"hello", b" world"), "b")
    other = ByteFiles(files_with(tmp_path / "c", b"hello ", b"World"), "c")
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert len(bytes.fromhex(one.fingerprint())) == 32


@pytest.mark.parametrize("after", [b"short", b"longer than before"])
def test_a_file_that_changes_length_is_named(tmp_path: Path, after: bytes) -> None:
    paths = files_with(tmp_path, b"unchanged", b"a few bytes")
    source = ByteFiles(paths, "files")
    source.read(0, len(source))
    paths[1].write_bytes(after)
    assert source.read(0, 9).tobytes() == b"unchanged"
    with pytest.raises(DataError, match=r"1\.txt changed from 11 to"):
        source.read(9, 12)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    paths = files_with(tmp_path, b"here", b"gone")
    source = ByteFiles(paths, "files")
    paths[1].unlink()
    with pytest.raises(DataError, match=r"cannot read .*1\.txt: No such file"):
        source.read(0, 8)


def test_only_a_few_files_are_open_and_none_after_use(tmp_path: Path) -> None:
    before = open_descriptors()
    source = ByteFiles(files_with(tmp_path, *[b"x"] * 100), "many")
    source.read(0, 100)
    assert open_descriptors() == before + KEPT_OPEN
    del source
    assert open_descriptors() == before


def test_threads_do_not_close_each_others_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(files_with(tmp_path, b"a", b"b"), kept_open=1)
    inside, done, pread = Event(), Event(), os.pread

    def slow_pread(*arguments: int) -> bytes:
        inside.set()
        done.wait(0.1)  # time enough for the other thread to evict this file, if it may
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", slow_pread)
    other = Thread(target=lambda: inside.wait() and files.read(1, 0, 1) and done.set())
    other.start()
    assert files.read(0, 0, 1) == b"a"
    other.join()


def test_a_large_file_is_not_loaded(tmp_path: Path) -> None:
    for name, size in (("small.txt", 2**16), ("large.txt", 2**31)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
        tracemalloc.stop()  # what the first one imports does not count
        tracemalloc.start()
        source = text_source([tmp_path / name], "bytes", tmp_path)
        samples = Samples(source, sequence=256, seed=0, validation_fraction=0.01)
        assert samples.train(0, 16).sum() == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) == 2**31
    assert peak < 2**20


def test_the_standard_library_is_a_source() -> None:
    source = stdlib_source()
    text = source.read(0, len(source)).tobytes()
    assert len(source) > 5_000_000
    assert b"class ArgumentParser(_AttributeHolder, _ActionsContainer):" in text
    assert source.fingerprint() == stdlib_source().fingerprint()


def test_the_standard_library_is_its_own_files_in_mixed_order() -> None:
    paths = stdlib_source()._files.paths
    parts = {part for path in paths for part in path.parts}
    letters = [path.name[0] for path in paths]
    assert all(path.suffix == ".py" for path in paths)
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert not any(path.name.startswith("_sysconfigdata") for path in paths)
    assert len(set(letters[-len(letters) // 10 :])) > 10  # the last tenth is no alphabetical corner


def test_folders_are_read_at_any_depth_in_a_fixed_mixed_order(tmp_path: Path) -> None:
    for name in ["a.txt", "b/c.md", "b/d/e.py", "image.png", ".hidden.txt", ".git/config.txt", "records.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    expected = sorted(["a.txt", "b/c.md", "b/d/e.py"], key=lambda name: hashlib.sha256(name.encode()).digest())
    source = text_source([tmp_path], "bytes", tmp_path)
    assert source.read(0, len(source)).tobytes().decode() == "".join(f"<{name}>" for name in expected)


def test_named_files_keep_their_order_and_count_once(tmp_path: Path) -> None:
    (tmp_path / "z.data").write_text("z")
    (tmp_path / "a.txt").write_text("a")
    source = text_source([str(tmp_path / "z.data"), tmp_path, tmp_path / "z.data"], "bytes", tmp_path)
    assert source.read(0, len(source)).tobytes() == b"za"


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist$"):
        text_source([tmp_path / "nowhere"], "bytes", tmp_path)
    with pytest.raises(DataError, match=r"no text files below .*data.source=hf"):
        text_source([tmp_path], "bytes", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a regular file"):
        text_source([tmp_path / "pipe"], "bytes", tmp_path)


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'datasets'}"
    code = f"import sys, diloco.data.hf, diloco.data.samples; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
