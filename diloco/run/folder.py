"""A run's folder: how it is made, locked and set aside, and what writes into it as events happen."""

import fcntl
import logging
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import TextIO

from diloco.checkpoint.save.facts import saves
from diloco.comm.peers.addressbook import OTHERS
from diloco.config.file import render_config
from diloco.config.schema import SINKS, Config
from diloco.errors import ConfigError, SaveError
from diloco.report.events import Note
from diloco.report.metrics import Metrics
from diloco.report.sinks import EVENTS, Events, JsonLines, Sink
from diloco.run.genesis import FILE as GENESIS
from diloco.run.genesis import read_genesis

OUTER = "outer"  # in an island's folder: its log and snapshots of the outer state
LOCK = ".lock"  # in an island's folder: held by the process that trains there
HELD_AGAIN_S = 0.2
IDENTITY_KEY = "identity.key"  # in an island's folder
OWNER_KEY = "owner.key"  # in the folder of the island that founded the run


def open_folder(
    config: Config, events: Events, *, resume: bool, fresh: bool = False, view: Sink | None = None,
    prepare: Callable[[], str] = str,
) -> None:  # fmt: skip
    """Make and lock the run's folder, and attach what records events there, and the view. `prepare` is called once the
    folder is locked, before anything in it is changed; it returns a note or nothing."""
    folder = Path(config.dir)
    try:
        kept = prepare_folder(folder, resume=resume, fresh=fresh)
        note = prepare()
        (folder / "config.yaml").write_text(render_config(config), encoding="utf-8")
        log_to(folder / "diloco.log")
        events.attach(JsonLines(folder / EVENTS, append=resume))
        if config.log.metrics is not None:
            events.attach(Metrics(config))
        for name in config.log.wanted:
            events.attach(resolve_name(SINKS[name])(config))
        if view is not None:
            events.attach(view)
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None
    for text in (f"the earlier run is kept as {kept}" if kept is not None else "", note):
        if text:
            events.emit(Note(text=text))


class LogFile(logging.FileHandler):
    """Append to a log file. What a full disk refuses is lost, without a traceback on the terminal for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print a bug of ours, but not that the disk is full: whoever wrote to it has said that."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to(path: Path) -> None:
    """Write warnings of the network's threads to a file: for those who look for a reason, not for the terminal."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("diloco")
    ours.handlers, ours.propagate = [handler], False


def prepare_folder(folder: Path, *, resume: bool, fresh: bool) -> Path | None:
    """Make the run's folder and lock it; return where `fresh` moved an earlier run.

    It never trains over an earlier run unasked, never moves or fills a folder that is no run, and never enters a run
    that another process is training.
    """
    refuse_foreign(folder)
    if not resume and not fresh and any(has_log(island) or saves(island) for island in folder.glob("island-*/")):
        raise _already_holds(folder, "a run of several islands")
    kept = None
    if folder.exists():
        _lock(folder)
        if fresh:
            kept = numbered(folder.resolve())
            folder.rename(kept)
    if not resume and (found := saves(folder)):
        raise _already_holds(folder, f"a run, saved at step {int(found[-1].stem.removeprefix('save-'))}")
    if not resume and has_log(folder):
        raise _already_holds(folder, "an island's log of a run")
    if not folder.exists():
        folder.mkdir(parents=True)
        _lock(folder)
    return kept


def refuse_foreign(folder: Path) -> None:
    """Raise SaveError where a folder has something in it and is no run."""
    is_run = (folder / "config.yaml").is_file() or (folder / IDENTITY_KEY).is_file()
    if folder.exists() and not is_run and (not folder.is_dir() or any(folder.iterdir())):
        raise SaveError(f"{folder} already exists and is not a diloco run: it was left alone; set checkpoint.dir")


def _already_holds(folder: Path, what: str) -> SaveError:
    return SaveError(
        f"{folder} already holds {what}: add --resume to continue it, --fresh to start over (the old one is kept), "
        "or --set run=NAME for another run"
    )


def hold_folder(folder: Path, wait_s: float, say: Callable[[str], None]) -> None:
    """Lock a folder for a run that is about to be opened there; wait for another process that may be ending."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            _lock(folder)
        except SaveError as held:
            if time.monotonic() >= deadline:
                raise
            if wait_s:
                say(f"{held} (up to {wait_s:.0f} s)")
            wait_s = 0.0
            time.sleep(HELD_AGAIN_S)
        else:
            _held.add(folder.resolve())
            return


def _lock(folder: Path) -> None:
    """Lock a folder until this process ends, however it ends, or releases it; raise SaveError if another one has it."""
    if folder.resolve() in _held:  # by this process, for this
        _held.discard(folder.resolve())
        return
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SaveError(
            f"another process is training in {folder}: wait for it, or set run=NAME for another run"
        ) from None
    _locks.append(lock)


def refuse_taken(folder: Path) -> None:
    """Raise SaveError if another process trains in a folder; it is not locked by that."""
    if not any(Path(lock.name).parent == folder for lock in _locks):
        _lock(folder)
        release(folder)


def is_taken(folder: Path) -> bool:
    """Tell whether a process trains in a folder, this one or another."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody ever has, or it is somebody else's
        return False
    return False


_locks: list[TextIO] = []
_held: set[Path] = set()


def release(folder: Path) -> None:
    """Release a folder's lock, in a process that outlives its run."""
    for lock in [lock for lock in _locks if Path(lock.name).parent == folder]:
        _locks.remove(lock)
        lock.close()


def remove_if_refused(folder: Path) -> Callable[..., None]:
    """Return an exit callback that, after an error, removes what was made in the folder since this call, and the folder
    if that was not there. Where a part of the state has been fetched, all is kept: the same command continues."""
    before, missing = set(folder.glob("*")), [each for each in (folder, *folder.parents) if not each.exists()]

    def on_exit(error: type[BaseException] | None, *_: object) -> None:
        if error is None or any(path.name != GENESIS for path in (folder / OUTER).glob("*")):
            return
        for path in set(folder.glob("*")) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # somebody else has put something there
            for each in missing:
                each.rmdir()

    return on_exit


def numbered(folder: Path) -> Path:
    """Return the first of NAME.1, NAME.2, … that does not exist."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def has_log(folder: Path) -> bool:
    """Tell whether an island has left its log of a run there."""
    return any((folder / OUTER).glob("log-*.seg"))


def refuse_other_protocols(folder: Path) -> None:
    """Raise SaveError where the run in a folder, or an island's log in it, is of another protocol than this diloco."""
    for island in (folder, *sorted(folder.glob("island-*"))):
        read_genesis(island / OUTER)


def has_begun(folder: Path) -> bool:
    """Tell whether a run that was founded there got as far as its first record, or its founder has met others."""
    return has_log(folder) or has_state(folder) or (folder / OUTER / GENESIS).exists()


def has_state(folder: Path) -> bool:
    """Tell whether an island has left a state there, or has met others who may have one."""
    snapshots = any((folder / OUTER).glob("snapshot-*"))
    return snapshots or bool(saves(folder)) or (folder / OTHERS).exists()


def islands_in(folder: Path) -> int:
    """Count the islands with a log there whose run others can join. An island alone never gave a ticket."""
    is_open = has_log(folder) and (folder / "ticket").exists()
    return int(is_open) or sum(has_log(island) for island in folder.glob("island-*"))


def islands_to_start(folder: Path, asked: int | None, *, resume: bool, fresh: bool) -> int:
    """Return how many islands were asked for, or, to resume, have left a log; 0 stands for an island alone."""
    if resume and fresh:
        raise ConfigError("--resume continues the earlier run, --fresh starts over: use one of them")
    return asked or (islands_in(folder) if resume else 0)
