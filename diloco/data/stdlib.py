"""The embedded data set: the source of Python's own standard library. Real text, on every machine, no download.

It differs between Python versions; the fingerprint tells.
"""

import platform
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from diloco.config.schema import DataConfig
from diloco.data.folder import files_below
from diloco.data.source import ByteFiles, Progress, Source, SourceKind
from diloco.data.tokenizer import BYTES

LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Written when Python is built or installed: two machines with the same Python differ in these.
MACHINE_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
MACHINE_FOLDERS = ("config-",)


class Stdlib(SourceKind):
    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        return stdlib_source()

    def tokenizer(self, config: DataConfig, others: Iterable[str] = ()) -> str:
        return BYTES

    def separated(self, config: DataConfig) -> bool:
        return False


def stdlib_source() -> ByteFiles:
    root = Path(sysconfig.get_path("stdlib"))
    files = files_below(root, keep_folder=_keep_folder, keep_file=_keep_file)
    return ByteFiles(files, f"the standard library of Python {platform.python_version()}")


def _keep_folder(name: str) -> bool:
    return name not in LEFT_OUT_FOLDERS and not name.startswith(MACHINE_FOLDERS)


def _keep_file(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(MACHINE_FILES)
