"""Text to token numbers: plain bytes, a `tokenizer.json`, or a Hugging Face tokenizer's folder, here or on the hub.

The digest comes from the files alone, so that a cache hit loads no tokenizer library.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.data.files import content_digest
from diloco.errors import DataError, MissingExtra
from diloco.model.hub import local_folder

BYTES = "bytes"
# What decides about token numbers in a tokenizer's folder; model weights may lie next to them.
DEFINING_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json",
    "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
)  # fmt: skip
# A bare tokenizer.json does not say which token ends a document.
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")


@dataclass(frozen=True)
class Tokenizer:
    """Turn texts into token numbers and back."""

    vocab: int
    end: int | None  # written after each document
    digest: str
    encode: Callable[[Sequence[str]], list[npt.ArrayLike]]  # texts to rows of token numbers
    decode: Callable[[Sequence[int]], str]  # what is no character, or not yet a whole one, becomes U+FFFD
    save: Callable[[Path], None]  # into a folder that AutoTokenizer loads


def tokenizer_digest(spec: str) -> str:
    """Return a digest of the files that define a tokenizer, without loading a library."""
    if spec == BYTES:
        return hashlib.sha256(b"bytes").hexdigest()
    return content_digest(_defining_files(_local(spec)))


def load_tokenizer(spec: str) -> Tokenizer:
    """Load plain `bytes`, a tokenizer.json, or a Hugging Face tokenizer's folder or name; no code of its is run."""
    digest = tokenizer_digest(spec)
    if spec == BYTES:
        return _bytes_tokenizer(digest)
    path = _local(spec)
    if path.is_dir() and [file.name for file in _defining_files(path)] == ["tokenizer.json"]:
        path = path / "tokenizer.json"  # nothing else in the folder says more
    return _from_folder(path, digest) if path.is_dir() else _from_json(path, digest)


def _local(spec: str) -> Path:
    path = local_folder(spec, DEFINING_FILES, "tokenizer", DataError)
    if not path.exists():
        raise DataError(
            f"tokenizer {spec!r} is neither 'bytes' nor a local folder or tokenizer.json; "
            "a name on the hub is OWNER/NAME"
        )
    return path


def _defining_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [path / name for name in DEFINING_FILES if (path / name).is_file()]
    if not files:
        raise DataError(f"no tokenizer in {path}: expected tokenizer.json or another of a tokenizer's files")
    return files


def _bytes_tokenizer(digest: str) -> Tokenizer:
    # Byte 0 does not occur in text, which makes it a free separator of documents.
    return Tokenizer(
        256, 0, digest,
        encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
        save=lambda folder: _save_json(_byte_level(), None, folder),
    )  # fmt: skip


def _byte_level() -> Any:
    """Build bytes as the libraries know them: tokens 0 to 255, each under GPT-2's visible character for it."""
    library = hf_library("tokenizers", "a tokenizer's files")
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    names = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}
    backend = library.Tokenizer(library.models.BPE(vocab=names, merges=[]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = library.decoders.ByteLevel()
    return backend


def hf_library(name: str, purpose: str) -> Any:
    """Import a library of the extra `hf`. Raise MissingExtra, which names the purpose, if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(name.partition(".")[0], "hf", purpose) from error


def _save_json(backend: Any, end: str | None, folder: Path) -> None:
    # The class is said: from the model's type alone, transformers would take that model's usual tokenizer.
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(about | ({"eos_token": end} if end else {}), indent=1))


def _from_json(path: Path, digest: str) -> Tokenizer:
    library = hf_library("tokenizers", f"the tokenizer {path}")
    try:
        backend = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower class for a bad file
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    backend.no_truncation()  # files saved for inference may ask for 512 tokens a text
    backend.no_padding()
    numbers = backend.get_vocab()
    end = next((name for name in KNOWN_ENDS if name in numbers), None)

    def encode(texts: Sequence[str]) -> list[npt.ArrayLike]:
        return [encoded.ids for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(
        _vocab(numbers, path), numbers[end] if end else None, digest, encode,
        decode=lambda tokens: str(backend.decode(list(tokens))),
        save=lambda folder: _save_json(backend, end, folder),
    )  # fmt: skip


def _from_folder(path: Path, digest: str) -> Tokenizer:
    library = hf_library("transformers", f"the tokenizer {path}")
    try:
        backend = library.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"cannot load the tokenizer {path}: {reason}") from error

    def encode(texts: Sequence[str]) -> list[npt.ArrayLike]:
        rows: list[npt.ArrayLike] = backend(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return rows

    return Tokenizer(
        _vocab(backend.get_vocab(), path), backend.eos_token_id, digest, encode,
        decode=lambda tokens: str(
            backend.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ),
        save=lambda folder: backend.save_pretrained(folder),
    )  # fmt: skip


def _vocab(numbers: dict[str, Any], path: Path) -> int:
    if not numbers:
        raise DataError(f"the tokenizer {path} has no tokens")
    return int(max(numbers.values())) + 1  # not their count: there may be holes
