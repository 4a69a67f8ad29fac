"""Read a text slowly: the data of a soak's islands.

Steps of a tiny model would otherwise keep every core busy, and an island that is started again would wait for them.
"""

import time
from pathlib import Path

from diloco.config.schema import DataConfig
from diloco.data.files import text_files
from diloco.data.source import ByteFiles, Progress, Source, Tokens
from diloco.data.text import Text

READ_S = 0.008  # for one sample


class PacedFiles(ByteFiles):
    """Read files as bytes, with a pause before each read."""

    def read(self, start: int, stop: int) -> Tokens:
        time.sleep(READ_S)
        return super().read(start, stop)


class PacedText(Text):
    """Open text files as a source that takes its time."""

    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        path = config.path or ""
        return PacedFiles(text_files([Path(path)]), path)
