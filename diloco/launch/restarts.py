"""What a restarted process of a mesh does differently: the same command resumes what its last life has left."""

import os
from pathlib import Path

from diloco.checkpoint.save.facts import saves
from diloco.errors import ConfigError
from diloco.launch.mesh_processes import BEGAN, LIVES
from diloco.run.folder import OWNER_KEY, has_begun


def continues(folder: Path, *, fresh: bool) -> bool:
    """Tell whether this process is one of a mesh that was restarted, and that its last life has left something in its
    folder: then the same command resumes that. With `fresh`, what was there before it began does not count."""
    if int(os.environ.get(LIVES, 0)) == 0 or not (has_begun(folder) or saves(folder)):
        return False
    if not fresh:
        return True
    if BEGAN not in os.environ:
        raise ConfigError("--fresh would start over at each restart of torchrun: start again without it")
    return (folder / OWNER_KEY).stat().st_mtime >= float(os.environ[BEGAN])
