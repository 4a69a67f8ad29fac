"""The planner against `diloco simulate`: for each setting, predicted and measured time of a round and utilisation.

The planner is given the step time that was measured, as by a profile.
"""

from typing import Any

from diloco.bench.report import Check
from diloco.bench.simulated import FAR, NEAR, Setting, simulated
from diloco.plan.predict import Host, Prediction, Situation, predict
from diloco.plan.workload import workload_of

ISLANDS = 2  # each with one thread: no more than there are cores
SETTINGS = (
    Setting(NEAR, "int8", overlapped=False), Setting(NEAR, "int8", overlapped=True),
    Setting(NEAR, "int4", overlapped=False), Setting(FAR, "int4", overlapped=False),
    Setting(FAR, "int4", overlapped=True), Setting(FAR, "int8", overlapped=True),
)  # fmt: skip


def against_real() -> tuple[list[Check], dict[str, Any]]:
    rows = {setting.name: _row(setting) for setting in SETTINGS}
    worst = max(abs(row[error]) for row in rows.values() for error in ("round_error", "utilisation_error"))
    return [Check("plan.worst_error_against_real", worst, 0.15, "lower")], {"planned and simulated": rows}


def _row(setting: Setting) -> dict[str, float]:
    seen = simulated(setting, ISLANDS)
    planned = plan(setting, seen.step_s)
    return {
        "step_s": seen.step_s, "planned_round_s": planned.round_s, "round_s": seen.round_s,
        "round_error": planned.round_s / seen.round_s - 1,
        "planned_utilisation": planned.utilisation, "utilisation": seen.utilisation,
        "utilisation_error": planned.utilisation / seen.utilisation - 1,
    }  # fmt: skip


def plan(setting: Setting, step_s: float) -> Prediction:
    config = setting.config(ISLANDS)
    situation = Situation(workload_of(config), ISLANDS, setting.line, step_s, Host(trains_too=True))
    return predict(situation, config.sync)
