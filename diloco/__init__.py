"""diloco: train one large model together on computers that sit far apart.

Light on purpose: importing it loads neither torch nor hivemind.
"""

from pathlib import Path

from diloco.version import __version__

for _name in ("comm", "elastic", "checkpoint"):
    if (Path(__file__).parent / _name).is_file():
        raise ImportError(
            f"diloco/{_name} should be a symbolic link to ../{_name}, but this checkout turned it into a text file: "
            "run `git config core.symlinks true && git checkout -- diloco`"
        )

__all__ = ["__version__"]
