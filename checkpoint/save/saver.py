"""A plain save: everything that the next inner step depends on, in one folder that appears at once or not at all.

Training waits until what it changes next is with the operating system: nothing is copied for that. `Saver` writes the
rest, and waits for the disk, in a thread of its own.

`DIR/save-00000400/` holds `inner/` (each process writes its shards, any mesh can load them: `inner.py`),
`outer.safetensors` (the outer state) and `facts.json`, written last.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.atomic import ASIDE, PART, appearing, publish, sync_path
from diloco.checkpoint.log.writing import Pieces, Rest, WritePace, make_way, no_rest, write_tensors
from diloco.checkpoint.save.facts import age, saves
from diloco.checkpoint.save.inner import Like, SavedInner, StagedInner, sync_rank, whole_tensors, write_rank
from diloco.errors import SaveError, first_line

KEEP = 2
MALFORMED = ValueError, KeyError, TypeError, AttributeError, OverflowError  # by what a damaged index leads to
PATIENCE = timedelta(days=1)  # of processes that wait for each other, as everywhere

Outer = Mapping[str, Tensor | Pieces]
Written = Callable[[int, Path, float], None]  # step, where, and how many seconds it took
Failed = Callable[[SaveError], None]


class Saver:
    """Write an island's saves in the background. All its processes use theirs at the same steps; whether a save was
    written or failed is reported on its thread."""

    def __init__(self, folder: Path, written: Written, failed: Failed) -> None:
        self._folder, self._written, self._failed = folder, written, failed
        self._thread: threading.Thread | None = None
        self._pace, self._begun_at = WritePace(), -math.inf
        self._group: dist.ProcessGroup | None = None

    def begin(
        self, step: int, *, inner: dict[str, Any], outer: Outer, facts: dict[str, Any],
        written: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wait for the save before this one, write the inner state, which may change then, and begin to write the rest.

        Nobody changes what `outer` gives until `written` is called, on whatever thread and however it ended.
        """
        self.wait()
        self._pace = WritePace(self._time_to_spare())
        if dist.is_initialized() and self._group is None:  # what trains goes on talking by its own
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        started = time.perf_counter()
        try:
            write_inner(self._folder, step, inner, group=self._group)
        except Exception as error:  # noqa: BLE001 -- as on the thread that writes the rest: training goes on
            written()
            self._failed(_failure(step, error))
            return
        # not a daemon: a program that ends meanwhile ends when this is on disk
        arguments = step, outer, facts, written, started
        self._thread = threading.Thread(target=self._write, args=arguments, name="save")
        self._thread.start()

    def _time_to_spare(self) -> float:
        """Return half the seconds between the last two saves: the next one is not to wait for this one."""
        before, self._begun_at = self._begun_at, time.monotonic()
        return (self._begun_at - before) / 2

    def _write(
        self, step: int, outer: Outer, facts: dict[str, Any], written: Callable[[], None], started: float
    ) -> None:
        make_way()
        self._pace.begin()
        try:
            path = finish_save(self._folder, step, outer=outer, facts=facts, group=self._group, rest=self._pace.rest)
        except Exception as error:  # noqa: BLE001 -- a thread's outermost frame
            self._failed(_failure(step, error))
        else:
            self._written(step, path, time.perf_counter() - started)
        finally:
            written()

    def wait(self) -> None:
        """Wait until the save that was begun is on disk; its thread takes no more rests."""
        if self._thread is not None:
            self._pace.hurry()
            self._thread.join()
            self._thread = None

    close = wait  # whoever leaves, for whatever reason, leaves when it is on disk

    @property
    def writing(self) -> bool:
        """Tell whether a save is being written now, in the background."""
        return self._thread is not None and self._thread.is_alive()


def _failure(step: int, error: Exception) -> SaveError:
    return error if isinstance(error, SaveError) else SaveError(f"the save of step {step} failed: {error!r}")


def write_save(
    folder: Path, step: int, *, inner: dict[str, Any], outer: Outer, facts: dict[str, Any],
    group: dist.ProcessGroup | None = None, rest: Rest = no_rest,
) -> Path:  # fmt: skip
    """Write a save in place of an earlier one of this step, and return its folder.

    All processes of the island call it, over one file system; only the leader (rank 0) needs `outer` and `facts`. A
    SaveError is raised on all of them. `group`: the process group that they communicate by, if it is not the one that
    trains.
    """
    write_inner(folder, step, inner, group=group, rest=rest)
    return finish_save(folder, step, outer=outer, facts=facts, group=group, rest=rest)


def write_inner(
    folder: Path, step: int, inner: dict[str, Any], *, group: dist.ProcessGroup | None = None, rest: Rest = no_rest
) -> None:
    """Write the first part of a save, what the inner steps depend on: it may change then, and need not be on disk yet.

    All processes of the island call it, and then `finish_save`.
    """
    part = part_of(folder, step)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def prepare() -> None:
        _clean(folder)
        (part / "inner").mkdir(parents=True)

    with _failing_whole(folder, step):
        _by_leader(prepare, group)
        staged = StagedInner.of(inner)
        _by_all(lambda: write_rank(part / "inner", rank, ranks, staged, rest, durable=False), group)


def finish_save(
    folder: Path, step: int, *, outer: Outer, facts: dict[str, Any], group: dist.ProcessGroup | None = None,
    rest: Rest = no_rest,
) -> Path:  # fmt: skip
    """Write the rest of a save, and let it appear when all of it is on disk."""
    final, part = folder / f"save-{step:08}", part_of(folder, step)

    def finish() -> None:
        write_tensors(part / "outer.safetensors", outer, rest)
        (part / "facts.json").write_text(json.dumps({"step": step, **facts}, indent=1))
        for path in (part / "facts.json", part / "inner"):
            sync_path(path)
        publish(part, final, durable=True)
        _prune(folder, final)

    with _failing_whole(folder, step):
        _by_all(lambda: sync_rank(part / "inner", dist.get_rank() if dist.is_initialized() else 0), group)
        _by_leader(finish, group)
    return final


def part_of(folder: Path, step: int) -> Path:
    """Return where a save is written until it is complete."""
    return folder / f"save-{step:08}{PART}"


@contextmanager
def _failing_whole(folder: Path, step: int) -> Iterator[None]:
    """Leave nothing of a save where the disk refuses, and raise SaveError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(part_of(folder, step), ignore_errors=True)  # the log needs the space
        raise SaveError(
            f"{folder / f'save-{step:08}'} could not be written ({first_line(error)}): free some space; earlier saves "
            "are whole"
        ) from None


def _by_leader(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Let the leader do the work; if it fails, it fails on every process, so nobody waits for one that has given up."""
    leads = not dist.is_initialized() or dist.get_rank() == 0
    _by_all(work if leads else lambda: None, group, "the leader process says why")


def _by_all(
    work: Callable[[], None], group: dist.ProcessGroup | None = None, elsewhere: str = "another process says why"
) -> None:
    """Let every process do its work; if it fails on one, it fails on all of them."""
    error: Exception | None = None
    try:
        work()
    except Exception as failed:  # noqa: BLE001 -- raised below, when the others know
        error = failed
    if dist.is_initialized():
        failures = torch.tensor([int(error is not None)])
        dist.all_reduce(failures, group=group)
        if failures.item() and error is None:
            error = OSError(elsewhere)
    if error is not None:
        raise error


def _clean(folder: Path) -> None:
    """Remove what a writer left when it died. One that died while it replaced a save left that as `.aside`: where there
    is no other, it gets its name back."""
    for left_over in folder.glob(f"save-*{PART}"):
        shutil.rmtree(left_over)
    for aside in folder.glob(f"save-*{ASIDE}"):
        if aside.with_suffix("").exists():
            shutil.rmtree(aside)
        else:
            aside.rename(aside.with_suffix(""))


def _prune(folder: Path, newest: Path) -> None:
    """Remove old saves, by age and not by name: a clock of many islands may go back. Each is renamed first, so dying
    here leaves none that looks whole."""
    others = sorted((save for save in saves(folder) if save != newest), key=age)
    for old in others[: 1 - KEEP]:
        shutil.rmtree(old.rename(old.with_name(old.name + PART)))


def write_outer_save(folder: Path, step: int, outer: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Write a save of an outer state by itself: nothing can be resumed from it, but it holds the model."""
    final = folder / f"save-{step:08}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with appearing(final, folder / (final.name + PART)) as part:
            part.mkdir()
            write_tensors(part / "outer.safetensors", outer)
            (part / "facts.json").write_text(json.dumps({**facts, "step": step}, indent=1))
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{final} could not be written ({first_line(error)})") from None
    return final


def read_outer(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a save's outer state by name, on the CPU; raise SaveError where they cannot be read."""
    try:
        tensors: dict[str, Tensor] = load_file(folder / "outer.safetensors")
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{folder}/outer.safetensors cannot be read ({error}): delete {folder} to fall back") from None
    return tensors


def read_inner(folder: Path, into: dict[str, Any]) -> None:
    """Fill the tensors of `into`, each process its own shards, whatever mesh wrote them. All processes call it.

    `rng.*` entries that the save lacks are removed from `into`: they belong to processes that did not exist when it was
    written.
    """

    def fill() -> None:
        saved = SavedInner(folder / "inner")
        known = {path[0] for path in saved.leaves}
        for name in [name for name in into if name.startswith("rng.") and name not in known]:
            del into[name]
        saved.fill(into)

    _read_inner(folder, lambda: _by_all(fill))


def read_inner_tree(folder: Path, like: Like = whole_tensors, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return a save's inner state, whatever it holds, in this process' memory; of a tensor that is cut as `like` says,
    this process' part. All processes call it."""
    state: list[dict[str, Any]] = []
    _read_inner(folder, lambda: _by_all(lambda: state.append(SavedInner(folder / "inner").read(like)), group))
    return state[0]


def _read_inner(folder: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, SafetensorError, RuntimeError, *MALFORMED) as error:
        raise SaveError(
            f"{folder}/inner cannot be loaded ({first_line(error)}): delete {folder} to fall back"
        ) from None
