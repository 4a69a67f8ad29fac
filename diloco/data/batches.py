"""From samples to the tensors of one process: its own slice of the island's batch, read one step ahead."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diloco.config.schema import Config, DataConfig, IslandConfig
from diloco.data.samples import Rows, Samples
from diloco.data.source import Source, source_kind
from diloco.elastic.protocol.ranges import Ranges, first, minus, size
from diloco.errors import ConfigError
from diloco.island.mesh import ProcessMesh
from diloco.units import format_size


def open_samples(config: Config) -> Samples:
    """Open the configured data, cut into samples, and refuse a batch that is larger than the training part.

    What has to be tokenised is cached beside the run's folder.
    """
    source = open_source(config.data, cache_dir=Path(config.dir).resolve().parent / "cache")
    samples = Samples(source, config.data.sequence, config.seed, config.data.validation)
    if config.island.batch > samples.train_count:
        raise ConfigError(
            f"island.batch={config.island.batch} is more than the {samples.train_count} training samples there are"
        )
    return samples


def open_source(config: DataConfig, cache_dir: Path) -> Source:
    """Open the configured data, which may have to be tokenised into the cache first; that is reported to stderr."""
    return source_kind(config).open(config, cache_dir, TokenisingProgress())


class TokenisingProgress:
    """Report to stderr every few seconds how far tokenising is: it happens once and may take minutes."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s, self._told = every_s, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told >= self._every_s:
            self._told = time.monotonic()
            share = f" of {format_size(total)}" if total else ""
            print(f"tokenising: {format_size(done)}{share}", file=sys.stderr)


AT_ONCE = 1 << 22  # values that the model predicts in validation: without gradients, large batches cost little memory


class Batches:
    """Read training batches by position; each is a list of micro-batches [rows, sequence + 1] on the device.

    Micro-batch m of the island's batch goes, in equal slices, to the data ranks: whatever the mesh, an inner step sees
    the same samples.
    """

    def __init__(self, samples: Samples, island: IslandConfig, place: ProcessMesh) -> None:
        self._samples, self._island, self._place = samples, island, place
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[Ranges, Future[list[Tensor]]] | None = None

    def read(self, batch: Ranges, following: Ranges = ()) -> list[Tensor]:
        """Return the samples at these positions; those at `following` are read meanwhile."""
        if self._ahead is not None and self._ahead[0] == batch:
            rows = self._ahead[1].result()
        else:
            rows = self._reader.submit(self._read, batch).result()
        self._ahead = (following, self._reader.submit(self._read, following)) if following else None
        return [part.to(self._place.device, non_blocking=True) for part in rows]

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _read(self, batch: Ranges) -> list[Tensor]:
        per_micro_batch = size(batch) // self._island.accumulate
        rows = per_micro_batch // self._place.data_ranks
        starts = [m * per_micro_batch + self._place.data_rank * rows for m in range(self._island.accumulate)]
        parts = [torch.from_numpy(self._rows(batch, start, rows)) for start in starts]
        return [part.pin_memory() for part in parts] if self._place.device.type == "cuda" else parts

    def _rows(self, batch: Ranges, start: int, count: int) -> Rows:
        """Return the samples at `count` of the batch's positions, after the first `start`."""
        part = minus(first(batch, start + count), first(batch, start))
        return np.concatenate([self._samples.train(lo, hi - lo) for lo, hi in part])


def validation_batches(samples: Samples, island: IslandConfig, place: ProcessMesh, count: int) -> Iterator[Tensor]:
    """Yield this process' share of `count` validation samples, rounded up to whole micro-batches; several of these at
    once where their logits stay small."""
    rows = island.batch // island.accumulate // place.data_ranks
    micro_batches = -(-count // (rows * place.data_ranks))
    values = rows * samples.sequence * samples.source.vocab
    rows *= max(n for n in range(1, micro_batches + 1) if micro_batches % n == 0 and (n == 1 or n * values <= AT_ONCE))
    for start in range(0, count, rows * place.data_ranks):
        own = samples.validation(start + place.data_rank * rows, rows)
        yield torch.from_numpy(own).to(place.device)
