"""Where an island's parameters and the outer state meet: progress is cut out of the one, results enter from the other.

All processes of an island call the same methods in the same order; only the leader has vectors and a connection.

`anchor` is where the progress since a fragment's last cut is measured from: anchor - local. After a result has come in
it is the new outer parameters, less what they do not contain of earlier cuts. One rule follows: the island's parameters
become the anchor plus whatever was trained since the cut. Mixing and eager previews are other choices at that place.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from diloco.alone import Alone
from diloco.config import SyncConfig
from diloco.elastic.ranges import Ranges, normal
from diloco.elastic.record import Head
from diloco.elastic.work import Trained
from diloco.fragments import names_of
from diloco.outer import Layout
from diloco.place import Place
from diloco.together import Together

Outside = Alone | Together
NOWHERE = Head(0, 0, "")  # the head of no chain: any other is news


class Parameters(Protocol):
    """What is trained, as its owner hands it out: whole parameters, by name."""

    layout: Layout

    def read(self, out: Tensor | None, names: Collection[str] | None = None) -> None: ...

    def write(self, vector: Tensor | None, names: Collection[str] | None = None) -> None: ...


class Exchange:
    def __init__(self, parameters: Parameters, place: Place, sync: SyncConfig, outside: Outside | None) -> None:
        self._parameters, self._place, self._sync, self.outside = parameters, place, sync, outside
        fragments = place.share(outside.fragments if outside is not None else None)
        self._names = names_of(parameters.layout, fragments)
        self.fragments = fragments
        self.steps = 0  # inner steps done here
        self.step = 0  # the run's clock
        self.in_flight: set[int] = set()
        self._cut_at = [0] * len(fragments)  # inner steps done at the last cut
        self._contained_at = [0] * len(fragments)  # and at the last one that the outer state contains
        self._tokens = [0] * len(fragments)  # since the last cut
        self.used: Ranges = ()  # samples since the last cut of any fragment
        self.anchor = outside.base.clone() if outside is not None else None
        pinned = outside is not None and place.device.type == "cuda"
        self._local = torch.empty(fragments.count, pin_memory=pinned) if outside is not None else None
        parameters.write(self.anchor)

    def owes(self, fragment: int) -> bool:
        """Whether there is progress that the outer state does not contain."""
        return self._place.any(self.outside is not None and (self._tokens[fragment] > 0 or self.outside.owes(fragment)))

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
        local = self._read(fragment)
        if self.outside is not None and self.anchor is not None and local is not None:
            progress = self.fragments.gather(self.anchor, fragment) - local
            done = Trained(self._tokens[fragment], self.used, self.steps - self._cut_at[fragment])
            start = self.outside.preview(fragment, progress) if eager else local
            self.outside.start(fragment, progress, done, step_ms=step_ms)
            self.fragments.scatter(start, self.anchor, fragment)
        if eager:
            self._parameters.write(self.anchor, self._names[fragment])
        self._cut_at[fragment], self._tokens[fragment], self.used = self.steps, 0, ()
        self.in_flight.add(fragment)
        return True

    def finish(self, fragment: int, should_stop: Callable[[], bool]) -> bool:
        """Wait for the result of a launched fragment, and take it in. False: asked to stop before it came."""
        if fragment not in self.in_flight:
            return False
        head = NOWHERE if len(self.fragments) > 1 else None
        while True:
            over = self.outside.finish(fragment, should_stop, head) if self.outside is not None else None
            if (over := self._place.share(over)) is not None:
                break
            head = self._keep_up()
        if over:
            self.take(fragment)
        return bool(over)

    def _keep_up(self) -> Head:
        """While an island waits for one fragment, rounds of others may be due: it takes part, or everybody would wait
        for everybody."""
        head, due, over = self._place.share(self.outside.due() if isinstance(self.outside, Together) else None)
        if due in self.in_flight and over:
            self.take(due)
        self.take_what_moved()
        self.launch(due)
        return head

    def take(self, fragment: int) -> None:
        """The fragment's outer parameters are others by now: the island goes there with what they do not contain."""
        taken = self.outside.take(fragment) if self.outside is not None else None
        contained = self._place.any(taken is not None and taken.owed is None)
        launched = fragment in self.in_flight
        self.in_flight.discard(fragment)
        if launched and contained:
            self._contained_at[fragment] = self._cut_at[fragment]
        self._set_clock(taken.step if taken is not None else 0, fragment, launched=launched)
        if launched and contained and self._sync.apply == "eager":
            return  # the phase that goes on started from a preview of it
        local = self._read(fragment)
        if self.outside is not None and self.anchor is not None and local is not None and taken is not None:
            progress = self.fragments.gather(self.anchor, fragment) - local
            anchor = self.fragments.gather(self.outside.base, fragment)
            if taken.owed is not None:
                anchor = anchor - taken.owed
            self.fragments.scatter(anchor, self.anchor, fragment)
            mixes = self._sync.apply == "mix" and launched
            start = _mixed(local, anchor, self._sync.alpha) if mixes else anchor - progress
            self.fragments.scatter(start, self._local, fragment)
        self._parameters.write(self._local, self._names[fragment])

    def _set_clock(self, step: int, fragment: int, *, launched: bool) -> None:
        """On time, nothing changes. Left behind with one fragment, an island finishes its phase: all that it has
        trained since counts on top. With several, that would carry it past launches of rounds that wait for it."""
        step = self._place.share(step)
        if len(self.fragments) == 1:
            self.step = step + self.steps - self._contained_at[fragment]
        else:
            self.step = step + self.steps - self._cut_at[fragment] if launched else max(self.step, step)

    def take_what_moved(self) -> bool:
        """Others went on without this island, or it moved to another branch. What is in flight has its own time.

        Whether there was anything new.
        """
        moved = self.outside.moved() if self.outside is not None else []
        moved = [fragment for fragment in moved if fragment not in self.in_flight]
        if not self._place.any(self.outside is not None and (bool(moved) or self.outside.poll())):
            return False
        for fragment in self._place.share(moved):
            self.take(fragment)
        if self.outside is not None:
            self.outside.look()
        return True

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """The island holds them inside; what it trains is put back."""
        kept = None
        if self._local is not None:
            kept = torch.empty_like(self._local)
        self._parameters.read(kept)
        self._parameters.write(self.outside.parameters if self.outside is not None else None)
        try:
            yield
        finally:
            self._parameters.write(kept)

    def vectors(self) -> dict[str, Tensor]:
        """What a save must hold besides the outer state: where it differs from that."""
        assert self.outside is not None and self.anchor is not None
        return {} if torch.equal(self.anchor, self.outside.parameters) else {"anchor": self.anchor}

    def facts(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "step": self.step, "in_flight": sorted(self.in_flight), "cut_at": self._cut_at,
            "contained_at": self._contained_at, "tokens": self._tokens, "used": self.used,
        }  # fmt: skip

    def restore(self, vectors: Mapping[str, Tensor]) -> None:
        assert self.anchor is not None
        self.anchor.copy_(vectors.get("anchor", vectors["parameters"]))

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        self.steps, self.step, self.in_flight = facts["steps"], facts["step"], set(facts["in_flight"])
        self._cut_at, self._contained_at = list(facts["cut_at"]), list(facts["contained_at"])
        self._tokens, self.used = list(facts["tokens"]), normal((lo, hi) for lo, hi in facts["used"])

    def _read(self, fragment: int) -> Tensor | None:
        """The fragment's own vector of what the island holds now, on the leader."""
        self._parameters.read(self._local, self._names[fragment])
        return None if self._local is None else self.fragments.gather(self._local, fragment).clone()


def _mixed(local: Tensor, outer: Tensor, alpha: float) -> Tensor:
    return local * alpha + outer * (1 - alpha)
