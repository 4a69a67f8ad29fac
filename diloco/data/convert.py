"""Text into token files, in bounded memory however large the input."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from diloco.data.folder import text_files
from diloco.data.header import TokenFileInfo
from diloco.data.source import Progress
from diloco.data.tokenizer import Tokenizer, load_tokenizer
from diloco.data.tokens import TokenWriter
from diloco.errors import DataError

PIECE = 2**20  # characters; up to twice as many where a line is long
BATCH = 4 * PIECE  # characters handed to the tokenizer at once, for its threads to share


class Piece(NamedTuple):
    text: str
    last: bool  # of its document


def tokenize(inputs: list[Path], out: Path, tokenizer: str, progress: Progress | None = None) -> TokenFileInfo:
    """UTF-8 files, and folders of them, into one token file.

    Each file is a document; after it comes the tokenizer's end-of-sequence token, if it has one.
    """
    files = text_files(inputs)
    total = sum(file.stat().st_size for file in files)
    pieces = (piece for file in files for piece in _pieces_of_file(file))
    return write_documents(pieces, out, load_tokenizer(tokenizer), progress, total)


def write_documents(
    pieces: Iterable[Piece], out: Path, tokenizer: Tokenizer, progress: Progress | None = None, total: int = 0
) -> TokenFileInfo:
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


def pieces_of(text: str) -> Iterator[Piece]:
    """Of a document that is in memory already. An empty one has none."""
    return _cut(io.StringIO(text, newline=""))


def _pieces_of_file(path: Path) -> Iterator[Piece]:
    try:
        with open(path, encoding="utf-8", newline="") as stream:  # newline="": "\r\n" stays what it is
            yield from _cut(stream)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: convert it (iconv -t utf-8) or leave it out") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _cut(stream: TextIO) -> Iterator[Piece]:
    text = _next_text(stream)
    while text:
        following = _next_text(stream)
        yield Piece(text, last=not following)
        text = following


def _next_text(stream: TextIO) -> str:
    """About a PIECE, up to the end of a line; within the line only where that is longer than a PIECE itself."""
    return stream.read(PIECE) + stream.readline(PIECE)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
