"""Virtual time against real islands: the same links, codecs and step times, time of a round and utilisation.

Real ones as for the planner (real.py): small steps, each followed by a pause.
"""

import statistics
from typing import Any

from diloco.bench.peers import BenchPeer, run_peers
from diloco.bench.real import EVERY, FAR, NEAR, PAUSE_S, WARM_UP, Setting, usual_phase_s, usual_step_s
from diloco.bench.report import Check, Report
from diloco.bench.team import one_thread, train_together
from diloco.comm.codec import warm_up
from diloco.planning.predict import Host, Line
from diloco.virtual.outcome import simulate
from diloco.virtual.setting import Setting as Modelled

ISLANDS = 4
ROUNDS = 30  # in virtual time
SETTINGS = (Setting(NEAR, "int8", overlapped=False), Setting(FAR, "int4", overlapped=False))


def measure() -> Report:
    rows = run_peers(ISLANDS, _work)[0]
    worst = max(abs(row[error]) for row in rows.values() for error in ("round_error", "utilisation_error"))
    checks = [Check("virtual.worst_error_against_real", worst, 0.15, "lower")]
    return Report(checks, {"islands": ISLANDS, "virtual and real": rows})


def _work(peer: BenchPeer) -> dict[str, dict[str, float]]:
    one_thread()
    warm_up()
    return {setting.name: _row(peer, setting) for setting in SETTINGS}


def _row(peer: BenchPeer, setting: Setting) -> dict[str, Any]:
    seen = train_together(peer, setting.config(), setting.line, pause_s=PAUSE_S)
    step_s = max(peer.exchange(usual_step_s(seen["moments"])))
    phase_s = statistics.mean(peer.exchange(usual_phase_s(seen["moments"])))
    # from the last launch: who is ready early waits for the others, and all islands are alike in virtual time
    rounds = [min(times) for times in zip(*peer.exchange(seen["round_s"]), strict=True)]
    round_s, utilisation = statistics.median(rounds[WARM_UP:]), EVERY * step_s / phase_s
    virtual_round_s, virtual_utilisation = in_virtual_time(setting, step_s, seen["parameters"])
    return {
        "step_s": step_s, "virtual_round_s": virtual_round_s, "round_s": round_s,
        "round_error": virtual_round_s / round_s - 1, "virtual_utilisation": virtual_utilisation,
        "utilisation": utilisation, "utilisation_error": virtual_utilisation / utilisation - 1,
    }  # fmt: skip


def in_virtual_time(setting: Setting, step_s: float, values: int) -> tuple[float, float]:
    """Seconds of a round, and utilisation."""
    rate, steps_s = setting.line.bits_per_s, EVERY * step_s
    assert rate is not None
    outcome = simulate(Modelled(
        ISLANDS, Line(rate, rate, setting.line.delay_s), values=values, codec=setting.codec, phase_s=steps_s,
        spread=0.0, jitter=0.0, straggler=100.0, host=Host(trains_too=True), seconds=ROUNDS * 2 * steps_s,
    ))  # fmt: skip
    return outcome.period_s - steps_s, steps_s / outcome.period_s
