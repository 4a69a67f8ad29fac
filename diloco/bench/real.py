"""The planner against real islands: for each setting, predicted and measured time of a round and utilisation.

Steps are small and followed by a pause: what is compared is what links and rounds cost, so other work on the machine
should not decide. The planner is given the step time that was measured, as by a profile.
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from diloco.bench.peers import BenchPeer, run_peers
from diloco.bench.report import Check
from diloco.bench.team import Line, one_thread, train_together
from diloco.comm.codec import warm_up
from diloco.config import Config
from diloco.configfile import parse_config
from diloco.planning.predict import Host, Prediction, Situation, predict
from diloco.planning.predict import Line as PlannedLine
from diloco.planning.workload import workload_of

ISLANDS = 2  # each with one thread: no more than there are cores
EVERY, DELAY = 20, 10
PAUSE_S = 0.1  # after each step
WARM_UP, PHASES = 1, 6
MODEL = {"preset": "tiny", "blocks": 1, "width": 256, "heads": 4, "feed_forward": 768}  # large for so short a step
NEAR, FAR = Line(20e6, 0.02), Line(6e6, 0.08)


@dataclass(frozen=True)
class Setting:
    line: Line
    codec: str
    overlapped: bool

    @property
    def name(self) -> str:
        rate, delay = f"{(self.line.bits_per_s or 0) / 1e6:g} mbit/s", f"{1000 * self.line.delay_s:g} ms"
        return f"{rate}, {delay}, {self.codec}, {'overlapped' if self.overlapped else 'blocking'}"

    def config(self) -> Config:
        return parse_config({
            "run": "plan", "model": MODEL, "data": {"sequence": 32},
            "island": {"batch": 1, "device": "cpu"}, "inner": {"steps": EVERY * (WARM_UP + PHASES), "warmup": 2},
            "sync": {"every": EVERY, "codec": self.codec, "delay": DELAY if self.overlapped else 0},
            "elastic": {"min_islands": ISLANDS, "straggler": 100.0}, "evaluate": {"every": 0}, "log": {"every": 1},
            "checkpoint": {"snapshot_every": 1000000},
        })  # fmt: skip


SETTINGS = (
    Setting(NEAR, "int8", overlapped=False), Setting(NEAR, "int8", overlapped=True),
    Setting(NEAR, "int4", overlapped=False), Setting(FAR, "int4", overlapped=False),
    Setting(FAR, "int4", overlapped=True), Setting(FAR, "int8", overlapped=True),
)  # fmt: skip


def against_real() -> tuple[list[Check], dict[str, Any]]:
    rows = run_peers(ISLANDS, _work)[0]
    worst = max(abs(row[error]) for row in rows.values() for error in ("round_error", "utilisation_error"))
    return [Check("plan.worst_error_against_real", worst, 0.15, "lower")], {"planned and measured": rows}


def _work(peer: BenchPeer) -> dict[str, dict[str, float]]:
    one_thread()
    warm_up()
    return {setting.name: _row(peer, setting) for setting in SETTINGS}


def _row(peer: BenchPeer, setting: Setting) -> dict[str, float]:
    config = setting.config()
    seen = train_together(peer, config, setting.line, pause_s=PAUSE_S)
    step_s = max(peer.exchange(usual_step_s(seen["moments"])))
    phase_s = statistics.mean(peer.exchange(usual_phase_s(seen["moments"])))
    round_s = usual_round_s(peer.exchange(seen["rounds_at"]))
    planned = plan(setting, step_s)
    measured = EVERY * step_s / phase_s
    return {
        "step_s": step_s, "planned_round_s": planned.round_s, "round_s": round_s,
        "round_error": planned.round_s / round_s - 1,
        "planned_utilisation": planned.utilisation, "utilisation": measured,
        "utilisation_error": planned.utilisation / measured - 1,
    }  # fmt: skip


def usual_round_s(islands: list[list[tuple[float, float]]]) -> float:
    """From the last launch, since who is ready early waits for the others, until all have applied it."""
    rounds = [tuple(map(max, zip(*times, strict=True))) for times in zip(*islands, strict=True)]
    return statistics.median(applied - launched for launched, applied in rounds[WARM_UP:])


def plan(setting: Setting, step_s: float) -> Prediction:
    assert setting.line.bits_per_s is not None
    line = PlannedLine(setting.line.bits_per_s, setting.line.bits_per_s, setting.line.delay_s)
    config = setting.config()
    return predict(Situation(workload_of(config), ISLANDS, line, step_s, Host(trains_too=True)), config.sync)


def usual_step_s(moments: list[float]) -> float:
    """Of steps after which nothing is launched or taken in."""
    steps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    usual = [s for number, s in enumerate(steps, start=1) if number % EVERY not in (0, DELAY) and number > EVERY]
    return statistics.mean(usual)


def usual_phase_s(moments: list[float]) -> float:
    """From launch to launch, but for the last, whose round nothing overlaps."""
    begins = moments[EVERY - 1 :: EVERY]
    return statistics.mean([later - earlier for earlier, later in itertools.pairwise(begins)][WARM_UP:])
