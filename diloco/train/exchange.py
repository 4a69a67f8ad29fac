"""The exchange between an island's parameters and the outer state: progress is cut out of the one, results of rounds
enter from the other.

All processes of an island call the same methods in the same order; only the leader has vectors and a connection.

Progress since a fragment's last cut is measured from its anchor (`anchor.py`): it is anchor - local. After a result has
been applied, the anchor is the new outer parameters, less the progress of earlier cuts that they do not contain. One
rule follows: the island's parameters become the anchor plus whatever was trained since the cut. Mixing and eager
previews are other choices at that point.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor

from diloco.comm.codec.streams import lock_pages
from diloco.config.schema import Config
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.session import Update
from diloco.elastic.runtime.work import StepsDone
from diloco.island.flat import Part, Shards, Source
from diloco.island.layout import names_of
from diloco.island.mesh import ProcessMesh
from diloco.train.anchor import Anchor
from diloco.train.policy import AppliedResult
from diloco.train.rounds import Rounds


def stages(on_gpu: bool, config: Config) -> bool:
    """Tell whether a cut copies what the island holds and works it out later: where a GPU trains on and the anchor lies
    on the host. Elsewhere it is worked out at once, without a copy."""
    return on_gpu and config.sync.trains_on and config.island.outer == "host"


class Exchange:
    """Cut progress out of an island's parameters for rounds, and apply the results of rounds to them."""

    def __init__(self, shards: Shards, place: ProcessMesh, config: Config, rounds: Rounds | None) -> None:
        self._shards, self._place, self._sync, self.rounds = shards, place, config.sync, rounds
        fragments = place.share(rounds.fragments if rounds is not None else None)
        self._names = names_of(self._shards.layout, fragments)
        self.fragments: Fragments = fragments
        self._staged = stages(place.device.type == "cuda", config)
        self._eager = config.sync.apply == "eager"
        self._own = config.sync.trains_on  # from an anchor of its own
        self._held: set[int] = set()  # fragments whose anchor is what the island holds, since their cut
        self._written: Callable[[], None] = lambda: None  # returns when the device no longer reads our vectors
        self._anchor: Anchor | None = None
        self._local: Tensor | None = None  # where a cut is staged
        with self._reading():
            if rounds is not None:
                for fragment in range(len(fragments)):
                    rounds.session.apply_result(fragment)
                replica = rounds.driver.replica
                self._anchor = Anchor(replica, fragments, place.device, own=self._own)
                self._local = lock_pages(self._anchor.empty(), place.device) if self._staged else None
            self.start_again()

    def _reading(self) -> AbstractContextManager[object]:
        """Keep the outer state as it is until the block ends, on the leader."""
        return nullcontext() if self.rounds is None else self.rounds.driver.replica.reading()

    def launch(self, fragment: int, done: StepsDone, *, step_ms: int = 0) -> None:
        """Contribute what was trained since this fragment's last cut.

        With `sync.apply: eager`, the island continues from a preview of the result.
        """
        self._written()
        parts = self._parts(fragment)
        if self.rounds is not None and self._anchor is not None:
            preview = self.rounds.previewing() if self._eager else None
            progress = (part.to(self._place.device) for part in self._anchor.cut(fragment, parts, preview))
            now = not self._staged or self._eager
            self.rounds.session.start(fragment, progress, done, step_ms=step_ms, at_once=now)
        else:
            for _ in parts:  # all processes bring their shards
                pass
        if not self._own:
            self._held.add(fragment)
        if self._eager:
            self._update(fragment, _replaced, self._anchor_of(fragment))

    def _parts(self, fragment: int) -> Iterator[Part]:
        """Return what the island holds of a fragment now, in parts; it may be staged by now, and is read later."""
        if not self._staged:
            return self._shards.parts(self._names[fragment])
        read = self._shards.start_reading(self._local, self._names[fragment])
        return self._staged_parts(fragment, read)

    def _staged_parts(self, fragment: int, read: Callable[[], None]) -> Iterator[Part]:
        if self._anchor is None or self._local is None:
            return
        read()
        for lo, hi in self._anchor.leaves(fragment):
            yield lo, hi, self._local[lo:hi]

    def keep_anchor(self) -> None:
        """Keep what the island holds where that is an anchor: training goes on before a result has come."""
        for fragment in sorted(self._held):
            parts = self._shards.parts(self._names[fragment])
            if self._anchor is None:
                for _ in parts:
                    pass
            else:
                with self._reading():
                    self._anchor.fill(fragment, parts)
        self._held.clear()

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        """Move the island to the fragment's new outer parameters, plus its progress that they do not contain and what
        it has trained in `steps` since the last cut."""
        previewed = launched and self._eager
        if self.rounds is not None:
            self.rounds.session.finish_encoding()
        self._held.discard(fragment)
        with self._reading():
            update = None if self.rounds is None else self.rounds.session.apply_result(fragment)
            contained = self._place.share(update.owed is None if update is not None else None)
            taken: AppliedResult
            taken = self._place.share(AppliedResult(update.step, update.owed_steps) if update is not None else None)
            if previewed and contained:
                return taken  # the phase that goes on started from a preview of it
            if launched and self._sync.apply == "mix":
                self._move(fragment, update, partial(_mixed, alpha=self._sync.alpha))
            elif not steps:  # it is where the anchor was
                self._move(fragment, update, _replaced)
            else:
                self._move(fragment, update, _rebased, from_before=True)
        return taken

    def _move(
        self, fragment: int, update: Update | None, rule: Callable[..., Tensor], *, from_before: bool = False
    ) -> None:
        """Move the island by a rule, and the anchor to the outer parameters, less what they do not contain."""
        if self._anchor is None or self.rounds is None:
            self._update(fragment, rule, *([None, None] if from_before else [None]))
            return
        owed = None if update is None else update.owed
        before, new = partial(self._anchor.read, fragment), partial(self._anchor.outer, fragment, owed)
        if self._local is not None:  # the device reads these vectors while training goes on
            self._written()
            for lo, hi in self._anchor.leaves(fragment) if from_before else ():
                self._local[lo:hi].copy_(before(lo, hi))
            self._anchor.follow(fragment, owed)
            self._update(fragment, rule, *([before, self._local] if from_before else [before]))
            return
        self._update(fragment, rule, *([new, before] if from_before else [new]))
        self._written()
        self._anchor.follow(fragment, owed)

    def _anchor_of(self, fragment: int) -> Source | None:
        return None if self._anchor is None else partial(self._anchor.read, fragment)

    def _update(self, fragment: int, rule: Callable[..., Tensor], *vectors: Tensor | Source | None) -> None:
        self._written = self._shards.start_update(rule, *vectors, names=self._names[fragment])

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the island while the context lasts, and restore its own afterwards."""
        self._written()
        if self._place.share(self._holds_outer()):
            yield
            return
        kept = self._anchor.empty() if self._anchor is not None else None
        self._shards.read(kept)
        with self._reading():
            self._shards.write(self.rounds.driver.replica.vectors["parameters"] if self.rounds is not None else None)
        try:
            yield
        finally:
            self._shards.write(kept)

    def _holds_outer(self) -> bool:
        """Tell whether the island holds the outer parameters now. Only the leader's answer counts."""
        same = True
        with self._reading():
            for lo, hi, values in self._shards.parts():
                if self.rounds is not None and same:
                    outer = self.rounds.driver.replica.vectors["parameters"][lo:hi]
                    same = bool((outer.to(values.device) == values).all())
        return same

    def vectors(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return what a save must hold besides these outer parameters: the anchor, where it differs from them."""
        assert self._anchor is not None and self.rounds is not None
        self.rounds.session.finish_encoding()
        with self._reading():
            return {"anchor": self._anchor.whole()} if self._anchor.differs(parameters) else {}

    def restore(self, vectors: Mapping[str, Tensor]) -> None:
        """Take the anchor from a save; one that holds none was made where it equalled the outer parameters."""
        assert self._anchor is not None
        with self._reading():
            self._anchor.restore(vectors)

    def start_again(self) -> None:
        """Set the island's parameters to the anchor: for one that has just joined, the outer parameters."""
        with self._reading():
            for fragment in range(len(self.fragments)):
                self._update(fragment, _replaced, self._anchor_of(fragment))
                self._written()


# How a result enters: what the island holds, the anchor, and where that was before.


def _replaced(_: Tensor, anchor: Tensor) -> Tensor:
    return anchor


def _rebased(local: Tensor, anchor: Tensor, before: Tensor) -> Tensor:
    return anchor - (before - local)


def _mixed(local: Tensor, anchor: Tensor, *, alpha: float) -> Tensor:
    return local * alpha + anchor * (1 - alpha)
