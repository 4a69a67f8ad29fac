"""Measure what a lost island costs the others: from a round's first *begin* until the last survivor committed it.

Real processes, real signals, in the middle of the all-reduce. The extra time is that of the struck round over the
median of undisturbed rounds of the same islands.
"""

import signal
import time
from statistics import median
from typing import Any

from diloco.bench.bare import BareConfig
from diloco.bench.crew import Crew, crew
from diloco.bench.report import Check, Report

NAMES = ("A", "B", "C", "D")  # A leads
ROUNDS = 6  # undisturbed, after the first two
INTO = 0.3  # of the usual time of a round, when the blow falls


def measure(*, values: int, silence_s: float) -> Report:
    """Kill and stop members and the coordinator, each case with islands of its own."""
    setting = BareConfig(values, silence_s)
    cases = {
        "kill a member": (("C",), signal.SIGKILL),
        "kill the coordinator": (("A",), signal.SIGKILL),
        "kill two": (("A", "C"), signal.SIGKILL),
        "stop a member": (("C",), signal.SIGSTOP),
        "stop the coordinator": (("A",), signal.SIGSTOP),
    }
    rows = {name: strike(setting, victims, number) for name, (victims, number) in cases.items()}
    extra = {name: row["extra_s"] for name, row in rows.items()}
    killed = max(extra["kill a member"], extra["kill the coordinator"])
    stopped = max(extra["stop a member"], extra["stop the coordinator"])
    checks = [
        Check("recover.kill_extra_s", killed, 1.0, "lower"),
        Check("recover.kill_two_extra_s", extra["kill two"], 1.0, "lower"),
        Check("recover.stop_extra_s", stopped, silence_s + 1.0, "lower"),
        Check("recover.digests_equal", float(all(row["digests_equal"] for row in rows.values())), 1.0, "higher"),
    ]
    return Report(checks, {"islands": len(NAMES), "values": values, "silence_s": silence_s, "faults": rows})


def strike(setting: BareConfig, victims: tuple[str, ...], number: int) -> dict[str, Any]:
    """Send the signal to these islands during an all-reduce, and measure the round that it hits."""
    with crew(setting, NAMES) as team:
        team.await_commits(ROUNDS + 2, NAMES)
        usual = [_duration(team, round_number, NAMES) for round_number in range(3, ROUNDS + 3)]
        begin = team.expect(lambda event: event.kind == "begin" and len(event.data["members"]) == len(NAMES))
        time.sleep(INTO * median(usual))
        for victim in victims:
            team.signal(victim, number)
        survivors = tuple(name for name in NAMES if name not in victims)
        struck = begin.data["round"]
        team.await_commits(struck, survivors)
        took = _duration(team, struck, survivors)
        digests = {report["digest"] for report in team.stand_still(survivors).values()}
        notes = [event.data["note"] for event in team.events if event.kind == "note"]
    return {
        "extra_s": took - median(usual),
        "round_s": took,
        "usual_s": median(usual),
        "digests_equal": len(digests) == 1,
        "notes": "; ".join(sorted({f"{kind} {peer}" for kind, peer, _ in notes})),
    }


def _duration(team: Crew, round_number: int, names: tuple[str, ...]) -> float:
    """Return the seconds from a round's first *begin* until the last of these islands has committed it."""
    of_round = [event for event in team.events if event.data.get("round") == round_number]
    begun_at = min(event.at for event in of_round if event.kind == "begin")
    return max(event.at for event in of_round if event.kind == "commit" and event.island in names) - begun_at
