import hashlib
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.tokens import HEADER_SIZE, TokenFile, TokenFileInfo, TokenWriter, import_raw, pack_header
from diloco.errors import DataError


def written(path: Path, tokens: list[int], vocab: int = 1000) -> Path:
    with TokenWriter(path, vocab) as writer:
        writer.write(tokens)
    return path


def sealed(fields: bytes) -> bytes:
    """A header as a faulty writer would make it: wrong fields under a valid seal."""
    return fields[:96] + hashlib.sha256(fields[:96]).digest()


@given(
    parts=st.lists(st.lists(st.integers(0, 69_999), max_size=20), min_size=1), vocab=st.sampled_from([70_000, 2**32])
)
def test_what_is_written_in_parts_is_read_by_slices(tmp_path_factory: pytest.TempPathFactory, parts, vocab) -> None:
    tokens = [token for part in parts for token in part] + [7]
    path = tmp_path_factory.mktemp("t") / "a.tokens"
    with TokenWriter(path, vocab, tokenizer="ab" * 32) as writer:
        for part in [*parts, [7]]:
            writer.write(part)
    file = TokenFile(path)
    middle = len(tokens) // 2
    assert [*file.read(0, middle), *file.read(middle, len(file))] == tokens
    assert file.info == writer.info
    assert file.info.tokenizer == "ab" * 32
    file.verify()


@pytest.mark.parametrize("vocab, width", [(256, 2), (65536, 2), (65537, 4)])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(tmp_path: Path, vocab: int, width: int) -> None:
    path = written(tmp_path / "a.tokens", [vocab - 1, 0], vocab)
    assert path.stat().st_size == HEADER_SIZE + 2 * width
    assert path.read_bytes()[HEADER_SIZE:] == (vocab - 1).to_bytes(width, "little") + bytes(width)
    assert TokenFile(path).read(0, 2).tolist() == [vocab - 1, 0]


@pytest.mark.parametrize(
    "byte",
    [0, 8, 12, 16, 24, 32, 64, 96],
    ids=["magic", "version", "width", "vocab", "count", "digest", "tokenizer", "seal"],
)
def test_a_flipped_header_field_is_noticed(tmp_path: Path, byte: int) -> None:
    path = written(tmp_path / "a.tokens", [1, 2, 3])
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tokens .*(token file|damaged header)"):
        TokenFile(path)


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda whole: whole[:8] + struct.pack("<I", 2) + whole[12:], "version 2, this diloco reads 1"),
        (lambda whole: b"", "not a token"),
        (lambda whole: whole[:7], "not a token"),
        (lambda whole: whole[:100], "its header"),
        (lambda whole: whole[:133], "cut short"),
        (lambda whole: whole + b"\0\0", "136 bytes instead of 134"),
    ],
)
def test_a_newer_cut_or_longer_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], problem: str) -> None:
    path = written(tmp_path / "a.tokens", [1, 2, 3])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=problem):
        TokenFile(path)


@pytest.mark.parametrize(
    "width, vocab, count, problem",
    [
        (3, 9, 1, "3 bytes per token"),
        (2, 0, 1, "vocabulary of 0"),
        (2, 65537, 1, "vocabulary of 65537"),
        (2, 9, 0, "no tokens"),
    ],
)
def test_impossible_fields_are_refused(tmp_path: Path, width: int, vocab: int, count: int, problem: str) -> None:
    path = tmp_path / "a.tokens"
    info = TokenFileInfo(path, vocab, count, width, "00" * 32, None)
    path.write_bytes(sealed(pack_header(info)) + bytes(width * count))
    with pytest.raises(DataError, match=problem):
        TokenFile(path)


def test_a_token_outside_the_vocabulary_is_found_on_reading(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tokens", [1, 2, 3, 4], vocab=10)
    with open(path, "r+b") as file:
        file.seek(HEADER_SIZE + 2 * 2)
        file.write(b"\x0a\0")
    file = TokenFile(path)
    assert file.read(0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match="token 10 at position 2"):
        file.read(1, 4)
    with pytest.raises(DataError, match="do not match their digest"):
        file.verify()


def test_a_file_that_shrinks_while_in_use_is_an_error_not_a_crash(tmp_path: Path) -> None:
    file = TokenFile(written(tmp_path / "a.tokens", list(range(1000))))
    file.read(0, 10)
    os.truncate(tmp_path / "a.tokens", HEADER_SIZE)
    with pytest.raises(DataError, match=r"a\.tokens changed from 2128 to 128 bytes"):
        file.read(900, 910)


@pytest.mark.parametrize("start, stop", [(-1, 1), (0, 4), (2, 1)])
def test_reads_outside_are_refused(tmp_path: Path, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        TokenFile(written(tmp_path / "a.tokens", [1, 2, 3])).read(start, stop)


def test_the_fingerprint_follows_tokens_and_vocabulary(tmp_path: Path) -> None:
    prints = [
        TokenFile(written(tmp_path / f"{i}.tokens", tokens, vocab)).fingerprint()
        for i, (tokens, vocab) in enumerate([([1, 2], 9), ([1, 2], 9), ([1, 3], 9), ([1, 2], 10), ([1, 2, 0], 9)])
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


@pytest.mark.parametrize("first, tokens", [([1], [1, 10]), ([1], [-1]), ([1], [1.5]), ([1], ["a"]), ([], [])])
def test_bad_tokens_or_none_are_refused_and_nothing_is_left(tmp_path: Path, first: list, tokens: list) -> None:
    problem = "outside the vocabulary|must be whole numbers" if tokens else "no tokens"
    with pytest.raises(DataError, match=problem), TokenWriter(tmp_path / "a.tokens", vocab=10) as writer:
        writer.write(first)
        writer.write(tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tokens", [5])
    code = """if True:
        import os, sys, pathlib, diloco.data.tokens
        with diloco.data.tokens.TokenWriter(pathlib.Path(sys.argv[1]), 10) as writer:
            writer.write([1] * 100_000)
            os._exit(3)
    """
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 3
    assert len(list(tmp_path.iterdir())) == 2
    assert TokenFile(path).read(0, 1).tolist() == [5]


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*a\.tokens: File exists"):
        written(tmp_path / "file" / "a.tokens", [1])


@given(tokens=st.lists(st.integers(0, 50_256), min_size=1), dtype=st.sampled_from(["uint16", "uint32"]))
def test_raw_files_are_imported(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], dtype: str) -> None:
    folder = tmp_path_factory.mktemp("raw")
    np.array(tokens, dtype=dtype).astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / "train.bin")
    info = import_raw(folder / "train.bin", folder / "a.tokens", dtype, vocab=50257)
    assert TokenFile(info.path).read(0, info.count).tolist() == tokens


def test_raw_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "train.bin"
    raw.write_bytes(b"\x01\0\xff\0\x02")
    with pytest.raises(DataError, match="5 bytes, no whole number of uint16"):
        import_raw(raw, tmp_path / "a.tokens", "uint16", vocab=300)
    raw.write_bytes(b"\x01\0\xff\0")
    with pytest.raises(DataError, match="token 255 at position 1 is outside the vocabulary of 255"):
        import_raw(raw, tmp_path / "a.tokens", "uint16", vocab=255)
    with pytest.raises(DataError, match="int16"):
        import_raw(raw, tmp_path / "a.tokens", "int16", vocab=300)
    assert not (tmp_path / "a.tokens").exists()


def test_a_large_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "large.tokens"
    count = 2**30
    path.write_bytes(pack_header(TokenFileInfo(path, 10, count, 2, "00" * 32, None)))
    os.truncate(path, HEADER_SIZE + 2 * count)
    tracemalloc.start()
    file = TokenFile(path)
    assert file.read(count - 1000, count).sum() == 0
    file.fingerprint()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
