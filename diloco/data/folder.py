"""Which files a person means by a path, and in which order.

Files of a folder come in an order that is fixed yet mixed, so that "the last 5 %" is a fair sample of the whole.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from diloco.errors import DataError

# Prose, markup and program text. Records (.jsonl, .csv, .parquet) hold text in a field: source `hf` reads those.
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".cs",
    ".js", ".jsx", ".ts", ".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".hs", ".ml", ".clj", ".lisp",
    ".sh", ".sql", ".toml", ".yaml", ".yml",
})  # fmt: skip


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Files as named, whatever their suffix; of folders every file below that has one of TEXT_SUFFIXES.

    Hidden files and folders (.git) are left out. A file reached twice counts once: it must not be in training and in
    validation.
    """
    unique: dict[str, Path] = {}
    for path in paths:
        for file in _text_files_of(path.expanduser()):
            unique.setdefault(os.path.realpath(file), file)
    return list(unique.values())


def _text_files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    files = files_below(path, keep_folder=_is_visible, keep_file=_is_text)
    if not files:
        raise DataError(
            f"no text files below {path}: of a folder, suffixes such as .txt, .md and .py are read; "
            "name other files one by one, or use source hf for .jsonl, .csv and .parquet"
        )
    return files


def files_below(folder: Path, *, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool]) -> list[Path]:
    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = filter(keep_folder, folders)
        found += [Path(parent, file) for file in filter(keep_file, files)]
    return sorted(found, key=lambda path: _mixing_key(path.relative_to(folder)))


def _mixing_key(relative: Path) -> bytes:
    return hashlib.sha256(os.fsencode(relative.as_posix())).digest()


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _is_text(name: str) -> bool:
    return _is_visible(name) and os.path.splitext(name)[1].lower() in TEXT_SUFFIXES


def _refuse(error: OSError) -> NoReturn:
    # os.walk would pass over a folder that it may not open: two islands would then train on different data.
    raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
