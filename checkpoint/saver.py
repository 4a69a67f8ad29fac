"""Saves that training does not wait for: of a copy, in a thread of their own, one after the other."""

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from diloco.checkpoint.log.background import Pace, make_way
from diloco.checkpoint.save import write_save
from diloco.errors import SaveError

PATIENCE = timedelta(days=1)  # of processes that wait for each other, as everywhere

Written = Callable[[int, Path, float], None]  # step, where, and how many seconds it took
Failed = Callable[[SaveError], None]


class Saver:
    """Of one island: all its processes use theirs at the same steps. What became of a save is told in its thread."""

    def __init__(self, folder: Path, written: Written, failed: Failed) -> None:
        self._folder, self._written, self._failed = folder, written, failed
        self._thread: threading.Thread | None = None
        self._pace, self._begun_at = Pace(), -math.inf
        self._group: dist.ProcessGroup | None = None

    def begin(self, step: int, *, inner: dict[str, Any], outer: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Copied when it returns. It waits for the save before this one."""
        self.wait()
        inner = BlockingAsyncStager().stage(inner)
        outer = {name: tensor.to("cpu", copy=True) for name, tensor in outer.items()}
        if dist.is_initialized() and self._group is None:  # what trains goes on talking by its own
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._pace = Pace(self._time_to_spare())
        # not a daemon: a program that ends meanwhile ends when this is on disk
        self._thread = threading.Thread(target=self._write, args=(step, inner, outer, facts), name="save")
        self._thread.start()

    def _time_to_spare(self) -> float:
        """Half of what was between the last two saves: the next one is not to wait for this one."""
        before, self._begun_at = self._begun_at, time.monotonic()
        return (self._begun_at - before) / 2

    def _write(self, step: int, inner: dict[str, Any], outer: dict[str, Tensor], facts: dict[str, Any]) -> None:
        make_way()
        self._pace.begin()
        started = time.perf_counter()
        try:
            path = write_save(
                self._folder, step, inner=inner, outer=outer, facts=facts, group=self._group, rest=self._pace.rest
            )  # fmt: skip
        except SaveError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 -- a thread's outermost frame
            self._failed(SaveError(f"the save of step {step} failed: {error!r}"))
        else:
            self._written(step, path, time.perf_counter() - started)

    def wait(self) -> None:
        """For what has been begun."""
        if self._thread is not None:
            self._pace.hurry()
            self._thread.join()
            self._thread = None

    close = wait  # whoever leaves, for whatever reason, leaves when it is on disk

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
