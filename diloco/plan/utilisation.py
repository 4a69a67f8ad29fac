"""Compute an accelerator's utilisation by bandwidth: the model of Streaming DiLoCo's table (2501.18512).

A step is the forward of each block, 1/(3L) of it, and the backward, 2/(3L), in reverse order. A block's reduction is
queued on one link, first in first out and without latency, when its backward ends; its forward `tau + 1` steps later
waits for it. What differs between methods is which blocks are reduced after which step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.floating[Any]]

GRID_GBIT: Numbers = np.logspace(-1, 3, 50)  # the published figures lie on it
WIRE_BITS = 13.46 / 16  # that the link carries for each bit of payload; with it the table comes out
BLOCKS_A_FRAGMENT = 3
TAU = {"data-parallel": 0, "diloco": 0, "streaming": 0, "overlap": 1}
METHODS = tuple(TAU)
DRIFT_STEPS = 400  # of a link that is hardly too slow: by then the slack of tau steps is used up, or next to nothing


@dataclass(frozen=True)
class Training:
    """Describe a training as the table does: blocks, seconds of a step, parameters, method."""

    layers: int
    step_s: float
    params: int
    every: int = 100
    method: str = "overlap"
    bits: float = 16.0  # of payload for each parameter

    @property
    def fragments(self) -> tuple[tuple[int, ...], ...]:
        """Return the blocks that are reduced together.

        Streaming deals them out in strides, so that each fragment has early and late blocks.
        """
        if self.method in ("data-parallel", "diloco"):
            return (tuple(range(self.layers)),)
        count = -(-self.layers // BLOCKS_A_FRAGMENT)
        return tuple(tuple(range(first, self.layers, count)) for first in range(count))

    @property
    def gap(self) -> int:
        """Return the steps from one launch to the next."""
        if self.method == "data-parallel":
            return 1
        return max(1, round(self.every / len(self.fragments)))

    @property
    def pass_steps(self) -> int:
        """Return the steps in which every fragment is launched once."""
        return self.gap * len(self.fragments)

    def reduction_s(self, gbit_per_s: Numbers) -> Numbers:
        """Return the seconds that the link needs for one block, at each rate."""
        return self.params / self.layers * self.bits * WIRE_BITS / (gbit_per_s * 1e9)


def utilisation(training: Training, gbit_per_s: Sequence[float] | Numbers) -> Numbers:
    """Return the share of the time that computes, in the steady state, for each bandwidth in Gbit/s."""
    rates = np.asarray(gbit_per_s, dtype=float)
    tau = TAU[training.method]
    passes = 1 + math.ceil(tau * DRIFT_STEPS / training.pass_steps)
    before, after = _Clock(training, rates, tau).times_after(passes, 2 * passes)
    compute_s = training.pass_steps * training.step_s
    link_s = training.layers * training.reduction_s(rates)
    return np.minimum(passes * compute_s / (after - before), compute_s / link_s)


def bandwidth_for(training: Training, targets: Sequence[float]) -> list[float | None]:
    """Return the first point of the grid, in Gbit/s, that reaches each target; None where none does."""
    found = utilisation(training, GRID_GBIT)
    reached = [np.flatnonzero(found >= target) for target in targets]
    return [float(GRID_GBIT[points[0]]) if len(points) else None for points in reached]


class _Clock:
    """Simulate all bandwidths at once. Steps in which nothing is sent or awaited are skipped in one go."""

    def __init__(self, training: Training, rates: Numbers, tau: int) -> None:
        self.training, self.tau = training, tau
        self.now, self.link_free = np.zeros_like(rates), np.zeros_like(rates)
        self._reduction_s = training.reduction_s(rates)
        self._forward_s = training.step_s / (3 * training.layers)  # of a block; its backward takes twice as long
        self._arrivals: dict[int, list[tuple[int, Numbers]]] = {}

    def times_after(self, *passes: int) -> list[Numbers]:
        """Return the time when each of these numbers of passes over the fragments is done."""
        training, times, done = self.training, [], 0
        launches = max(passes) * len(training.fragments)
        sent = {(number + 1) * training.gap: number for number in range(launches)}
        awaited = {step + self.tau + 1 for step in sent}
        for step in sorted({*sent, *(step for step in awaited if step <= max(sent))}):
            self.now = self.now + (step - done - 1) * training.step_s
            done = step
            self._forward(self._arrivals.pop(step, []))
            if step not in sent:
                self.now = self.now + training.layers * 2 * self._forward_s
                continue
            fragment = training.fragments[sent[step] % len(training.fragments)]
            self._arrivals.setdefault(step + self.tau + 1, []).extend(self._backward(fragment))
            if step % training.pass_steps == 0 and step // training.pass_steps in passes:
                times.append(self.now)
        return times

    def _forward(self, arrivals: list[tuple[int, Numbers]]) -> None:
        """Run a step's forward pass; a block waits until its reduction has arrived."""
        done = 0
        for block, arrival in sorted(arrivals, key=lambda pair: pair[0]):
            self.now = np.maximum(self.now + (block - done) * self._forward_s, arrival)
            done = block
        self.now = self.now + (self.training.layers - done) * self._forward_s

    def _backward(self, fragment: tuple[int, ...]) -> list[tuple[int, Numbers]]:
        """Run from the last block to the first; return when each reduction of the fragment arrives."""
        began, arrivals = self.now, []
        for block in reversed(fragment):
            ended = began + (self.training.layers - block) * 2 * self._forward_s
            self.link_free = np.maximum(self.link_free, ended) + self._reduction_s
            arrivals.append((block, self.link_free))
        self.now = began + self.training.layers * 2 * self._forward_s
        return arrivals
