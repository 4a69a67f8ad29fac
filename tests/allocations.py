"""Fails every allocation of a tensor that is too large and that nobody has declared, in whatever thread it is made.

python tests/allocations.py MODE BLOCKS LIMIT_MB     the scenario of test_allocations.py with a model of any size
"""

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from largest import storage_of
from lives import DIGEST, Life
from team import side_by_side
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.elastic.runtime.fetching import FetchedState, fetch_state

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

        threading.Thread.run = watched  # type: ignore[method-assign]
        try:
            with _Mode(self):
                yield
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]


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


def two_islands_and_a_joiner(config: Config) -> tuple[dict[str, Life], FetchedState]:
    """Two islands train, sync, validate, save and make snapshots, while another one fetches the state of the first."""
    names, network = ("A", "B"), MemoryNetwork()
    lives = {name: Life(name, names, config, network) for name in names}
    fetched: list[FetchedState] = []

    def live(name: str) -> None:
        if name == "C":
            with lives["A"].driver.changed:
                lives["A"].driver.changed.wait_for(lambda: lives["A"].driver.applied.updates > 0, 600)
            sizes = dict.fromkeys(("momentum", "parameters"), lives["A"].trainer.layout.size)
            peers = {"A": PeerAddress("A")}
            fetched.append(fetch_state(network.transport("C"), "A", peers, DIGEST, sizes))
        else:
            lives[name].train(lambda step: False, lambda: False)

    try:
        drivers = {name: life.driver for name, life in lives.items()}
        side_by_side({**drivers, "C": drivers["A"]}, live)
    finally:
        for life in lives.values():
            life.store.close()
    return lives, fetched[0]


def watch(config: Config, values: int, limit: int) -> tuple[Allocations, dict[str, Life]]:
    """Return what the scenario has allocated; of the size of a whole vector, and of its encoding, all are counted."""
    allocations = Allocations(limit, {4 * values})
    with allocations.watched():
        lives, _ = two_islands_and_a_joiner(config)
    return allocations, lives


def main() -> None:
    mode, blocks, limit_mb = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with TemporaryDirectory() as folder:
        config = config_of(mode, Path(folder), blocks=blocks, width=768, feed_forward=2304, steps=12)
        from diloco.plan.workload import workload_of

        values = workload_of(config).parameters
        allocations, _ = watch(config, values, limit_mb << 20)
    print(f"{values} parameters, undeclared above {limit_mb} MiB: {len(allocations.undeclared)}")
    print(f"whole vectors: {allocations.counts[4 * values]}")
    print("\n".join(allocations.undeclared[:10]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
