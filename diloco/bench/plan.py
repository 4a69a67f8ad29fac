"""Compare the planner with the published table of bandwidth and utilisation (Streaming DiLoCo, 2501.18512).

And with real islands: for each setting, predicted and measured time of a round and utilisation. There the planner is
given the step time that was measured, as by a profile.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from diloco.bench.report import Check, Report
from diloco.bench.simulated import FAR, NEAR, Seen, SimulatedConfig, compare
from diloco.config.file import parse_config
from diloco.plan.predict import Host, Situation, predict
from diloco.plan.utilisation import GRID_GBIT, Training, bandwidth_for
from diloco.plan.workload import workload_of

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
COLUMNS = (("data-parallel", 16), ("diloco", 16), ("streaming", 16), ("overlap", 16), ("overlap", 4))
EVERY = 100
ISLANDS = 2  # each with one thread: no more than there are cores
SETTINGS = (
    SimulatedConfig(NEAR, "int8", overlapped=False), SimulatedConfig(NEAR, "int8", overlapped=True),
    SimulatedConfig(NEAR, "int4", overlapped=False), SimulatedConfig(FAR, "int4", overlapped=False),
    SimulatedConfig(FAR, "int4", overlapped=True), SimulatedConfig(FAR, "int8", overlapped=True),
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Hold the printed Gbit/s for each target: one row of five for each column of the table."""

    layers: int
    step_s: float
    params: int
    gbit_per_s: tuple[tuple[float, ...], ...]


TABLE = {
    "1B": Published(24, 0.1, 10**9, (
        (86.8, 152.6, 184.2, 222.3, 569.0), (1.4, 6.2, 13.3, 23.3, 86.8), (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0), (0.4, 0.9, 1.7, 2.0, 3.0),
    )),
    "10B": Published(48, 0.8, 10**10, (
        (104.8, 222.3, 222.3, 268.3, 471.5), (1.7, 7.5, 16.0, 33.9, 104.8), (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5), (0.4, 0.9, 1.4, 1.4, 1.7),
    )),
}  # fmt: skip


def measure(*, real: bool) -> Report:
    """Compare with the table, and with islands that train here if `real`, which takes minutes."""
    checks, figures = against_table()
    if real:
        worst, figures["planned and simulated"] = compare(SETTINGS, ISLANDS, "planned", planned)
        checks.append(Check("plan.worst_error_against_real", worst, 0.15, "lower"))
    return Report(checks, figures)


def planned(setting: SimulatedConfig, seen: Seen) -> tuple[float, float]:
    """Predict the seconds of a round, and utilisation, with the step time that was measured."""
    config = parse_config(setting.settings(ISLANDS))
    situation = Situation(workload_of(config), ISLANDS, setting.line, seen.step_s, Host(trains_too=True))
    prediction = predict(situation, config.sync)
    return prediction.round_s, prediction.utilisation


def against_table() -> tuple[list[Check], dict[str, Any]]:
    """Compare every cell of the table: by how many points of the grid ours is off."""
    rows: dict[str, dict[str, int]] = {}
    for name, published in TABLE.items():
        for (method, bits), printed in zip(COLUMNS, published.gbit_per_s, strict=True):
            training = Training(published.layers, published.step_s, published.params, EVERY, method, bits)
            found = zip(TARGETS, bandwidth_for(training, TARGETS), printed, strict=True)
            rows[f"{name} {method} {bits} bit"] = {
                f"{target:.0%}": _place(ours) - _place(theirs) for target, ours, theirs in found
            }
    cells = [abs(steps) for row in rows.values() for steps in row.values()]
    checks = [
        Check("plan.cells_exact", sum(steps == 0 for steps in cells) / len(cells), 0.9, "higher"),
        Check("plan.cells_within_one", sum(steps <= 1 for steps in cells) / len(cells), 1.0, "higher"),
    ]
    return checks, {"grid steps off": rows}


def _place(gbit_per_s: float | None) -> int:
    """Return the nearest point of the grid, of which the table prints two or three digits; None is beyond it."""
    return len(GRID_GBIT) if gbit_per_s is None else int(np.argmin(np.abs(GRID_GBIT - gbit_per_s)))
