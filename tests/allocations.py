"""Fails every allocation of a tensor that is too large and that nobody has declared, in whatever thread it is made."""

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any

from largest import storage_of
from lives import DIGEST, Life
from team import side_by_side
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diloco.checkpoint.log.store import PartialDownload
from diloco.comm.codec import rooms
from diloco.comm.codec.registry import CODECS
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.elastic.runtime.fetching import fetch_state

SYNC: dict[str, dict[str, Any]] = {"classic": {}, "overlapped": {"delay": 1}, "streaming": {"fragments": 3, "delay": 1}}


class Allocations:
    """Count new storages of the `declared` sizes in bytes; others above the limit are `undeclared`, with their stack.

    Memory that nobody has written to counts like any other.
    """

    def __init__(self, limit: int, declared: set[int]) -> None:
        self.limit, self.declared = limit, declared
        self.counts: Counter[int] = Counter()
        self.undeclared: list[str] = []
        self._lock = threading.Lock()

    def see(self, size: int) -> None:
        with self._lock:
            if size in self.declared:
                self.counts[size] += 1
            elif size > self.limit:
                self.undeclared.append(f"{size} bytes in {threading.current_thread().name}:\n" + _stack())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread and all that are started inside."""
        run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with _Mode(self):
                run(thread)

        def mapped(descriptor: int, size: int, flags: int) -> mmap:
            self.see(size)
            return mmap(descriptor, size, flags)

        threading.Thread.run = watched  # type: ignore[method-assign]
        rooms.mmap = mapped  # type: ignore[assignment, misc]
        try:
            with _Mode(self):
                yield
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]
            rooms.mmap = mmap  # type: ignore[misc]


class _Mode(TorchDispatchMode):
    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self._allocations = allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        large = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _bytes(leaf) >= 1 << 16]
        if large:
            before = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for size in {storage_of(leaf): _bytes(leaf) for leaf in large if storage_of(leaf) not in before}.values():
                self._allocations.see(size)
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _stack() -> str:
    ours = [line for line in traceback.format_stack() if "/site-packages/" not in line]
    return "".join(ours[-8:-2])


def config_of(mode: str, folder: Path, *, blocks: int, width: int, feed_forward: int, steps: int) -> Config:
    model = {"preset": "tiny", "width": width, "heads": 4, "kv_heads": 4, "feed_forward": feed_forward}
    return parse_config({
        "run": "memory", "model": {**model, "blocks": blocks}, "data": {"sequence": 8},
        "island": {"batch": 2, "device": "cpu"}, "inner": {"steps": steps, "warmup": 2},
        "sync": {"every": 4, "codec": "int8", **SYNC[mode]}, "evaluate": {"every": 2, "samples": 2},
        "elastic": {"min_islands": 2, "straggler": 100.0, "silence_s": 10.0}, "log": {"every": 1},
        "checkpoint": {"snapshot_every": 1, "dir": str(folder)},
    })  # fmt: skip


def two_islands_and_a_joiner(config: Config) -> dict[str, Life]:
    """Two islands train, sync, validate, save and make snapshots, while another one fetches the state of the first."""
    names, network = ("A", "B"), MemoryNetwork()
    lives = {name: Life(name, names, config, network) for name in names}
    fetched: list[dict[str, Tensor]] = []

    def live(name: str) -> None:
        if name == "C":
            with lives["A"].driver.changed:
                lives["A"].driver.changed.wait_for(lambda: lives["A"].driver.applied.updates > 0, 600)
            sizes = dict.fromkeys(("momentum", "parameters"), lives["A"].trainer.layout.size)
            peers = {"A": PeerAddress("A")}
            begun = PartialDownload(Path(config.checkpoint.dir or ".") / "download")
            fetched.append(fetch_state(network.transport("C"), "A", peers, DIGEST, sizes, begun).vectors())
        else:
            lives[name].train(lambda step: False, lambda: False)

    try:
        drivers = {name: life.driver for name, life in lives.items()}
        side_by_side({**drivers, "C": drivers["A"]}, live)
    finally:
        for life in lives.values():
            life.store.close()
    assert set(fetched[0]) == {"momentum", "parameters"}
    return lives


def watch(config: Config, values: int, limit: int) -> tuple[Allocations, dict[str, Life]]:
    """Return what the scenario has allocated; of the size of a whole vector, and of its encoding, all are counted."""
    encoded = CODECS[config.sync.codec].bytes_of(0, values)
    allocations = Allocations(limit, {4 * values, encoded.stop - encoded.start})
    with allocations.watched():
        lives = two_islands_and_a_joiner(config)
    return allocations, lives
