"""Text as a source: files as bytes where they lie, or tokenised once into the cache, in bounded memory however large.

The embedded data set is the source of Python's own standard library: real text, on every machine, no download. It
differs between Python versions; the fingerprint tells.
"""

import io
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from diloco.config.schema import DataConfig
from diloco.data.files import content_digest, files_below, refusing, text_files
from diloco.data.source import ByteFiles, Progress, Source, SourceKind
from diloco.data.tokenizer import BYTES, Tokenizer, load_tokenizer, tokenizer_digest
from diloco.data.tokens import TokenFileInfo, TokenWriter, cached
from diloco.errors import DataError

PIECE = 2**20  # characters; up to twice as many where a line is long
BATCH = 4 * PIECE  # characters handed to the tokenizer at once, for its threads to share
LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Written when Python is built or installed: two machines with the same Python differ in these.
MACHINE_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
MACHINE_FOLDERS = ("config-",)


class Text(SourceKind):
    """Open text files as a source, as bytes or tokenised."""

    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        return text_source([config.path or ""], config.tokenizer, cache_dir, progress)

    def separated(self, config: DataConfig) -> bool:
        """Tell whether documents are separated: as bytes, files follow each other without a separator."""
        return config.tokenizer != BYTES


def text_source(
    paths: Sequence[Path | str], tokenizer: str, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """Open text files where they lie, or tokenise them into the cache.

    `tokenizer` is "bytes", a tokenizer.json or a folder with a Hugging Face tokenizer. Files are taken as named; of a
    folder, those with a suffix of `files.TEXT_SUFFIXES`, at any depth. As bytes they follow each other without a
    separator.
    """
    files = text_files([Path(path) for path in paths])
    if tokenizer == BYTES:
        return ByteFiles(files, " ".join(map(str, paths)))
    key = f"text 1 {tokenizer_digest(tokenizer)} {content_digest(files)}"
    return cached(cache_dir, key, lambda out: tokenize(files, out, tokenizer, progress))


class Stdlib(SourceKind):
    """Open the source of Python's own standard library as bytes."""

    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        return stdlib_source()

    def tokenizer(self, config: DataConfig, others: Iterable[str] = ()) -> str:
        return BYTES

    def separated(self, config: DataConfig) -> bool:
        return False


def stdlib_source() -> ByteFiles:
    """Open the .py files of this Python's standard library, without tests, packages and what differs by machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = files_below(root, keep_folder=_keep_folder, keep_file=_keep_file)
    return ByteFiles(files, f"the standard library of Python {platform.python_version()}")


def _keep_folder(name: str) -> bool:
    return name not in LEFT_OUT_FOLDERS and not name.startswith(MACHINE_FOLDERS)


def _keep_file(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(MACHINE_FILES)


class DocumentPiece(NamedTuple):
    """Hold a part of a document that is small enough to be tokenised in memory."""

    text: str
    last: bool  # of its document


def tokenize(inputs: list[Path], out: Path, tokenizer: str, progress: Progress | None = None) -> TokenFileInfo:
    """Tokenise UTF-8 files, and folders of them, into one token file.

    Each file is a document; after it comes the tokenizer's end-of-sequence token, if it has one.
    """
    files = text_files(inputs)
    total = sum(file.stat().st_size for file in files)
    pieces = (piece for file in files for piece in _pieces_of_file(file))
    return write_documents(pieces, out, load_tokenizer(tokenizer), progress, total)


def write_documents(
    pieces: Iterable[DocumentPiece], out: Path, tokenizer: Tokenizer, progress: Progress | None = None, total: int = 0
) -> TokenFileInfo:
    """Tokenise documents, piece by piece, into a token file. `total` is their bytes, for `progress`; 0: unknown."""
    done = 0
    with TokenWriter(out, tokenizer.vocab, tokenizer.digest) as writer:
        for batch in _batches(pieces):
            texts = [piece.text for piece in batch]
            for piece, tokens in zip(batch, tokenizer.encode(texts), strict=True):
                writer.write(tokens)
                if piece.last and tokenizer.end is not None:
                    writer.write([tokenizer.end])
            if progress is not None:
                done += sum(len(text.encode()) for text in texts)
                progress(done, total)
    return writer.info


def pieces_of(text: str) -> Iterator[DocumentPiece]:
    """Cut a document that is in memory already into pieces. An empty one has none."""
    return _cut(io.StringIO(text, newline=""))


def _pieces_of_file(path: Path) -> Iterator[DocumentPiece]:
    try:
        with refusing("read", path), open(path, encoding="utf-8", newline="") as stream:  # "\r\n" stays what it is
            yield from _cut(stream)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: convert it (iconv -t utf-8) or leave it out") from error


def _cut(stream: TextIO) -> Iterator[DocumentPiece]:
    text = _next_text(stream)
    while text:
        following = _next_text(stream)
        yield DocumentPiece(text, last=not following)
        text = following


def _next_text(stream: TextIO) -> str:
    """Read about a PIECE, up to the end of a line; within the line only where that is longer than a PIECE itself."""
    return stream.read(PIECE) + stream.readline(PIECE)


def _batches(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    batch: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
