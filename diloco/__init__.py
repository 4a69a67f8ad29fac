"""diloco: train one large model together on computers that sit far apart.

Light on purpose: importing it loads neither torch nor hivemind; `diloco.connect` does, when it is first looked up.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.api import connect

for _name in ("comm", "elastic", "checkpoint"):
    if (Path(__file__).parent / _name).is_file():
        raise ImportError(
            f"diloco/{_name} should be a symbolic link to ../{_name}, but this checkout turned it into a text file: "
            "run `git config core.symlinks true && git checkout -- diloco`"
        )

__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from diloco.api import connect

        return connect
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")
