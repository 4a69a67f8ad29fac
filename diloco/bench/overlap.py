"""Measure what a slow link costs an inner loop that waits for its rounds, and one that continues meanwhile.

The link is set such that a blocking round, all of it, takes as long as a phase of training: half of the time is lost.
Utilisation is H times the median step without a round in flight over the wall time of H steps. Runs with and without
take turns, and each is compared with those before and after it: a machine is not always equally fast.
"""

import itertools
import statistics
from typing import Any

from diloco.bench.processes import BenchPeer, LinkRate, run_peers
from diloco.bench.report import Check, Report
from diloco.bench.team import train_together
from diloco.comm.codec.registry import CODECS, warm_up
from diloco.config.file import parse_config
from diloco.config.schema import Config

CODEC = "int8"
TURNS = 4
FIRST_PHASES = 1  # not measured: everything is slower the first time


def measure(*, islands: int, every: int, rounds: int) -> Report:
    """Compare blocking and eager rounds of so many islands with phases of `every` steps."""
    rows = run_peers(islands, _work, every, rounds)[0]
    blocking, overlapped = rows["blocking"], rows["overlapped"]
    checks = [
        Check("overlap.utilisation", overlapped["utilisation"], 0.95, "higher"),
        Check("overlap.step_ratio", overlapped["step_ratio"], 1.05, "lower"),
    ]
    figures = {"islands": islands, "every": every, "rounds": rounds, **rows}
    figures["blocking_utilisation"] = blocking["utilisation"]
    return Report(checks, figures)


def _work(peer: BenchPeer, every: int, rounds: int) -> dict[str, Any]:
    """Train all runs of the bench as one of its islands, in one worker."""
    warm_up()
    phases = FIRST_PHASES + -(-rounds // TURNS)
    free = train_together(peer, _config(every, phases), LinkRate())
    step_s, seen = [_step_s(free, every, peer)], list[dict[str, Any]]()
    line = _line_of_half(peer, every, phases, step_s[0], free["parameters"])
    for _ in range(TURNS):
        seen.append(train_together(peer, _config(every, phases + 1, apply="eager"), line))
        step_s.append(_step_s(train_together(peer, _config(every, phases), LinkRate()), every, peer))
    usual_s = [statistics.mean(around) for around in itertools.pairwise(step_s)]
    turns = [_row(one, every, usual, peer) for one, usual in zip(seen, usual_s, strict=True)]
    blocking = _row(train_together(peer, _config(every, phases + 1), line), every, step_s[-1], peer)
    return {
        "step_s": step_s, "link_mbit_per_s": (line.bits_per_s or 0) / 1e6, "blocking": blocking, "turns": turns,
        "overlapped": {name: statistics.mean(turn[name] for turn in turns) for name in ("utilisation", "step_ratio")},
    }  # fmt: skip


def _line_of_half(peer: BenchPeer, every: int, phases: int, step_s: float, parameters: int) -> LinkRate:
    """Find the link on which a blocking round takes as long as a phase.

    It is guessed by a round's bytes, then set by what a round took.
    """
    size, phase_s = CODECS[CODEC].size(parameters), every * step_s
    guess = 8 * 2 * (peer.count - 1) / peer.count * size / phase_s
    tried = _row(train_together(peer, _config(every, phases), LinkRate(guess)), every, step_s, peer)
    round_s = statistics.mean(tried["wall_s_of_phases"]) - phase_s
    return LinkRate(statistics.mean(peer.exchange(guess * round_s / phase_s)))


def _step_s(seen: dict[str, Any], every: int, peer: BenchPeer) -> float:
    """Return the median seconds of a step on the slowest island."""
    return max(peer.exchange(statistics.median(_inside(seen["moments"], every))))


def _inside(moments: list[float], every: int) -> list[float]:
    """Return what each step took, but for those that end a phase and those of the first phase."""
    return [span for number, span in enumerate(_spans(moments), start=1) if number % every and number > every]


def _spans(moments: list[float]) -> list[float]:
    """Return the seconds between successive moments."""
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def _row(seen: dict[str, Any], every: int, step_s: float, peer: BenchPeer) -> dict[str, Any]:
    """Return the figures of the island that fares worst."""
    # of phases from the second on, but for the last, whose round nothing overlaps
    walls = _spans(seen["moments"][every - 1 :: every])[FIRST_PHASES:]
    return {
        "utilisation": min(peer.exchange(every * step_s / statistics.mean(walls))),
        "step_ratio": max(peer.exchange(statistics.median(_inside(seen["moments"], every)) / step_s)),
        "wall_s_of_phases": walls, "rounds": seen["rounds"], "full_rounds": seen["full_rounds"],
    }  # fmt: skip


def _config(every: int, phases: int, *, apply: str = "rebase") -> Config:
    return parse_config({
        "run": "overlap", "model": {"preset": "tiny"}, "data": {"sequence": 128},
        "island": {"batch": 4, "device": "cpu"}, "inner": {"steps": every * phases, "warmup": 2},
        "sync": {"every": every, "apply": apply, "codec": CODEC},
        "elastic": {"min_islands": 2, "straggler": 100.0}, "evaluate": {"every": 0}, "log": {"every": 1},
        "checkpoint": {"snapshot_every": 1000000},
    })  # fmt: skip
