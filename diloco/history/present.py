"""What the islands of a run on this machine do now, from the files that they refresh; and how to ask them to stop.

Nothing heavy is imported here: commands that only look use it.
"""

import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.errors import SaveError
from diloco.history.find import RUNS
from diloco.report.shown import OVER
from diloco.report.status import STATUS, IslandStatus, RunStatus, ask_for_others, merged, read_status
from diloco.run.folder import OUTER, OWNER_KEY, has_log
from diloco.run.genesis import FILE as GENESIS
from diloco.run.status import is_running, is_stopped, parent_of

FRESH_S, LOOK_S = 5.0, 0.1  # how long to wait for what remote islands say of themselves


@dataclass(frozen=True)
class LocalIsland:
    """Describe an island with its folder on this machine, and what it last said."""

    folder: Path
    status: RunStatus | None

    @property
    def running(self) -> bool:
        """Tell whether its process is there: on another machine, whether it has spoken lately."""
        if self.status is None or self.status.is_over:
            return False
        if self.status.host != socket.gethostname():
            return not self.status.is_stale(time.time())
        return is_running(self.status)

    @property
    def is_silent(self) -> bool:
        """Tell whether its process is there and has said nothing for a while."""
        starting = self.status is not None and self.status.own.state == "starting"  # it says so once
        return self.running and not starting and self.status is not None and self.status.is_stale(time.time())


def islands_in(place: Path) -> list[LocalIsland]:
    """List the islands of a folder: of a run, or of one island."""
    folders = [place, *sorted(place.glob("island-*"))]
    return [LocalIsland(each, read_status(each)) for each in folders if (each / STATUS).exists() or has_log(each)]


def find_islands(name: str) -> list[LocalIsland]:
    """List the islands of a run, by its folder, its name under runs/, or one island's folder; raise SaveError if there
    are none."""
    for place in (Path(name).expanduser(), RUNS / name):
        if place.is_dir() and (found := islands_in(place)):
            return found
    there = sorted(path.name for path in RUNS.glob("*") if path.is_dir() and islands_in(path))
    hint = f"there are {', '.join(there)}" if there else "give the folder that checkpoint.dir named"
    raise SaveError(f"{name}: no such run, neither as a folder nor under {RUNS}/: {hint}")


def folder_of(name: str) -> Path:
    """Return the folder that a run's name or path means: with islands in it, if there is one."""
    places = [place for place in (Path(name).expanduser(), RUNS / name) if place.is_dir()]
    return next((place for place in places if islands_in(place)), next(iter(places), Path(name)))


def only_run() -> str:
    """Return the one run under runs/ that is going on, or else the one that said something last."""
    found = [(path, islands_in(path)) for path in RUNS.glob("*") if path.is_dir()]
    known = [(path, islands) for path, islands in found if islands]
    going = {path: islands for path, islands in sorted(known) if any(island.running for island in islands)}
    if len({_genesis(path, islands) for path, islands in going.items()}) > 1:
        raise SaveError(f"several runs are going on, name one: {', '.join(path.name for path in going)}")
    # of several folders of one run, its founder's
    founded = [path for path in going if any((island.folder / OWNER_KEY).exists() for island in going[path])]
    running = [*founded, *going]
    if not known:
        raise SaveError(f"there is no run under {RUNS}/: name one, by its folder, or give a ticket to watch")
    latest = max(known, key=lambda each: max(_spoken_at(island) for island in each[1]))
    return str(running[0] if running else latest[0])


def _genesis(path: Path, islands: list[LocalIsland]) -> bytes:
    """Return by what the folders of one run are known; of one that has not begun, its path."""
    files = [island.folder / OUTER / GENESIS for island in islands]
    return next((file.read_bytes() for file in files if file.is_file()), bytes(path))


def _spoken_at(island: LocalIsland) -> float:
    return island.status.at if island.status is not None else 0.0


def status_of(islands: list[LocalIsland]) -> RunStatus | None:
    """Return a run's status as its islands on this machine know it, each about itself; None if they say nothing.

    Of islands that are gone it says so, whatever others still think.
    """
    known = [island for island in islands if island.status is not None]
    if not known:
        return None
    best = max(known, key=lambda island: (island.running, not island.is_silent, _round(island), _spoken_at(island)))
    assert best.status is not None
    told = [island.status for island in known if island.running and not island.is_silent]
    view = merged(best.status, [each for each in told if each is not None])
    gone = {island.status.me: island for island in known if island.status is not None}
    seen = [_as_it_is(each, gone.get(each.island)) for each in view.islands]
    if not best.running:  # what it last saw of the others says nothing of now
        seen = [each if each.state in OVER else _unheard(each, view.at) for each in seen]
    return replace(view, islands=tuple(seen))


def _unheard(each: IslandStatus, since: float) -> IslandStatus:
    text = "no island of this folder runs, which would hear it"
    return replace(each, state="lost", since=since, text=text, waiting_for=(), cause="", leads=False)


def _round(island: LocalIsland) -> int:
    return island.status.round if island.status is not None else 0


def _as_it_is(each: IslandStatus, here: LocalIsland | None) -> IslandStatus:
    if here is None or here.status is None or (here.running and not here.is_silent):
        return each
    if here.is_silent and _is_full(here.folder):  # a status is a file, too
        full = f"{here.folder} has no space left, not even for a status"
        return replace(each, disk=full, tokens_per_s=None)  # how fast it was then says nothing now
    pid, state = here.status.pid, "silent"
    text = f"its process {pid} is there, and starved or hangs"
    if is_stopped(pid):
        text = f"its process {pid} is stopped by a signal, kill -CONT {pid} lets it go on"
    if not here.is_silent:
        state, text = "ended", _how_it_ended(here.status)
    return replace(
        each, state=state, since=here.status.at, told_by=each.name, text=text, waiting_for=(), cause="", leads=False
    )


def _is_full(folder: Path) -> bool:
    """Tell whether nothing can be written to a folder for want of space."""
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False


def _how_it_ended(status: RunStatus) -> str:
    if status.ended:
        return "it left in good order"
    if status.failed:
        return "it ended by an error, or by a signal while it joined: see what it printed"
    text = "its process is gone without a goodbye, as by kill -9 or for want of memory; started again, it continues"
    return f"{text}: {status.command}" if status.command else text


def glance(place: Path) -> RunStatus | None:
    """Return a run's status without waiting for islands elsewhere: what they say of themselves comes by and by."""
    islands = islands_in(place)
    request_remote(islands)
    return status_of(islands)


def ask_remote(islands: list[LocalIsland]) -> None:
    """Have the islands of this machine ask those elsewhere what they do, and wait a moment for the answers."""
    running = [island for island in islands if island.running and not island.is_silent]
    here = {island.status.me for island in running if island.status is not None}
    if not request_remote(islands):
        return
    for island in running[:1]:
        deadline = time.monotonic() + FRESH_S
        while time.monotonic() < deadline:
            status = read_status(island.folder)
            others = [each for each in status.islands if each.island not in here] if status is not None else []
            if all(each.told_by == each.name or each.state in ("lost", "left", "evicted") for each in others):
                return
            time.sleep(LOOK_S)


def request_remote(islands: list[LocalIsland]) -> bool:
    """Have an island of this machine ask those elsewhere what they do, for a while; return False if none can."""
    running = [island for island in islands if island.running and not island.is_silent]
    return any(ask_for_others(island.folder) for island in running[:1])


# stopping


def stop(islands: list[LocalIsland]) -> list[int]:
    """Ask the processes of islands to stop in good order, and return which: where one has started several, that one."""
    running = [island.status for island in islands if island.running and island.status is not None]
    for status in running:
        if status.host != socket.gethostname():
            raise SaveError(f"{status.folder} is trained in on {status.host}: stop it there")
    pids = {top_process(status.pid) if len(islands) > 1 else status.pid for status in running}
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # which loops of people's own heed, too
    return sorted(pids)


def top_process(pid: int) -> int:
    """Return the diloco process that has started this one, directly or not; itself where none has."""
    while (parent := parent_of(pid)) > 1 and is_diloco(parent):
        pid = parent
    return pid


def is_diloco(pid: int) -> bool:
    """Tell whether a process is `diloco …` or `python -m diloco …`, rather than anything that names it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return any(Path(word).name == "diloco" for word in words[:2]) or words[1:3] == ["-m", "diloco"]
