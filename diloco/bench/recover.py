"""Measure what a lost island costs the others: from a round's first *begin* until the last survivor committed it.

Real processes, real signals, in the middle of the all-reduce. The extra time is that of the struck round over the
median of undisturbed rounds of the same islands. Over a slow link it is the bytes that count: those that survivors
receive in the struck round beyond what they receive in an undisturbed one, over those of all islands in such a round.
"""

import signal
import time
from collections import Counter
from statistics import median
from typing import Any

from diloco.bench.bare import BareConfig
from diloco.bench.crew import Crew, crew
from diloco.bench.report import Check, Report

NAMES = ("A", "B", "C", "D")  # A leads
ROUNDS = 6  # undisturbed, after the first two
INTO = 0.3  # of the usual time of a round, when the blow falls
CLEAN = 3  # rounds over a slow link before one is struck, after the first
LONG_S = 600.0
PATIENT = 1000.0  # times the usual: no island is left out because the machine is busy


def measure(
    *, values: int, silence_s: float, islands: int = 4, line: tuple[float, float] | None = None, into: float = 0.9
) -> Report:
    """Kill and stop members and the coordinator, each case with islands of its own.

    With a `line`, its rate and its delay, kill one member when `into` of its bytes have come.
    """
    if line is not None:
        return measure_over_link(values, silence_s, islands, line, into)
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


def measure_over_link(values: int, silence_s: float, islands: int, line: tuple[float, float], into: float) -> Report:
    """Kill a member late in an exchange over slow links, and compare bytes and seconds with undisturbed rounds."""
    names = tuple(chr(ord("A") + number) for number in range(islands))
    setting = BareConfig(values, silence_s, bits_per_s=line[0], delay_s=line[1], partition="quorum", straggler=PATIENT)
    victim = names[islands // 2]
    survivors = tuple(name for name in names if name != victim)
    with crew(setting, names) as team:
        team.expect(lambda _: len(_clean(team, islands)) >= CLEAN, LONG_S)
        team.send(victim, "die into", into)
        last = team.expect(lambda event: event.kind == "dies" and event.island == victim, LONG_S, since=0.0)
        struck = last.data["round"]
        team.await_commits(struck, survivors, timeout_s=LONG_S)
        digests = {report["digest"] for report in team.stand_still(survivors).values()}
        clean = [number for number in _clean(team, islands) if number < struck]
        usual = {name: median(_received(team, number, name) for number in clean) for name in names}
        extra = sum(_received(team, struck, name) - usual[name] for name in survivors)
        seconds = _duration(team, struck, survivors)
        usual_s = median(_duration(team, number, survivors) for number in clean)
        kept = _islands(team, struck) == islands
    share = extra / sum(usual.values())
    checks = [
        Check("recover.extra_bytes_share", share, 0.25 if islands <= 4 else 0.2, "lower"),
        Check("recover.digests_equal", float(len(digests) == 1), 1.0, "higher"),
    ]
    figures = {
        "islands": islands, "values": values, "silence_s": silence_s, "into": into, "bits_per_s": line[0],
        "delay_s": line[1], "exchange_bytes": sum(usual.values()), "extra_bytes": extra, "usual_s": usual_s,
        "struck_s": seconds, "victim_counted": kept, "attempts": _attempts(team, struck),
        "attempts_usually": [_attempts(team, number) for number in clean],
    }  # fmt: skip
    return Report(checks, figures)


def _received(team: Crew, round_number: int, name: str) -> int:
    """Return the bytes that an island received between the commit before this round's and this one's."""
    at = {e.data["round"]: e.data["received"] for e in team.events if e.kind == "commit" and e.island == name}
    return int(at[round_number] - at[round_number - 1])


def _clean(team: Crew, islands: int) -> list[int]:
    """Return the rounds, after the first, that all islands committed and that took one attempt."""
    commits = Counter(e.data["round"] for e in team.events if e.kind == "commit" and len(e.data["islands"]) == islands)
    return [
        number for number, done in commits.items() if done == islands and number > 1 and _attempts(team, number) == 1
    ]


def _attempts(team: Crew, round_number: int) -> int:
    """Return how many attempts at an all-reduce a round took."""
    begins = (e for e in team.events if e.kind == "begin" and e.data["round"] == round_number)
    return len({e.data["ballot"] for e in begins})


def _islands(team: Crew, round_number: int) -> int:
    """Return how many islands contributed to a round."""
    return len(next(e for e in team.events if e.kind == "commit" and e.data["round"] == round_number).data["islands"])


def _duration(team: Crew, round_number: int, names: tuple[str, ...]) -> float:
    """Return the seconds from a round's first *begin* until the last of these islands has committed it."""
    of_round = [event for event in team.events if event.data.get("round") == round_number]
    begun_at = min(event.at for event in of_round if event.kind == "begin")
    return max(event.at for event in of_round if event.kind == "commit" and event.island in names) - begun_at
