"""Hugging Face data sets as a source: local folders and files, or names on the Hub. Tokenised once into the cache.

No code of a data set is ever run.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.config.schema import DataConfig
from diloco.data.files import content_digest, files_below
from diloco.data.source import Progress, Source, SourceKind
from diloco.data.text import DocumentPiece, pieces_of, write_documents
from diloco.data.tokenizer import hf_library, load_tokenizer, tokenizer_digest
from diloco.data.tokens import cached
from diloco.errors import DataError

# Which of the library's readers opens a single file.
READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


class HuggingFace(SourceKind):
    """Open a Hugging Face data set as a source."""

    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        return hf_source(config.path or "", config.split, config.field, config.tokenizer, cache_dir, progress)


def hf_source(
    path_or_name: str, split: str, text_field: str, tokenizer: str, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """Open a folder made by `save_to_disk`, a folder or file of .jsonl, .parquet or .csv, or a name on the Hub.

    A local data set is tokenised again when its content changes. A name on the Hub is not looked up again: delete the
    cached file to get a newer version.
    """
    path = Path(path_or_name).expanduser()
    content = _local_digest(path) if path.exists() else path_or_name
    # "None": no configuration of a data set; by this key the files in people's caches are found
    key = "\0".join(["hf 1", content, split, text_field, "None", tokenizer_digest(tokenizer)])

    def build(out: Path) -> None:
        encoder = load_tokenizer(tokenizer)
        with _explained(path_or_name):
            write_documents(_pieces(_load(path_or_name, split), text_field, path_or_name), out, encoder, progress)

    return cached(cache_dir, key, build)


def _local_digest(path: Path) -> str:
    """Return a digest of contents and of names, which may decide which split a file belongs to."""
    if path.is_file():
        return content_digest([path]) + path.name
    files = files_below(path, keep_folder=_is_data, keep_file=_is_data)
    return content_digest(files) + " ".join(file.relative_to(path).as_posix() for file in files)


def _is_data(name: str) -> bool:
    # Not the library's scratch files (hidden, or cache-*.arrow), nor our own cache where it lies in the same folder.
    return not name.startswith((".", "cache-")) and not name.endswith((".tokens", ".lock"))


@contextmanager
def _explained(path_or_name: str) -> Iterator[None]:
    """Turn the library's own errors into one line; some come as late as the last record."""
    exceptions = hf_library("datasets.exceptions", "data source hf")
    try:
        yield
    except (OSError, ValueError, RuntimeError, exceptions.DatasetsError) as error:
        where = "" if Path(path_or_name).expanduser().exists() else " (and there is no such local path)"
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"cannot load the data set {path_or_name}{where}: {reason}") from error


def _load(path_or_name: str, split: str) -> Any:
    from datasets import load_dataset, load_from_disk

    path = Path(path_or_name).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _select(load_from_disk(str(path)), split, path)
    options: dict[str, Any] = {"split": split}
    # datasets 3 runs a data set's code if an environment variable says so; later versions cannot, and lack the option.
    if "trust_remote_code" in inspect.signature(load_dataset).parameters:
        options["trust_remote_code"] = False
    if not path.is_file():
        return load_dataset(str(path) if path.is_dir() else path_or_name, **options)
    if path.suffix not in READERS:
        raise DataError(f"{path}: a data set file ends in {', '.join(READERS)}")
    return load_dataset(READERS[path.suffix], data_files=str(path), **options)


def _select(loaded: Any, split: str, path: Path) -> Any:
    """Return the split that is asked for: `load_from_disk` gives either one split or a dictionary of them."""
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        return loaded[split]
    if loaded.split is not None and str(loaded.split) != split:
        raise DataError(f"{path} is the split {str(loaded.split)!r}, not {split!r}")
    return loaded


def _pieces(records: Any, text_field: str, name: str) -> Iterator[DocumentPiece]:
    if records.column_names is not None and text_field in records.column_names:
        records = records.select_columns([text_field])  # leave images and the like undecoded
    for number, record in enumerate(records):
        if text_field not in record:
            raise DataError(f"{name} has no field {text_field!r}; it has {', '.join(record)}")
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(f"{name} has {type(text).__name__}, not text, in field {text_field!r} of record {number}")
        yield from pieces_of(text)
