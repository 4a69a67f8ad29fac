"""Text files as a source: as bytes where they lie, or tokenised once into the cache."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from diloco.config.schema import DataConfig
from diloco.data.cache import cached
from diloco.data.convert import tokenize
from diloco.data.files import content_digest
from diloco.data.folder import text_files
from diloco.data.source import ByteFiles, Progress, Source, SourceKind
from diloco.data.tokenizer import BYTES, tokenizer_digest


class Text(SourceKind):
    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        return text_source([config.path or ""], config.tokenizer, cache_dir, progress)

    def separated(self, config: DataConfig) -> bool:
        return config.tokenizer != BYTES


def text_source(
    paths: Sequence[Path | str], tokenizer: str, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """`tokenizer` is "bytes", a tokenizer.json or a folder with a Hugging Face tokenizer.

    Files are taken as named; of a folder, those with a suffix of `folder.TEXT_SUFFIXES`, at any depth. As bytes they
    follow each other without a separator.
    """
    files = text_files([Path(path) for path in paths])
    if tokenizer == BYTES:
        return ByteFiles(files, " ".join(map(str, paths)))
    key = hashlib.sha256(f"text 1 {tokenizer_digest(tokenizer)} {content_digest(files)}".encode()).hexdigest()
    return cached(cache_dir, key, lambda out: tokenize(files, out, tokenizer, progress))
