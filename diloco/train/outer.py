"""The outer state — what all islands agree on — and the deterministic functions that change it.

Parameters and the optimizer's moments are flat fp32 vectors in canonical order (the module's own order of trainable
parameters, whole, unsharded). The arithmetic of an update is in `optimizers.py`.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from diloco.comm.codec.base import Codec
from diloco.comm.codec.registry import codec_named
from diloco.comm.codec.rooms import CPU
from diloco.comm.codec.streams import taking_turns
from diloco.config.schema import Config, OuterConfig
from diloco.elastic.protocol.record import Record, Settings
from diloco.elastic.runtime.fragments import Fragments
from diloco.train.optimizers import optimizer_named
from diloco.train.schedule import Schedule

CHUNK = 1 << 20  # elements worked on at once, whole pages of codecs: temporaries stay in the cache
CHUNK_ON_GPU = 1 << 23  # so that it computes for longer than it takes to be told
UPLOAD_BYTES = 32 << 20  # of a payload that are brought to a GPU, and checked there, at once


def outer_vectors(config: OuterConfig, parameters: Tensor) -> dict[str, Tensor]:
    """Return the outer state of a run that begins with these parameters: all moments are zero."""
    names = optimizer_named(config.optimizer).vectors
    return {name: parameters if name == "parameters" else torch.zeros_like(parameters) for name in names}


FORGET = 20  # an outer momentum remembers at most one round in so many of the whole run


def outer_pace(config: Config, islands: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum for so many islands.

    `auto`: the published optimum, found in runs of hundreds of rounds. In a run of few, so long a memory keeps pushing
    where training went before its learning rate fell: there the momentum is lower, and the rate closer to plain
    averaging.
    """
    asked, (lr, momentum) = config.outer, published_pace(islands, muon=config.inner.optimizer == "muon")
    if optimizer_named(asked.optimizer).forgets and asked.momentum == "auto" and config.sync.every_s is None:
        rounds = len(Schedule.of(config.sync, config.inner).launches) / config.sync.fragments
        short = min(momentum, max(0.0, 1 - FORGET / rounds))
        lr, momentum = 1 - (1 - lr) * short / momentum, short
    return lr if asked.lr == "auto" else asked.lr, momentum if asked.momentum == "auto" else asked.momentum


def published_pace(islands: int, *, muon: bool) -> tuple[float, float]:
    """Return the published outer learning rate and momentum for 1, 2, 4 or 8 islands, linear in between. A single
    island with Muon inside has values of its own (MuLoCo)."""
    if muon and islands == 1:
        return 0.7, 0.6
    table = [(1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8)]
    for (few, low), (many, high) in pairwise(table):
        if islands <= many:
            return low + (high - low) * (islands - few) / (many - few), 0.9
    return table[-1][1], 0.9


def outer_settings(config: Config, islands: int, number: int) -> Settings:
    """Compute the scalars of a fragment's update number 1, 2, …, once and to be stored, because libm differs."""
    return optimizer_named(config.outer.optimizer).settings(config.outer, *outer_pace(config, islands), number)


def apply_record(
    vectors: Mapping[str, Tensor], record: Record, payload: Tensor, fragments: Fragments,
    device: torch.device | None = None,
) -> None:  # fmt: skip
    """Apply a committed update to the outer state; `payload` is the encoded mean of the contributions. It is worked out
    on a device, chunk by chunk, wherever the state lies; None: there."""
    proposal = record.proposal
    codec = codec_named(proposal.settings.result_codec)
    device = device or vectors["parameters"].device
    for start, mean in decoded(payload, fragments.counts[proposal.fragment], codec, device):
        apply(vectors, fragments, proposal.fragment, mean, proposal.settings, start)


def decoded(payload: Tensor, count: int, codec: Codec, device: torch.device = CPU) -> Iterator[tuple[int, Tensor]]:
    """Yield the values chunk by chunk, on a device, with the index where each begins: a whole vector would cost more in
    fresh memory than in decoding. What is done with a chunk on a GPU goes on beside the work on the next one."""
    chunk, here = _chunk(device), payload[:0]
    group = chunk if device.type == "cpu" else chunk * max(1, UPLOAD_BYTES // codec.size(chunk))
    with taking_turns(device) as turn:
        for first in range(0, count, group):
            last = min(first + group, count)
            coming = payload[codec.bytes_of(first, last - first)].to(device)
            codec.check(coming, last - first)  # once: whoever asks a GPU waits for it
            for number, start in enumerate(range(first, last, chunk)):
                size = min(chunk, last - start)
                with turn(number):  # the first one waits for those that still read what was here
                    here = coming
                    yield start, codec.decode(here[codec.bytes_of(start - first, size)], size, checked=True)


def apply(
    vectors: Mapping[str, Tensor], fragments: Fragments, fragment: int, mean: Tensor, settings: Settings, at: int = 0
) -> None:
    """Advance one fragment of the outer state in place by the mean of its contributions.

    `mean` may be a part of it, which begins with value `at`.
    """
    optimizer, chunk = optimizer_named(settings.optimizer), _chunk(mean.device)
    for lo, hi, gradient in fragments.pieces(mean, fragment, at):
        for start in range(lo, hi, chunk):
            part = slice(start, min(start + chunk, hi))
            stretch = {name: vector[part].to(mean.device, non_blocking=True) for name, vector in vectors.items()}
            optimizer.step(stretch, gradient[start - lo :][:chunk], settings)
            for name, vector in vectors.items():
                if vector.device != mean.device:
                    vector[part].copy_(stretch[name], non_blocking=True)


def _chunk(device: torch.device) -> int:
    return CHUNK if device.type == "cpu" else CHUNK_ON_GPU


def preview(vectors: Mapping[str, Tensor], mean: Tensor, settings: Settings, at: int = 0) -> Tensor:
    """Return a stretch of the parameters as `apply` would make them, without changing the state.

    `at` is where the stretch begins in the flat vectors.
    """
    found, optimizer = torch.empty_like(mean), optimizer_named(settings.optimizer)
    for start in range(0, len(mean), CHUNK):
        gradient = mean[start : start + CHUNK]
        copies = {name: vector[at + start : at + start + len(gradient)].clone() for name, vector in vectors.items()}
        optimizer.step(copies, gradient, settings)
        found[start : start + CHUNK].copy_(copies["parameters"])
    return found
