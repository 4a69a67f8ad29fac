"""Compare virtual time with `diloco simulate`, and let a thousand islands fail in it.

The comparison has the same links, codecs and step times: time of a round and utilisation.
"""

from dataclasses import asdict

from diloco.bench.report import Check, Report
from diloco.bench.simulated import EVERY, FAR, NEAR, Seen, SimulatedConfig, compare
from diloco.plan.predict import Host, LinkModel
from diloco.simulate.virtual.modelled import VirtualConfig
from diloco.simulate.virtual.outcome import simulate

ISLANDS = 4
ROUNDS = 30  # in virtual time
MANY = VirtualConfig(1000, LinkModel(100e6, 100e6, 0.04), mtbf_s=10.0, silence_s=20.0, seconds=3600.0)
SETTINGS = (SimulatedConfig(NEAR, "int8", overlapped=False), SimulatedConfig(FAR, "int4", overlapped=False))


def measure() -> Report:
    """Compare two settings of four islands, blocking, each simulated in both ways; then simulate an hour of many."""
    worst, rows = compare(SETTINGS, ISLANDS, "virtual", in_virtual_time)
    many = simulate(MANY)
    checks = [
        Check("virtual.worst_error_against_real", worst, 0.15, "lower"),
        Check("virtual.utilisation_1000", many.utilisation, 0.6, "higher"),
        Check("virtual.rounds_1000", many.rounds, 6, "higher"),
    ]
    return Report(checks, {"islands": ISLANDS, "virtual and simulated": rows, "a thousand": asdict(many)})


def in_virtual_time(setting: SimulatedConfig, seen: Seen) -> tuple[float, float]:
    """Simulate the seconds of a round, and utilisation, with the step time that was measured."""
    steps_s = EVERY * seen.step_s
    outcome = simulate(VirtualConfig(
        ISLANDS, setting.line, values=seen.parameters, codec=setting.codec, phase_s=steps_s,
        spread=0.0, jitter=0.0, straggler=100.0, host=Host(trains_too=True), seconds=ROUNDS * 2 * steps_s,
    ))  # fmt: skip
    return outcome.period_s - steps_s, steps_s / outcome.period_s
