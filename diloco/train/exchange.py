"""Where an island's parameters and the outer state meet: progress is cut out of the one, results enter from the other.

All processes of an island call the same methods in the same order; only the leader has vectors and a connection.

`anchor` is where the progress since a fragment's last cut is measured from: anchor - local. After a result has come in
it is the new outer parameters, less what they do not contain of earlier cuts. One rule follows: the island's parameters
become the anchor plus whatever was trained since the cut. Mixing and eager previews are other choices at that place.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.config.schema import SyncConfig
from diloco.elastic.protocol.ranges import Ranges, normal
from diloco.elastic.protocol.record import Head
from diloco.elastic.runtime.session import Taken, at_once
from diloco.elastic.runtime.work import Trained
from diloco.island.flat import Shards
from diloco.island.fragments import names_of
from diloco.island.mesh import Place
from diloco.train.rounds import Rounds

NOWHERE = Head(0, 0, "")  # the head of no chain: any other is news


class Cut:
    """What was trained between two cuts. It is worked out by whoever needs it first: as a rule the thread that encodes
    it, while training goes on."""

    def __init__(self, progress: Tensor, work: Callable[[Tensor], None]) -> None:
        self.progress = progress  # filled when it is finished
        self._work: Callable[[Tensor], None] | None = work
        self._lock = threading.Lock()

    def finish(self) -> None:
        with self._lock:
            if self._work is not None:
                self._work(self.progress)
                self._work = None


class Exchange:
    def __init__(self, shards: Shards, place: Place, sync: SyncConfig, rounds: Rounds | None) -> None:
        self._shards, self._place, self._sync, self.rounds = shards, place, sync, rounds
        fragments = place.share(rounds.fragments if rounds is not None else None)
        self._names = names_of(self._shards.layout, fragments)
        self.fragments = fragments
        self.steps = 0  # inner steps done here
        self.step = 0  # the run's clock
        self.in_flight: set[int] = set()
        self._cut_at = [0] * len(fragments)  # inner steps done at the last cut
        self._tokens = [0] * len(fragments)  # since the last cut
        self.used: Ranges = ()  # samples since the last cut of any fragment
        self._cuts: dict[int, Cut] = {}
        self.anchor, self._local = self._vector(), self._vector()
        if rounds is not None and self.anchor is not None:
            self.anchor.copy_(rounds.base)
        self._shards.write(self.anchor)
        self._written = at_once  # returns when the device no longer reads these vectors

    def _vector(self) -> Tensor | None:
        """On the leader: of all parameters, where the outer state lies. In host memory it is pinned for a GPU, so that
        copies hold up nobody."""
        if self.rounds is None:
            return None
        pinned = self._place.device.type == "cuda" and self.rounds.base.device.type == "cpu"
        return torch.empty_like(self.rounds.base, pin_memory=pinned)

    def since_cut(self, fragment: int) -> int:
        """Inner steps done here."""
        return self.steps - self._cut_at[fragment]

    def owes(self, fragment: int) -> bool:
        """Whether there is progress that the outer state does not contain."""
        return self._place.any(self.rounds is not None and (self._tokens[fragment] > 0 or self.rounds.owes(fragment)))

    def trained(self, samples: Ranges, tokens: int) -> None:
        """One inner step."""
        self.steps += 1
        self.step += 1
        self._tokens = [count + tokens for count in self._tokens]
        self.used = normal((*self.used, *samples))

    def launch(self, fragment: int, *, step_ms: int = 0) -> bool:
        """Contribute what was trained since this fragment's last cut. False: nothing is left, or it is in flight."""
        if fragment in self.in_flight or not self.owes(fragment):
            return False
        eager = self._sync.apply == "eager"
        cut = self._cut(fragment)
        if self.rounds is not None and self.anchor is not None and cut is not None:
            done = Trained(self._tokens[fragment], self.used, self.since_cut(fragment))
            if eager:
                cut.finish()
                self.fragments.scatter(self.rounds.preview(fragment, cut.progress), self.anchor, fragment)
            self.rounds.start(fragment, cut.progress, done, step_ms=step_ms, ready=cut.finish)
        if eager:
            self._update(fragment, _replaced, self.anchor)
        self._cut_at[fragment], self._tokens[fragment], self.used = self.steps, 0, ()
        self.in_flight.add(fragment)
        return True

    def _cut(self, fragment: int) -> Cut | None:
        """From here on progress is measured from what the island holds now."""
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

    def finish(self, fragment: int, should_stop: Callable[[], bool]) -> bool:
        """Wait for the result of a launched fragment, and take it in. False: asked to stop before it came."""
        if fragment not in self.in_flight:
            return False
        head = NOWHERE if len(self.fragments) > 1 else None
        while True:
            over = self.rounds.finish(fragment, should_stop, head) if self.rounds is not None else None
            if (over := self._place.share(over)) is not None:
                break
            head = self._keep_up(fragment)
        if over:
            self.apply_result(fragment)
        return bool(over)

    def _keep_up(self, awaited: int) -> Head:
        """While an island waits for one fragment, rounds of others may be due: it takes part, or everybody would wait
        for everybody."""
        seen = self.rounds.due(awaited) if self.rounds is not None else None
        head, due, over = self._place.share(seen)
        if due is None:
            return NOWHERE
        if due in self.in_flight and over:
            self.apply_result(due)
        self.apply_remote_updates()
        self.launch(due)
        return head

    def apply_result(self, fragment: int) -> None:
        """The fragment's outer parameters are others by now: the island goes there with what they do not contain."""
        self._finish_cut(fragment)
        taken = self.rounds.take(fragment) if self.rounds is not None else None
        contained = self._place.any(taken is not None and taken.owed is None)
        launched = fragment in self.in_flight
        self.in_flight.discard(fragment)
        self._set_clock(taken, fragment, launched=launched)
        if launched and contained and self._sync.apply == "eager":
            return  # the phase that goes on started from a preview of it
        if taken is not None:
            self._move_anchor(fragment, taken.owed)
        if launched and self._sync.apply == "mix":
            self._update(fragment, partial(_mixed, alpha=self._sync.alpha), self.anchor)
        elif not self.since_cut(fragment):  # nothing was trained since: it is where the anchor was
            self._update(fragment, _replaced, self.anchor)
        else:
            self._update(fragment, _rebased, self.anchor, self._local)

    def _finish_cut(self, fragment: int) -> None:
        if (cut := self._cuts.pop(fragment, None)) is not None:
            cut.finish()

    def _move_anchor(self, fragment: int, owed: Tensor | None) -> None:
        """To the outer parameters, less what they do not contain; where it was is kept in `_local`."""
        assert self.rounds is not None and self.anchor is not None and self._local is not None
        self._written()
        for lo, hi in self.fragments.ranges[fragment]:
            self._local[lo:hi].copy_(self.anchor[lo:hi])
            self.anchor[lo:hi].copy_(self.rounds.base[lo:hi])
        if owed is not None:
            for lo, hi, part in self.fragments.pieces(owed, fragment):
                self.anchor[lo:hi].sub_(part.to(self.anchor.device))

    def _update(self, fragment: int, rule: Callable[..., Tensor], *vectors: Tensor | None) -> None:
        self._written = self._shards.start_update(rule, *vectors, names=self._names[fragment])

    def _set_clock(self, taken: Taken | None, fragment: int, *, launched: bool) -> None:
        """On time, nothing changes. Left behind with one fragment, an island finishes its phase: all that it has
        trained since counts on top. With several, that would carry it past launches of rounds that wait for it."""
        step, owed_steps = self._place.share((taken.step, taken.owed_steps) if taken is not None else None)
        if len(self.fragments) == 1:
            self.step = step + owed_steps + self.since_cut(fragment)
        else:
            self.step = step + self.since_cut(fragment) if launched else max(self.step, step)

    def apply_remote_updates(self) -> bool:
        """Others went on without this island, or it moved to another branch. What is in flight has its own time.

        Whether there was anything new.
        """
        moved = self.rounds.changed_fragments() if self.rounds is not None else []
        moved = [fragment for fragment in moved if fragment not in self.in_flight]
        if not self._place.any(self.rounds is not None and (bool(moved) or self.rounds.has_news())):
            return False
        for fragment in self._place.share(moved):
            self.apply_result(fragment)
        if self.rounds is not None:
            self.rounds.refresh()
        return True

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """The island holds them inside; what it trains is put back."""
        kept = None
        if self._local is not None:
            kept = torch.empty_like(self._local)
        self._shards.read(kept)
        self._shards.write(self.rounds.parameters if self.rounds is not None else None)
        try:
            yield
        finally:
            self._shards.write(kept)

    def vectors(self, parameters: Tensor) -> dict[str, Tensor]:
        """What a save must hold besides these outer parameters: where it differs from them."""
        assert self.anchor is not None
        for fragment in list(self._cuts):
            self._finish_cut(fragment)
        return {} if torch.equal(self.anchor, parameters) else {"anchor": self.anchor}

    def facts(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "step": self.step, "in_flight": sorted(self.in_flight), "cut_at": list(self._cut_at),
            "tokens": list(self._tokens), "used": self.used,
        }  # fmt: skip

    def restore(self, vectors: Mapping[str, Tensor]) -> None:
        assert self.anchor is not None
        self.anchor.copy_(vectors.get("anchor", vectors["parameters"]))

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        self.steps, self.step, self.in_flight = facts["steps"], facts["step"], set(facts["in_flight"])
        self._cut_at = list(facts["cut_at"])
        self._tokens, self.used = list(facts["tokens"]), normal((lo, hi) for lo, hi in facts["used"])

    def start_again(self, steps: int) -> None:
        """From the outer parameters, after so many inner steps of earlier lives."""
        self.steps, self._cut_at = steps, [steps] * len(self.fragments)
        self._shards.write(self.anchor)


# How a result enters: what the island holds, the anchor, and where that was before.


def _replaced(_: Tensor, anchor: Tensor) -> Tensor:
    return anchor


def _rebased(local: Tensor, anchor: Tensor, before: Tensor) -> Tensor:
    return anchor - (before - local)


def _mixed(local: Tensor, anchor: Tensor, *, alpha: float) -> Tensor:
    return local * alpha + anchor * (1 - alpha)
