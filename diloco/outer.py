"""The outer state — what all islands agree on — and the deterministic function that changes it.

Parameters and momentum are flat fp32 vectors in canonical order (the module's own order of trainable parameters, whole,
unsharded). `apply` uses individually rounded operations only, so the same update gives the same bits on every platform:
no fused multiply-add, no `alpha=`, no reductions.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from diloco.comm.codec import CODECS
from diloco.elastic.record import Record

CHUNK = 1 << 20  # elements worked on at once: temporaries stay in the cache
TINY = 2.0**-100  # momentum below this becomes zero: denormals differ between platforms


@dataclass(frozen=True)
class Update:
    """One committed outer update of one fragment. It holds all that `apply` and a later replay need."""

    round: int
    fragment: int
    step: int  # the run's clock after this update
    mean: Tensor  # fp32, weighted mean of the contributions
    lr: float
    momentum: float
    contributors: tuple[str, ...]
    tokens: int


@dataclass(frozen=True)
class Layout:
    """Names and shapes in canonical order, and where each lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> "Layout":
        pairs = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter as a view into the flat vector."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, vector[start : start + prod(shape)].view(shape)
            start += prod(shape)


@dataclass
class OuterState:
    layout: Layout
    parameters: Tensor  # fp32 [layout.size]
    momentum: Tensor  # fp32 [layout.size]
    round: int = 0
    step: int = 0  # the run's clock: inner steps behind these parameters

    @classmethod
    def zeros(cls, layout: Layout) -> "OuterState":
        return cls(layout, torch.zeros(layout.size), torch.zeros(layout.size))


def outer_lr(setting: float | str, islands: int) -> float:
    """`auto`: the published optimum by number of islands (1, 2, 4, 8), linear in between."""
    if not isinstance(setting, str):
        return setting
    table = [(1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8)]
    for (few, low), (many, high) in pairwise(table):
        if islands <= many:
            return low + (high - low) * (islands - few) / (many - few)
    return table[-1][1]


def apply(state: OuterState, update: Update) -> None:
    """Advance the state by one committed update, in place."""
    if update.round != state.round + 1:
        raise ValueError(f"update of round {update.round} cannot follow round {state.round}")
    lr = torch.tensor(update.lr, dtype=torch.float32)
    momentum = torch.tensor(update.momentum, dtype=torch.float32)
    for start in range(0, state.layout.size, CHUNK):
        part = slice(start, start + CHUNK)
        _nesterov(state.parameters[part], state.momentum[part], update.mean[part], lr, momentum)
    state.round, state.step = update.round, update.step


def apply_record(vectors: Mapping[str, Tensor], record: Record, payload: Tensor) -> None:
    """The same for vectors that a replica keeps."""
    parameters, momentum = vectors["parameters"], vectors["momentum"]
    update = update_of(record, payload, len(parameters))
    layout = Layout(("all",), ((len(parameters),),))
    apply(OuterState(layout, parameters, momentum, round=update.round - 1), update)


def update_of(record: Record, payload: Tensor, count: int) -> Update:
    """What a committed record does to the outer state; `payload` is the encoded mean."""
    proposal, settings = record.proposal, record.proposal.settings
    mean = CODECS[settings.codec].decode(payload, count)
    return Update(
        proposal.key.round, proposal.fragment, proposal.step, mean, settings.lr, settings.momentum,
        proposal.islands, proposal.tokens,
    )  # fmt: skip


def _nesterov(parameters: Tensor, velocity: Tensor, gradient: Tensor, lr: Tensor, momentum: Tensor) -> None:
    """v <- D + b v ; theta <- theta - lr (D + b v). Momentum 0 is plain SGD."""
    velocity.mul_(momentum).add_(gradient)
    velocity.masked_fill_(velocity.abs() < TINY, 0.0)
    parameters.sub_((velocity * momentum).add_(gradient).mul_(lr))
