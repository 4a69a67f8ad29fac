"""Where an island's progress is measured from: the outer parameters as they were last taken.

Where rounds go on beside training, the anchor is a vector of the island's own, which each cut moves to what the island
holds. Where training waits for rounds it is the outer parameters themselves, less the island's progress that they do
not contain, worked out from its bytes where it is read: without a copy. A fragment is copied only when an update comes
before the island has taken the last one in (it is late), just before that changes them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from diloco.checkpoint.log.pinned import LEAF
from diloco.checkpoint.log.replica import Replica
from diloco.comm.codec.rooms import CPU
from diloco.comm.codec.streams import beside_training, lock_pages
from diloco.elastic.protocol.ranges import Ranges, both
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.work import Owed
from diloco.island.flat import Part, Source


class Anchor:
    """Hold the anchor of each fragment, on the leader. Whoever reads it or changes it holds the replica's lock."""

    def __init__(self, replica: Replica, fragments: Fragments, device: torch.device = CPU, *, own: bool) -> None:
        """Begin at the outer parameters. `own`: in a vector of its own, of an island that trains on this device."""
        self._replica, self._fragments, self._own, self._device = replica, fragments, own, device
        self.vector: Tensor | None = None
        self._inside: set[int] = set()  # fragments whose anchor lies in the vector
        self._owed: dict[int, Owed] = {}  # by fragment: progress that the outer parameters do not contain
        self._elsewhere: set[int] = set()  # was cut: it is what the island holds, and nothing was trained since
        if own:
            for fragment in range(len(fragments)):
                self.follow(fragment)
        else:
            replica.before_change = self._preserve

    @property
    def _outer(self) -> Tensor:
        return self._replica.vectors["parameters"]

    def empty(self) -> Tensor:
        """Return a vector like this one, with any values. Only what is written of it takes memory."""
        return torch.empty_like(self._outer)

    def read(self, fragment: int, lo: int, hi: int) -> Tensor:
        """Return a fragment's anchor from one place in the flat vector to another."""
        if fragment in self._inside:
            assert self.vector is not None
            return self.vector[lo:hi]
        assert fragment not in self._elsewhere
        return self.outer(fragment, self._owed.get(fragment), lo, hi)

    def outer(self, fragment: int, owed: Owed | None, lo: int, hi: int) -> Tensor:
        """Return the outer parameters from one place to another, less the progress that they do not contain."""
        outer = self._outer[lo:hi]
        if owed is None:
            return outer
        first = self._fragments.place(fragment, lo)
        return outer - owed(first, first + hi - lo).to(outer.device)

    def follow(self, fragment: int, owed: Owed | None = None) -> None:
        """Move a fragment's anchor to the outer parameters, less the progress that they do not contain."""
        if self._own:
            self.move(fragment, partial(self.outer, fragment, owed))
            return
        self._let_go(fragment)
        if owed is not None:
            self._owed[fragment] = owed

    def move(self, fragment: int, values: Source) -> None:
        """Move a fragment's anchor to these values, in the vector."""
        self.fill(fragment, ((lo, hi, values(lo, hi)) for lo, hi in self.leaves(fragment)))

    def fill(self, fragment: int, parts: Iterable[Part]) -> None:
        """Move a fragment's anchor to what comes in parts."""
        if self.vector is None:
            self.vector = lock_pages(self.empty(), self._device) if self._own else self.empty()
        for lo, hi, values in parts:
            self.vector[lo:hi].copy_(values)
        self._forget(fragment)
        self._inside.add(fragment)

    def cut(
        self, fragment: int, parts: Iterable[Part], preview: Callable[[int, Tensor], Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Yield the progress from the anchor to these values of the island, and move the anchor there, or to a preview
        of the result. Parts that nobody asks for are not worked out: the caller asks for all."""
        own_alone = self._own and preview is None
        for lo, hi, local in parts:
            with nullcontext() if own_alone else self._replica.reading():
                anchor = self.read(fragment, lo, hi)
                progress = anchor.to(local.device) - local
                if self._own:
                    anchor.copy_(local if preview is None else preview(lo, progress))
            yield progress
        if not self._own:
            with self._replica.reading():
                self._let_go(fragment)
                self._elsewhere.add(fragment)

    def _let_go(self, fragment: int) -> None:
        self._forget(fragment)
        if not self._inside and self.vector is not None:
            if self.vector.is_cuda:  # it may come from another stream, which must not have it while this one reads it
                self.vector.record_stream(torch.cuda.current_stream(self.vector.device))
            self.vector = None

    def _forget(self, fragment: int) -> None:
        self._elsewhere.discard(fragment)
        self._inside.discard(fragment)
        self._owed.pop(fragment, None)

    def _preserve(self, changes: Ranges) -> None:
        """Copy those fragments which are about to change in the outer parameters."""
        kept = self._inside | self._elsewhere
        about = [at for at, own in enumerate(self._fragments.ranges) if at not in kept and both(own, changes)]
        with beside_training(self._outer.device, after=True) if about else nullcontext():
            for fragment in about:
                self.move(fragment, partial(self.read, fragment))

    def leaves(self, fragment: int) -> Iterator[tuple[int, int]]:
        """Yield the stretches of a fragment in the flat vector, none longer than a leaf."""
        for first, last in self._fragments.ranges[fragment]:
            for lo in range(first, last, LEAF):
                yield lo, min(lo + LEAF, last)

    def differs(self, values: Tensor) -> bool:
        """Tell whether any fragment's anchor has other values than these."""
        return any(
            not torch.equal(self.read(fragment, lo, hi), values[lo:hi])
            for fragment in range(len(self._fragments))
            for lo, hi in self.leaves(fragment)
        )

    def whole(self) -> Tensor:
        """Return the anchor of all fragments as one vector."""
        for fragment in range(len(self._fragments)):
            if fragment not in self._inside:
                self.move(fragment, partial(self.read, fragment))
        assert self.vector is not None
        return self.vector

    def restore(self, vectors: Mapping[str, Tensor]) -> None:
        """Take the anchor from a save; one that holds none was made where it equalled the outer parameters."""
        saved = vectors.get("anchor", vectors["parameters"])
        for fragment in range(len(self._fragments)):
            outer = self._outer
            here = all(torch.equal(saved[lo:hi].to(outer.device), outer[lo:hi]) for lo, hi in self.leaves(fragment))
            if here:
                self.follow(fragment)
            else:
                self.fill(fragment, ((lo, hi, saved[lo:hi]) for lo, hi in self.leaves(fragment)))
