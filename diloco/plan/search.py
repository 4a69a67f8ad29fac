"""Find the setting that a link needs: of those that reach the target, the one that costs the least quality.

What a setting costs is taken from the papers, as a share of the loss; it orders settings and promises nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from diloco.comm.codec.registry import CODECS, codec_named
from diloco.config.schema import SyncConfig
from diloco.plan.predict import LinkModel, Prediction, Situation, predict

EVERY = (30, 50, 100, 200, 500)
DELAYS = (1, 2, 5, 10, 20, 50)
BLOCKS_A_FRAGMENT = 3
FRAGMENTS_COST, EAGER_COST, DELAY_COST = 0.0005, 0.0075, 0.001  # 2.67 -> 2.69 with eager updates (2502.12996)
FLAT_DELAY = 5  # steps that cost no more than one (2501.18512)
LATE_COST = 0.03  # of a whole phase of delay; more than eager, which exists because of it
EVERY_COST = 0.029 / math.log2(1000 / 50)  # a doubling: H=1000 is 2.9 % worse than H=50 (2311.08105)
FREE_EVERY = 30
SLOWEST, FASTEST = 1e3, 1e12  # bits per second


@dataclass(frozen=True)
class Found:
    """Hold the outcome of a search; `chosen` is None where no link was given to choose for."""

    chosen: Prediction | None
    others: tuple[Prediction, ...]  # the best of each other kind
    tried: int


def search(situation: Situation, given: SyncConfig, target: float, *, run_steps: int) -> Found:
    """Try all variants and choose the one that costs the least quality at the target utilisation.

    The given setting is kept if it reaches the target at no more cost. If none reaches it, the nearest one is chosen.
    """
    tried = [predict(situation, sync) for sync in variants(given, situation.work.blocks, run_steps)]
    best: dict[str, Prediction] = {}
    for one in (one for one in tried if one.steps <= run_steps):
        name = kind(one.sync)
        if name not in best or _rank(one, target) < _rank(best[name], target):
            best[name] = one
    chosen, own = min(best.values(), key=lambda one: _rank(one, target)), tried[0]
    good_enough = own.steps <= run_steps and own.utilisation >= target
    if good_enough and cost(own.sync, own.steps) <= cost(chosen.sync, chosen.steps):
        chosen = own
    others = (one for one in best.values() if one.sync not in (chosen.sync, own.sync))
    return Found(chosen, tuple(others), len(tried))


def _rank(one: Prediction, target: float) -> tuple[float, ...]:
    """Order those that reach the target by what they cost, and after them the others by how near they come."""
    if one.utilisation >= target:
        return 0, cost(one.sync, one.steps), one.sync.fragments, one.sync.delay, -one.utilisation
    return 1, -one.utilisation, cost(one.sync, one.steps)


def cost(sync: SyncConfig, steps: int) -> float:
    """Return the share of the loss that the setting is expected to add."""
    total = EVERY_COST * max(0.0, math.log2(steps / FREE_EVERY)) + codec_named(sync.codec).loss_cost
    total += FRAGMENTS_COST if sync.fragments > 1 else 0.0
    if sync.apply == "eager":
        return total + EAGER_COST
    if sync.delay:
        total += DELAY_COST + LATE_COST * max(0, sync.delay - FLAT_DELAY) / steps
    return total


def kind(sync: SyncConfig) -> str:
    """Name the way to synchronise: blocking, overlapped, streaming, both, or eager."""
    if sync.apply == "eager":
        return "eager"
    parts = "streaming" if sync.fragments > 1 else ""
    if not sync.delay:
        return parts or "blocking"
    return f"{parts}, overlapped" if parts else "overlapped"


def variants(given: SyncConfig, blocks: int, run_steps: int) -> Iterator[SyncConfig]:
    """Yield the given setting, then all that are tried; these synchronise at least twice in a run."""
    yield given
    every = given.every if isinstance(given.every, int) else EVERY[0]
    for steps in sorted({min(steps, longest_phase(run_steps)) for steps in (*EVERY, every)}):
        planned = [name for name, codec in CODECS.items() if codec.planned]
        for codec in dict.fromkeys((*planned, given.codec)):
            yield from _ways(steps, codec, given.pattern, blocks)


def _ways(every: int, codec: str, pattern: str, blocks: int) -> Iterator[SyncConfig]:
    """Yield the ways to wait for rounds, or not to, with this codec and phase."""
    here: dict[str, Any] = {"every": every, "codec": codec, "pattern": pattern}
    parts = streams(blocks)
    yield SyncConfig(**here)
    yield SyncConfig(**here, apply="eager")
    for fragments in (1, parts) if parts <= every else (1,):
        if fragments > 1:
            yield SyncConfig(**here, fragments=fragments)
        for delay in (delay for delay in DELAYS if delay <= every // 2):
            yield SyncConfig(**here, fragments=fragments, delay=delay)


def streams(blocks: int) -> int:
    """Return the number of fragments: one for every three blocks, and one for parameters outside of blocks."""
    return -(-blocks // BLOCKS_A_FRAGMENT) + 1


def longest_phase(run_steps: int) -> int:
    """Return the most steps of a phase with which a run still synchronises twice."""
    return max(1, run_steps // 2)


def ladder(given: SyncConfig, blocks: int, run_steps: int) -> list[SyncConfig]:
    """List settings from the mildest to the thriftiest, to show what each needs where no link is given."""
    short, long = (min(steps, longest_phase(run_steps)) for steps in (30, 100))
    delay, parts = min(5, long // 2), min(long, streams(blocks))
    rungs = [
        SyncConfig(every=short, codec="int8"),
        SyncConfig(every=long, codec="int8"),
        SyncConfig(every=long, codec="int4"),
        SyncConfig(every=long, codec="int4", delay=delay),
        SyncConfig(every=long, codec="int4", delay=delay, fragments=parts, pattern=given.pattern),
        SyncConfig(every=long, codec="int4", apply="eager"),
    ]
    return list(dict.fromkeys(rungs))


def bandwidth_needed(situation: Situation, sync: SyncConfig, target: float) -> float | None:
    """Return the bits per second, up and down, that the setting needs for the target; None: no rate is enough."""

    def reaches(bits_per_s: float) -> bool:
        line = LinkModel(bits_per_s, bits_per_s, situation.line.delay_s)
        return predict(replace(situation, line=line), sync).utilisation >= target

    if not reaches(FASTEST):
        return None
    low, high = math.log(SLOWEST), math.log(FASTEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(math.exp(middle)) else (middle, high)
    return math.exp(high)
