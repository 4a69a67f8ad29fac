"""What a slow link costs an inner loop that waits for its rounds, and one that goes on.

The link is made such that a blocking round takes as long as a phase of training: half of the time is lost. Utilisation
is H times the median step without a round in flight over the wall time of H steps. Runs with and without take turns:
a machine is not always equally fast.
"""

import itertools
import statistics
from typing import Any

from diloco.bench.peers import BenchPeer, run_peers
from diloco.bench.report import Check, Report
from diloco.bench.team import Line, one_thread, train_together
from diloco.comm.codec import CODECS, warm_up
from diloco.config import Config
from diloco.configfile import parse_config

CODEC = "int8"
FIRST_PHASES = 1  # not measured: everything is slower the first time


def measure(*, islands: int, every: int, rounds: int) -> Report:
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
    one_thread()
    warm_up()
    free = [train_together(peer, _config(every, FIRST_PHASES + rounds // 2), Line())]
    step_s = max(peer.exchange(statistics.median(_inside(free[0]["moments"], every))))
    size = CODECS[CODEC].size(free[0]["parameters"])
    bits_per_s = 8 * 2 * (peer.count - 1) / peer.count * size / (every * step_s)
    eager = _config(every, FIRST_PHASES + 1 + rounds // 2, apply="eager")
    overlapped = [train_together(peer, eager, Line(bits_per_s))]
    free.append(train_together(peer, _config(every, FIRST_PHASES + rounds // 2), Line()))
    overlapped.append(train_together(peer, eager, Line(bits_per_s)))
    blocking = [train_together(peer, _config(every, FIRST_PHASES + 1 + rounds // 2), Line(bits_per_s))]
    alone = [span for seen in free for span in _inside(seen["moments"], every)]
    step_s = max(peer.exchange(statistics.median(alone)))
    found: dict[str, Any] = {"step_s": step_s, "link_mbit_per_s": bits_per_s / 1e6}
    for name, runs in (("blocking", blocking), ("overlapped", overlapped)):
        found[name] = _row(runs, every, step_s, peer)
    return found


def _inside(moments: list[float], every: int) -> list[float]:
    """What each step took that no round ended; not of the first phase."""
    spans = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return [span for number, span in enumerate(spans, start=1) if number % every and number > every]


def _row(runs: list[dict[str, Any]], every: int, step_s: float, peer: BenchPeer) -> dict[str, Any]:
    walls = [wall for seen in runs for wall in _phases(seen["moments"], every)]
    steps = [span for seen in runs for span in _inside(seen["moments"], every)]
    return {
        "utilisation": min(peer.exchange(every * step_s / statistics.mean(walls))),
        "step_ratio": max(peer.exchange(statistics.median(steps) / step_s)), "wall_s_of_phases": walls,
        "rounds": sum(seen["rounds"] for seen in runs), "full_rounds": sum(seen["full_rounds"] for seen in runs),
    }  # fmt: skip


def _phases(moments: list[float], every: int) -> list[float]:
    """What each took from the second on, but for the last, whose round nothing overlaps."""
    begins = moments[every - 1 :: every]
    return [later - earlier for earlier, later in itertools.pairwise(begins)][FIRST_PHASES:]


def _config(every: int, phases: int, *, apply: str = "rebase") -> Config:
    return parse_config({
        "run": "overlap", "model": {"preset": "tiny"}, "data": {"sequence": 128},
        "island": {"batch": 4, "device": "cpu"}, "inner": {"steps": every * phases, "warmup": 2},
        "sync": {"every": every, "apply": apply, "codec": CODEC},
        "elastic": {"min_islands": 2, "straggler": 100.0}, "evaluate": {"every": 0}, "log": {"every": 1},
        "checkpoint": {"snapshot_every": 1000000},
    })  # fmt: skip
