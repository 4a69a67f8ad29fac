"""Look at processes by Linux's /proc: what an island uses, what it has started, and which sockets p2pd was given."""

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.train.rounds import SPILLED

PROC = Path("/proc")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SOCKET_ARGUMENT = "-listen=/unix"


@dataclass(frozen=True)
class Usage:
    """Hold what an island and all that it started use at a time, and the files that it has."""

    descriptors: int
    threads: int
    resident_bytes: int
    files: int  # in its folder
    temporary: int  # in its temporary folder


def descendants(pid: int) -> list[int]:
    """List the processes that this one has started, and theirs; not the process itself."""
    children = defaultdict[int, list[int]](list)
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(folder.name))
    found, new = list[int](), [pid]
    while new:
        new = [child for one in new for child in children[one]]
        found += new
    return found


def daemons(pid: int) -> list[int]:
    """List the p2pd processes that an island has started."""
    return [child for child in descendants(pid) if _comm(child) == "p2pd"]


def _comm(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "comm").read_text().strip()
    return ""


def sockets_of(pid: int) -> set[str]:
    """Return the paths of the sockets between an island and its p2pd."""
    found = set[str]()
    for daemon in daemons(pid):
        with suppress(OSError):
            words = (PROC / str(daemon) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            paths = [word.removeprefix(SOCKET_ARGUMENT) for word in words if word.startswith(SOCKET_ARGUMENT)]
            found |= {name for path in paths for name in (path, path.replace("p2pd-", "p2pclient-"))}
    return found


def usage_of(pid: int, folder: Path, temporary: Path) -> Usage | None:
    """Measure an island; None where there is no /proc, or the process has ended."""
    try:
        each = [_process(one) for one in (pid, *daemons(pid))]
    except (OSError, ValueError):
        return None
    descriptors, threads, resident = (sum(column) for column in zip(*each, strict=True))
    return Usage(descriptors, threads, resident, _count(folder), _count(temporary))


def _process(pid: int) -> tuple[int, int, int]:
    folder = PROC / str(pid)
    resident = int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), resident


def _count(folder: Path) -> int:
    """Count files, but for work that is kept while other islands are away, a file a round."""
    return sum(len(names) for inside, _, names in os.walk(folder) if Path(inside).name != SPILLED)
