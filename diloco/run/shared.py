"""Refuse an island of several machines whose processes do not see one folder.

Each process writes its part of a save. Without a shared file system the parts would lie on several machines, and only
the next start would find them missing.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from diloco.errors import LeaderFailed, SaveError
from diloco.island.mesh import ProcessMesh

PROOF = ".shared-"  # begins the name of the file that the leader makes and all others look for
VISIBLE_S = 20.0  # until a network file system shows a new file to another machine
LOOK_S = 0.5


def refuse_unshared(folder: Path, place: ProcessMesh, *, visible_s: float = VISIBLE_S) -> None:
    """Refuse to go on unless all processes see a file that the leader makes in the folder. All of them call this.

    The leader raises SaveError, the others LeaderFailed. Where the leader has no folder, there is nothing to look for.
    """
    if place.alone:
        return
    name = place.share(_leave_proof(folder) if place.leader else None)
    if not name:
        return
    seen = place.gather((socket.gethostname(), str(folder.absolute()), _sees(folder / name, visible_s)))
    if place.leader:
        (folder / name).unlink(missing_ok=True)
    blind = {f"{host}:{path}": rank for rank, (host, path, sees) in reversed(list(enumerate(seen))) if not sees}
    if blind and not place.leader:
        raise LeaderFailed("not all processes see the leader's folder; its message says which")
    if blind:
        where = ", ".join(f"{path} (process {rank})" for path, rank in reversed(blind.items()))
        host, path, _ = seen[0]
        raise SaveError(
            f"{where}: not the same folder as {host}:{path}, the leader's, but each process saves its part there. "
            "Nothing was trained: set checkpoint.dir (or --dir) to a folder on a file system that all machines share, "
            "or start one island on each machine"
        )


def _leave_proof(folder: Path) -> str:
    """Make a file of a name that nobody can have made before; return its name, or nothing without a folder."""
    name = PROOF + token_hex(8)
    with suppress(FileNotFoundError):
        (folder / name).touch()
        return name
    return ""


def _sees(path: Path, visible_s: float) -> bool:
    deadline = time.monotonic() + visible_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
        with suppress(OSError):
            os.listdir(path.parent)  # asks a network file system's server again
    return True
