"""The planner against the published table of bandwidth and utilisation (Streaming DiLoCo, 2501.18512), and against real
islands (real.py)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from diloco.bench.report import Check, Report
from diloco.plan.utilisation import GRID_GBIT, Training, bandwidth_for

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
COLUMNS = (("data-parallel", 16), ("diloco", 16), ("streaming", 16), ("overlap", 16), ("overlap", 4))
EVERY = 100


@dataclass(frozen=True)
class Published:
    """Gbit/s for each target, as printed: one row of five for each column."""

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
    checks, figures = against_table()
    if real:
        from diloco.bench.real import against_real

        more_checks, more_figures = against_real()
        checks, figures = [*checks, *more_checks], {**figures, **more_figures}
    return Report(checks, figures)


def against_table() -> tuple[list[Check], dict[str, Any]]:
    steps_off: dict[str, list[int]] = {}
    for name, published in TABLE.items():
        for (method, bits), printed in zip(COLUMNS, published.gbit_per_s, strict=True):
            training = Training(published.layers, published.step_s, published.params, EVERY, method, bits)
            found = bandwidth_for(training, TARGETS)
            steps_off[f"{name} {method} {bits} bit"] = [
                _grid_steps(ours, theirs) for ours, theirs in zip(found, printed, strict=True)
            ]
    cells = [abs(steps) for row in steps_off.values() for steps in row]
    checks = [
        Check("plan.cells_exact", sum(steps == 0 for steps in cells) / len(cells), 0.9, "higher"),
        Check("plan.cells_within_one", sum(steps <= 1 for steps in cells) / len(cells), 1.0, "higher"),
    ]
    names = [f"{target:.0%}" for target in TARGETS]
    rows = {name: dict(zip(names, row, strict=True)) for name, row in steps_off.items()}
    return checks, {"grid steps off": rows}


def _grid_steps(ours: float | None, theirs: float) -> int:
    """How far apart on the grid, of which the table prints two or three digits; beyond it is far."""
    return (len(GRID_GBIT) if ours is None else _nearest(ours)) - _nearest(theirs)


def _nearest(gbit_per_s: float) -> int:
    return int(np.argmin(np.abs(GRID_GBIT - gbit_per_s)))
