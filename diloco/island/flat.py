"""Trainable parameters, wherever their shards lie, as parts of one flat fp32 vector that the leader has.

Values travel in buckets of at most 64 MiB (layout.py), so that no accelerator ever holds the whole model twice. All
processes of an island call the same methods in the same order; only the leader has vectors, others pass None.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.island.layout import LIMIT, Bucket, Layout, buckets_of
from diloco.island.mesh import ProcessMesh
from diloco.island.parallel import held, overlap, slices

AT_ONCE = 1 << 20  # values that a process by itself copies at a time on a CPU: they stay in the cache

Part = tuple[int, int, Tensor]  # from, to in the flat vector, and the values there
Source = Callable[[int, int], Tensor]  # the values from one place in the flat vector to another
Rule = Callable[..., Tensor]  # (what is there, a value of each vector) -> what is there from now on, element by element


class Shards:
    """Copy an island's parameters, wherever their shards lie, to and from the leader's flat vectors."""

    def __init__(self, parameters: Mapping[str, Tensor], place: ProcessMesh, *, limit: int | None = None) -> None:
        few = place.alone and place.device.type == "cpu"
        self._place, self._limit = place, limit or (AT_ONCE if few else LIMIT)
        self.layout = Layout.of(parameters.items())
        self._held = {name: held(parameter, place) for name, parameter in parameters.items()}
        self._copies = Copies(place.device)

    def read(self, out: Tensor | None, names: Collection[str] | None = None) -> None:
        """Copy the parameters (or those named) to their places in the leader's vector."""
        self.start_reading(out, names)()

    @torch.no_grad()
    def start_reading(self, out: Tensor | None, names: Collection[str] | None = None) -> Callable[[], None]:
        """Start to copy as `read` does, beside training.

        The values are complete when the returned function has been called, from any thread. Whoever changes the
        parameters next calls `settle` first.
        """
        with self._copies.beside():
            for bucket in self._buckets(names):
                if self._place.alone:
                    self._read_alone(bucket, out)
                else:
                    self._read_together(bucket, out)
        return self._copies.mark()

    @torch.no_grad()
    def parts(self, names: Collection[str] | None = None) -> Iterator[Part]:
        """Yield the parameters (or those named) as they are now, stretch by stretch in canonical order. All processes
        go through all of them, and only the leader gets their values; nobody trains meanwhile."""
        for bucket in self._buckets(names):
            values = self._gathered(bucket) if self._place.alone else self._reduced(bucket)
            for (lo, hi), part in _cut(values, bucket.stretches()):
                yield lo, hi, part

    def _gathered(self, bucket: Bucket) -> Tensor:
        values = torch.empty(bucket.count, device=self._place.device)
        for piece, lo, hi in bucket.places():
            values[lo:hi].view(piece.shape).copy_(self._held[piece.name].values[slices(piece.box)])
        return values

    def settle(self) -> None:
        """Queue later changes of the parameters behind the copies that were started; the caller does not wait."""
        self._copies.settle()

    def write(self, vector: Tensor | None, names: Collection[str] | None = None) -> None:
        """Set the parameters (or those named) from the leader's vector."""
        self.start_update(lambda _, value: value, vector, names=names)()

    @torch.no_grad()
    def start_update(
        self, rule: Rule, *vectors: Tensor | Source | None, names: Collection[str] | None = None
    ) -> Callable[[], None]:
        """Change the parameters (or those named) in place, by a rule over the leader's vectors, whole or read stretch
        by stretch. Training continues with them; the vectors must not change before the returned function has been
        called."""
        self.settle()
        for bucket in self._buckets(names):
            parts = [self._spread(bucket, vector) for vector in vectors]
            for piece, lo, hi in bucket.places():
                if (both := overlap(piece.box, self._held[piece.name])) is not None:
                    here, there = both
                    values = self._held[piece.name].values[here]
                    values.copy_(rule(values, *(part[lo:hi].view(piece.shape)[there] for part in parts)))
        return self._copies.mark_training()

    def _buckets(self, names: Collection[str] | None) -> list[Bucket]:
        return buckets_of(self.layout, names, self._limit)

    def _read_alone(self, bucket: Bucket, out: Tensor | None) -> None:
        assert out is not None  # there is one process, and it is the leader
        for piece, _, _ in bucket.places():
            values = self._held[piece.name].values
            room = out[piece.start : piece.start + piece.count].view(piece.shape)
            room.copy_(values[slices(piece.box)], non_blocking=values.device == self._place.device)

    def _read_together(self, bucket: Bucket, out: Tensor | None) -> None:
        values = self._reduced(bucket)
        if out is not None:
            for (lo, hi), part in _cut(values, bucket.stretches()):
                out[lo:hi].copy_(part, non_blocking=True)

    def _reduced(self, bucket: Bucket) -> Tensor:
        """Return the bucket's values, which only the leader gets."""
        values = torch.zeros(bucket.count, device=self._place.device)
        for piece, lo, hi in bucket.places():
            mine = self._held[piece.name]
            if mine.gives and (both := overlap(piece.box, mine)) is not None:
                here, there = both
                values[lo:hi].view(piece.shape)[there] = mine.values[here]
        # as whole numbers: one gives its bits and all others zero, and a sum of those rounds nothing
        dist.reduce(values.view(torch.int32), dst=0)
        return values

    def _spread(self, bucket: Bucket, vector: Tensor | Source | None) -> Tensor:
        """Return the bucket's values on this process' device."""
        stretches = bucket.stretches()
        read: Source | None = (lambda lo, hi: vector[lo:hi]) if isinstance(vector, Tensor) else vector
        if read is not None and len(stretches) == 1:
            source = read(*stretches[0])
            values = source.to(self._place.device, non_blocking=source.is_pinned())
        else:
            values = torch.empty(bucket.count, device=self._place.device)
            if read is not None:
                for (lo, hi), part in _cut(values, stretches):
                    source = read(lo, hi)
                    part.copy_(source, non_blocking=source.is_pinned())
        if not self._place.alone:
            dist.broadcast(values, src=0)
        return values


def _cut(values: Tensor, stretches: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    at = 0
    for lo, hi in stretches:
        yield (lo, hi), values[at : at + hi - lo]
        at += hi - lo


class Copies:
    """Order copies between a device and host memory so that training does not wait for them.

    On a CPU there is nothing to wait for. What is queued `beside` runs on a stream of its own: after what training had
    queued by then, and before whatever it queues after `settle`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: torch.cuda.Event | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Queue the work inside on a stream of its own, after what training has queued so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield
            self._pending = self._side.record_event(torch.cuda.Event(blocking=True))

    def settle(self) -> None:
        """Place all later work of training behind the copies. The device waits for them, the caller does not."""
        if self._pending is not None:
            torch.cuda.current_stream(self._device).wait_event(self._pending)
            self._pending = None

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for what was queued beside so far, for any thread that needs it."""
        return _nothing if self._pending is None else self._pending.synchronize

    def mark_training(self) -> Callable[[], None]:
        """Return a function that waits for what training has queued so far, for any thread that needs it."""
        if self._side is None:
            return _nothing
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(blocking=True)).synchronize


def _nothing() -> None:
    pass
