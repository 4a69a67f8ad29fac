"""Everything about the build is in pyproject.toml; this only refuses a checkout that would build half a package."""

from pathlib import Path

from setuptools import setup

for name in ("comm", "elastic", "checkpoint"):
    if not (Path(__file__).parent / "diloco" / name).is_dir():
        raise SystemExit(
            f"diloco/{name} should be a symbolic link to ../{name}, but this checkout turned it into a text file. "
            "Nothing was built. Run `git config core.symlinks true && git checkout -- diloco` and build again."
        )

setup()
