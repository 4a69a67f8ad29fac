"""What a newcomer costs those who train: their round times while it fetches the state, and when it contributes."""

import time
from itertools import pairwise
from statistics import median
from typing import Any

from diloco.bench import download
from diloco.bench.bare import Setting
from diloco.bench.crew import Crew, crew
from diloco.bench.recover import NAMES
from diloco.bench.report import Check, Report, parse_option
from diloco.units import parse_rate

NEWCOMER = "E"
ROUNDS = 4  # undisturbed
PACE_S = 8.0  # of a phase: short beside real ones, long beside a round


def measure(*, values: int, joins: int, rate: str) -> Report:
    bits_per_s = parse_option("--rate", rate, parse_rate)
    company, alone = _company(values, joins), download.measure(values=values, bits_per_s=bits_per_s, joins=joins)
    return Report([*company.checks, *alone.checks], {**company.figures, **alone.figures})


def _company(values: int, joins: int) -> Report:
    """What those feel who train."""
    with crew(Setting(values, pace_s=PACE_S), NAMES) as team:
        team.await_commits(3, NAMES)
        team.prepare(NEWCOMER)  # starting a process takes seconds of this machine's own time: not what is measured
        before = team.newest()
        team.await_commits(before + ROUNDS, NAMES)
        usual = _round_times(team, before, before + ROUNDS)
        rows = {f"join {number + 1}": _join(team) for number in range(joins)}
    slower = median(time for row in rows.values() for time in row["round_s_of_each"]) / median(usual)
    later = max(row["rounds_until_it_contributes"] for row in rows.values())
    return Report(
        [
            Check("join.round_time_ratio", slower, 1.05, "lower"),
            Check("join.rounds_until_contributing", later, 2, "lower"),
        ],
        {"islands": len(NAMES), "values": values, "usual_round_s": median(usual), "joins": rows},
    )


def _join(team: Crew) -> dict[str, Any]:
    """Fetch, contribute, and be gone again, so that the next one finds the same four."""
    since = time.monotonic()
    first = team.newest()
    team.admit(NEWCOMER)
    fetched = team.expect(lambda e: e.kind == "fetched", since=since)
    at_end = team.newest()
    contributed = team.expect(lambda e: e.kind == "commit" and NEWCOMER in e.data["islands"], since=since)
    row = {
        "transfer_s": fetched.at - since,
        "donors": len(fetched.data["donors"]),
        "rounds_until_it_contributes": _updates(team, at_end, contributed.data["round"]),
        "round_s_of_each": _round_times(team, first, max(at_end, first + 2)),
    }
    team.end(NEWCOMER)
    team.await_commits(team.newest() + 2, NAMES)
    team.prepare(NEWCOMER)
    team.await_commits(team.newest() + 2, NAMES)
    return row


def _updates(team: Crew, after: int, until: int) -> int:
    """Rounds with contributions; records that only lease samples take no time."""
    found = {e.data["round"] for e in team.events if e.kind == "commit" and e.data["islands"]}
    return len([number for number in found if after < number <= until])


def _round_times(team: Crew, first: int, last: int) -> list[float]:
    """From the last island's commit to that of the next round with contributions."""
    ends: dict[int, float] = {}
    for event in team.events:
        if event.kind == "commit" and event.data["islands"] and event.island in NAMES:
            number = event.data["round"]
            ends[number] = max(ends.get(number, 0.0), event.at)
    order = [ends[number] for number in sorted(ends) if first <= number <= last]
    return [later - earlier for earlier, later in pairwise(order)]
