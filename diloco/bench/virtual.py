"""Virtual time against `diloco simulate`: the same links, codecs and step times, time of a round and utilisation."""

from typing import Any

from diloco.bench.report import Check, Report
from diloco.bench.simulated import EVERY, FAR, NEAR, Setting, simulated
from diloco.plan.predict import Host
from diloco.simulate.virtual.modelled import Setting as Modelled
from diloco.simulate.virtual.outcome import simulate

ISLANDS = 4
ROUNDS = 30  # in virtual time
SETTINGS = (Setting(NEAR, "int8", overlapped=False), Setting(FAR, "int4", overlapped=False))


def measure() -> Report:
    rows = {setting.name: _row(setting) for setting in SETTINGS}
    worst = max(abs(row[error]) for row in rows.values() for error in ("round_error", "utilisation_error"))
    checks = [Check("virtual.worst_error_against_real", worst, 0.15, "lower")]
    return Report(checks, {"islands": ISLANDS, "virtual and simulated": rows})


def _row(setting: Setting) -> dict[str, Any]:
    seen = simulated(setting, ISLANDS)
    round_s, utilisation = in_virtual_time(setting, seen.step_s, seen.parameters)
    return {
        "step_s": seen.step_s, "virtual_round_s": round_s, "round_s": seen.round_s,
        "round_error": round_s / seen.round_s - 1, "virtual_utilisation": utilisation,
        "utilisation": seen.utilisation, "utilisation_error": utilisation / seen.utilisation - 1,
    }  # fmt: skip


def in_virtual_time(setting: Setting, step_s: float, values: int) -> tuple[float, float]:
    """Seconds of a round, and utilisation."""
    steps_s = EVERY * step_s
    outcome = simulate(Modelled(
        ISLANDS, setting.line, values=values, codec=setting.codec, phase_s=steps_s,
        spread=0.0, jitter=0.0, straggler=100.0, host=Host(trains_too=True), seconds=ROUNDS * 2 * steps_s,
    ))  # fmt: skip
    return outcome.period_s - steps_s, steps_s / outcome.period_s
