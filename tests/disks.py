"""A disk that is small, and full when a test wants it to be."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "256k"):
    """A tmpfs: as root only."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size={size} tmpfs {folder}") != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        os.system(f"umount -l {folder}")


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return ballast
