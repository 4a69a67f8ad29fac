"""Text through tokenizers and data sets into token files, with libraries and no network."""

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import tokenizers

from diloco.data import text
from diloco.data.text import text_source, tokenize
from diloco.data.tokenizer import tokenizer_digest
from diloco.data.tokens import TokenFile, TokenWriter, cached
from diloco.errors import DataError, MissingExtra

TEXT = "the cat sat on the mat\nthe dog sat on the cat\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 280 tokens; the last is its end of text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 9, tokenizers.trainers.BpeTrainer(vocab_size=279, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|endoftext|>"])
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


def decoded(path: Path, tokenizer: Path) -> str:
    file = TokenFile(path)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer))
    return backend.decode(file.read(0, len(file)).tolist(), skip_special_tokens=False)


def test_documents_are_tokenised_whole_and_separated(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode() * 3)
    (tmp_path / "b.txt").write_bytes("Käse\r\n".encode())
    (tmp_path / "empty.txt").touch()
    inputs = [tmp_path / name for name in ["a.txt", "empty.txt", "b.txt"]]
    info = tokenize(inputs, tmp_path / "out.tokens", str(tokenizer))
    assert decoded(info.path, tokenizer) == TEXT * 3 + "<|endoftext|>Käse\r\n<|endoftext|>"
    assert info.vocab == tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    assert info.tokenizer == tokenizer_digest(str(tokenizer))


def test_a_large_file_is_cut_at_lines(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 100)
    monkeypatch.setattr(text, "BATCH", 300)
    (tmp_path / "a.txt").write_text(TEXT * 50)
    pieces = list(text.pieces_of(TEXT * 50))
    assert all(piece.text.endswith("\n") and len(piece.text) < 150 for piece in pieces)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    info = tokenize([tmp_path / "a.txt"], tmp_path / "out.tokens", str(tokenizer))
    assert decoded(info.path, tokenizer) == TEXT * 50 + "<|endoftext|>"


def test_memory_is_bounded_where_there_are_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 100)
    pieces = list(text.pieces_of("é" * 1050))
    assert max(len(piece.text) for piece in pieces) == 200
    assert "".join(piece.text for piece in pieces) == "é" * 1050


def test_progress_counts_bytes_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 10)
    monkeypatch.setattr(text, "BATCH", 10)
    (tmp_path / "a.txt").write_text("é\n" * 40)
    seen: list[tuple[int, int]] = []
    tokenize([tmp_path], tmp_path / "out.tokens", "bytes", lambda done, total: seen.append((done, total)))
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (120, 120)


def test_bytes_into_a_token_file_end_documents_with_zero(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\n")
    file = TokenFile(tokenize([tmp_path / "a.txt"], tmp_path / "out.tokens", "bytes").path)
    assert file.vocab == 256
    assert file.read(0, len(file)).tolist() == [*b"a\r\n", 0]


def test_what_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n" * 1000 + b"\xff\xfe")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out.tokens", "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_text_is_tokenised_once(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first = text_source([tmp_path / "a.txt"], str(tokenizer), tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not even needed from the cache
    again = text_source([tmp_path / "a.txt"], str(tokenizer), tmp_path / "cache")
    assert first.fingerprint() == again.fingerprint()
    (tmp_path / "a.txt").write_text(TEXT.upper())
    with pytest.raises(MissingExtra, match=r"needs tokenizers: pip install 'diloco\[hf\]'"):
        text_source([tmp_path / "a.txt"], str(tokenizer), tmp_path / "cache")


def test_the_cache_tells_tokenizers_and_document_borders_apart(tmp_path: Path, tokenizer: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=1))
    for name in ("ab", "a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    cache = tmp_path / "cache"
    text_source([tmp_path / "ab.txt"], str(tokenizer), cache)
    text_source([tmp_path / "ab.txt"], str(other), cache)
    text_source([tmp_path / "a.txt", tmp_path / "b.txt"], str(tokenizer), cache)
    assert len(list(cache.glob("*.tokens"))) == 3


def test_a_folder_with_a_tokenizer_of_transformers(tmp_path: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|endoftext|>")
    saved.save_pretrained(tmp_path / "tok")
    (tmp_path / "a.txt").write_text(TEXT)
    info = tokenize([tmp_path / "a.txt"], tmp_path / "out.tokens", str(tmp_path / "tok"))
    assert decoded(info.path, tokenizer) == TEXT + "<|endoftext|>"


def test_tokenizers_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "tokenizer_config.json").write_text("{}")
    for spec, problem in [
        ("gpt2", "neither 'bytes' nor a local"),
        (str(tmp_path / "empty"), "no tokenizer in"),
        (str(tmp_path / "bad.json"), "is not a tokenizer.json"),
        (str(tmp_path / "nothing"), r"cannot load the tokenizer .*nothing: \w[^\n]+$"),
    ]:
        with pytest.raises(DataError, match=problem):
            text_source([tmp_path / "a.txt"], spec, tmp_path / "cache")


def test_islands_of_one_machine_build_the_cache_once(tmp_path: Path) -> None:
    built: list[Path] = []
    second = Event()
    name = hashlib.sha256(b"key").hexdigest()[:40]
    (tmp_path / f".{name}.tokens.dead.partial").touch()

    def build(out: Path) -> None:
        built.append(out)
        if len(built) > 1:
            second.set()
        second.wait(0.2)  # long enough for another to come in, if it may
        with TokenWriter(out, 10) as writer:
            writer.write([1, 2, 3])

    with ThreadPoolExecutor(4) as threads:
        files = list(threads.map(lambda _: cached(tmp_path, "key", build), range(4)))
    assert len(built) == 1
    assert {len(file) for file in files} == {3}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.lock", f"{name}.tokens"]
