"""Compare virtual time with `diloco simulate`: same links, codecs and step times; time of a round and utilisation."""

from diloco.bench.report import Check, Report
from diloco.bench.simulated import EVERY, FAR, NEAR, Seen, SimulatedConfig, compare
from diloco.plan.predict import Host
from diloco.simulate.virtual.modelled import VirtualConfig
from diloco.simulate.virtual.outcome import simulate

ISLANDS = 4
ROUNDS = 30  # in virtual time
SETTINGS = (SimulatedConfig(NEAR, "int8", overlapped=False), SimulatedConfig(FAR, "int4", overlapped=False))


def measure() -> Report:
    """Compare two settings of four islands, blocking, each simulated in both ways."""
    worst, rows = compare(SETTINGS, ISLANDS, "virtual", in_virtual_time)
    checks = [Check("virtual.worst_error_against_real", worst, 0.15, "lower")]
    return Report(checks, {"islands": ISLANDS, "virtual and simulated": rows})


def in_virtual_time(setting: SimulatedConfig, seen: Seen) -> tuple[float, float]:
    """Simulate the seconds of a round, and utilisation, with the step time that was measured."""
    steps_s = EVERY * seen.step_s
    outcome = simulate(VirtualConfig(
        ISLANDS, setting.line, values=seen.parameters, codec=setting.codec, phase_s=steps_s,
        spread=0.0, jitter=0.0, straggler=100.0, host=Host(trains_too=True), seconds=ROUNDS * 2 * steps_s,
    ))  # fmt: skip
    return outcome.period_s - steps_s, steps_s / outcome.period_s
