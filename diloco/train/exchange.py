"""The exchange between an island's parameters and the outer state: progress is cut out of the one, results of rounds
enter from the other.

All processes of an island call the same methods in the same order; only the leader has vectors and a connection.

Progress since a fragment's last cut is measured from `anchor`: it is anchor - local. After a result has been applied,
the anchor is the new outer parameters, less the progress of earlier cuts that they do not contain. One rule follows:
the island's parameters become the anchor plus whatever was trained since the cut. Mixing and eager previews are other
choices at that point.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from diloco.config.schema import SyncConfig
from diloco.elastic.runtime.session import Update, at_once
from diloco.elastic.runtime.work import StepsDone
from diloco.island.flat import Shards
from diloco.island.layout import names_of
from diloco.island.mesh import ProcessMesh
from diloco.train.policy import AppliedResult
from diloco.train.rounds import Rounds


class Cut:
    """Hold what was trained between two cuts, computed by the first thread that needs it. As a rule that is the thread
    that encodes it, while training continues."""

    def __init__(self, progress: Tensor, work: Callable[[Tensor], None]) -> None:
        self.progress = progress  # filled when it is finished
        self._work: Callable[[Tensor], None] | None = work
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Compute the progress if that is not done yet. Any thread may call this; a second one waits for the first."""
        with self._lock:
            if self._work is not None:
                self._work(self.progress)
                self._work = None


class Exchange:
    """Cut progress out of an island's parameters for rounds, and apply the results of rounds to them."""

    def __init__(self, shards: Shards, place: ProcessMesh, sync: SyncConfig, rounds: Rounds | None) -> None:
        self._shards, self._place, self._sync, self.rounds = shards, place, sync, rounds
        fragments = place.share(rounds.fragments if rounds is not None else None)
        self._names = names_of(self._shards.layout, fragments)
        self.fragments = fragments
        self._cuts: dict[int, Cut] = {}
        self.anchor, self._local = self._vector(), self._vector()
        if rounds is not None:
            for fragment in range(len(fragments)):
                rounds.session.apply_result(fragment, self.anchor)
        self._shards.write(self.anchor)
        self._written = at_once  # returns when the device no longer reads these vectors

    def _vector(self) -> Tensor | None:
        """Allocate a vector of all parameters where the outer state lies, on the leader only. In host memory it is
        pinned for a GPU, so that copies block nothing."""
        if self.rounds is None:
            return None
        with self.rounds.driver.replica.reading() as vectors:
            like = vectors["parameters"]
        pinned = self._place.device.type == "cuda" and like.device.type == "cpu"
        return torch.empty_like(like, pin_memory=pinned)

    def launch(self, fragment: int, done: StepsDone, *, step_ms: int = 0) -> None:
        """Contribute what was trained since this fragment's last cut.

        With `sync.apply: eager`, the island continues from a preview of the result.
        """
        eager = self._sync.apply == "eager"
        cut = self._cut(fragment)
        if self.rounds is not None and self.anchor is not None and cut is not None:
            if eager:
                cut.finish()
                self.fragments.scatter(self.rounds.preview(fragment, cut.progress), self.anchor, fragment)
            self.rounds.session.start(fragment, cut.progress, done, step_ms=step_ms, ready=cut.finish)
        if eager:
            self._update(fragment, _replaced, self.anchor)

    def _cut(self, fragment: int) -> Cut | None:
        """Start a cut: from here on, progress is measured from what the island holds now. None except on the leader."""
        self._written()
        read = self._shards.start_reading(self._local, self._names[fragment])
        anchor, local = self.anchor, self._local
        if anchor is None or local is None:
            return None

        def work(progress: Tensor) -> None:
            read()
            for lo, hi, part in self.fragments.pieces(progress, fragment):
                torch.sub(anchor[lo:hi], local[lo:hi], out=part)
                anchor[lo:hi].copy_(local[lo:hi])

        cut = self._cuts[fragment] = Cut(torch.empty(self.fragments.counts[fragment], device=anchor.device), work)
        return cut

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        """Move the island to the fragment's new outer parameters, plus its progress that they do not contain and what
        it has trained in `steps` since the last cut."""
        self._finish_cut(fragment)
        previewed = launched and self._sync.apply == "eager"
        update = self._take(fragment, moves=not previewed)
        contained = self._place.share(update.owed is None if update is not None else None)
        if previewed and not contained:
            update = self._take(fragment, moves=True)
        taken = self._place.share(AppliedResult(update.step, update.owed_steps) if update is not None else None)
        if previewed and contained:
            return taken  # the phase that goes on started from a preview of it
        if launched and self._sync.apply == "mix":
            self._update(fragment, partial(_mixed, alpha=self._sync.alpha), self.anchor)
        elif not steps:  # it is where the anchor was
            self._update(fragment, _replaced, self.anchor)
        else:
            self._update(fragment, _rebased, self.anchor, self._local)
        return taken

    def _finish_cut(self, fragment: int) -> None:
        if (cut := self._cuts.pop(fragment, None)) is not None:
            cut.finish()

    def _take(self, fragment: int, *, moves: bool) -> Update | None:
        """Take the last result; `moves`: move the anchor to the outer parameters, less what they do not contain, while
        `_local` keeps where it was. None except on the leader."""
        if self.rounds is None or self.anchor is None or self._local is None:
            return None
        if not moves:
            return self.rounds.session.apply_result(fragment, None)
        self._written()
        for lo, hi in self.fragments.ranges[fragment]:
            self._local[lo:hi].copy_(self.anchor[lo:hi])
        update = self.rounds.session.apply_result(fragment, self.anchor)
        if update.owed is not None:
            for lo, hi, part in self.fragments.pieces(update.owed, fragment):
                self.anchor[lo:hi].sub_(part.to(self.anchor.device))
        return update

    def _update(self, fragment: int, rule: Callable[..., Tensor], *vectors: Tensor | None) -> None:
        self._written = self._shards.start_update(rule, *vectors, names=self._names[fragment])

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the island while the context lasts, and restore its own afterwards."""
        kept = None
        if self._local is not None:
            kept = torch.empty_like(self._local)
        self._shards.read(kept)
        self._shards.write(self.rounds.outer()["parameters"] if self.rounds is not None else None)
        try:
            yield
        finally:
            self._shards.write(kept)

    def vectors(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return what a save must hold besides these outer parameters: the anchor, where it differs from them."""
        assert self.anchor is not None
        for fragment in list(self._cuts):
            self._finish_cut(fragment)
        return {} if torch.equal(self.anchor, parameters) else {"anchor": self.anchor}

    def restore(self, vectors: Mapping[str, Tensor]) -> None:
        """Take the anchor from a save; one that holds none was made where it equalled the outer parameters."""
        assert self.anchor is not None
        self.anchor.copy_(vectors.get("anchor", vectors["parameters"]))

    def start_again(self) -> None:
        """Set the island's parameters to the anchor: for one that has just joined, the outer parameters."""
        self._shards.write(self.anchor)


# How a result enters: what the island holds, the anchor, and where that was before.


def _replaced(_: Tensor, anchor: Tensor) -> Tensor:
    return anchor


def _rebased(local: Tensor, anchor: Tensor, before: Tensor) -> Tensor:
    return anchor - (before - local)


def _mixed(local: Tensor, anchor: Tensor, *, alpha: float) -> Tensor:
    return local * alpha + anchor * (1 - alpha)
