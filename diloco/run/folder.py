"""A run's folder: made, locked, set aside, and who writes down there what happens."""

import fcntl
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import TextIO

from diloco.checkpoint.save import saves
from diloco.config.file import render_config
from diloco.config.schema import SINKS, Config
from diloco.errors import SaveError
from diloco.report.events import Events, JsonLines, Sink
from diloco.report.terminal import open_view

OUTER = "outer"  # in an island's folder: its log and snapshots of the outer state


def nothing_to_say() -> str:
    return ""


def open_folder(
    config: Config,
    events: Events,
    *,
    resume: bool,
    fresh: bool,
    view: bool = True,
    prepare: Callable[[], str] = nothing_to_say,
) -> None:
    """`prepare` is called once the folder is locked, before anything in it is changed; it returns a note or nothing."""
    folder = Path(config.dir)
    try:
        kept = prepare_folder(folder, resume=resume, fresh=fresh)
        note = prepare()
        (folder / "config.yaml").write_text(render_config(config), encoding="utf-8")
        log_to(folder / "diloco.log")
        for sink in _sinks(config, resume=resume):
            events.attach(sink)
        if view:
            events.attach(open_view())
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None
    for text in (f"the earlier run is kept as {kept}" if kept is not None else "", note):
        if text:
            events.emit("note", text=text)


def log_to(path: Path) -> None:
    """Warnings of the network's threads: for those who look for a reason, not for the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("diloco")
    ours.handlers, ours.propagate = [handler], False


def prepare_folder(folder: Path, *, resume: bool, fresh: bool) -> Path | None:
    """Make the run's folder and lock it; returns where `fresh` moved an earlier run.

    Never trains over an earlier run unasked, never moves or fills a folder that is no run, never joins a run that
    another process is at.
    """
    if folder.exists() and not is_run(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise SaveError(f"{folder} is there already and is no run of ours: it was left alone; set checkpoint.dir")
    if not resume and not fresh and any(has_log(island) or saves(island) for island in folder.glob("island-*/")):
        raise SaveError(
            f"{folder} already holds a run of several islands: add --resume to go on with it, --fresh to start again "
            "(the old one is kept), or --set run=NAME for another run"
        )
    kept = None
    if folder.exists():
        _lock(folder)
        if fresh:
            kept = _free_name(folder.resolve())
            folder.rename(kept)
    if not resume and (found := saves(folder)):
        raise SaveError(
            f"{folder} already holds a run, saved at step {int(found[-1].stem.removeprefix('save-'))}: add --resume to "
            "go on with it, --fresh to start again (the old one is kept), or --set run=NAME for another run"
        )
    if not resume and has_log(folder):
        raise SaveError(
            f"{folder} already holds an island's log of a run: add --resume to go on with it, --fresh to start again "
            "(the old one is kept), or --set run=NAME for another run"
        )
    if not folder.exists():
        folder.mkdir(parents=True)
        _lock(folder)
    return kept


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "identity.key").is_file()


def _lock(folder: Path) -> None:
    """Held until this process ends, however it ends, or releases it."""
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SaveError(
            f"another process is training in {folder}: wait for it, or set run=NAME for another run"
        ) from None
    _locks.append(lock)


_locks: list[TextIO] = []


def release(folder: Path) -> None:
    """For a process that goes on when its run has ended."""
    for lock in [lock for lock in _locks if Path(lock.name).parent == folder]:
        _locks.remove(lock)
        lock.close()


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return name


def _sinks(config: Config, *, resume: bool) -> Iterator[Sink]:
    yield JsonLines(Path(config.dir) / "events.jsonl", append=resume)
    for name in config.log.wanted:
        yield resolve_name(SINKS[name])(config)


def has_log(folder: Path) -> bool:
    """Whether an island has left its log of a run there."""
    return any((folder / OUTER).glob("log-*.seg"))


def islands_in(folder: Path) -> int:
    """How many islands of a run that others can join have left a log there."""
    is_open = has_log(folder) and not is_closed(folder)
    return int(is_open) or sum(has_log(island) for island in folder.glob("island-*"))


def is_closed(folder: Path) -> bool:
    """Whether the run in this folder is of an island alone: nobody was ever given a ticket."""
    return not (folder / "ticket").exists()
