"""Measure how soon a newcomer takes part, and how steadily, where catching up takes about as long as a round.

Four islands train on slow links, all alike. A fifth one fetches the state over such a link and joins; it is killed, and
comes once more. What counts is how many rounds go by after its download until one contains its work, and in how many
of those that follow it takes part. Its download is the state and the results of the rounds that were made while that
came: without them it has no state that anybody else has. The count from the end of the state alone stands beside it.
"""

import time
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

from diloco.bench.bare import BareConfig
from diloco.bench.crew import Crew, Event, crew
from diloco.bench.recover import NAMES
from diloco.bench.report import Check, Report

NEWCOMER = "E"
BEFORE = 5  # rounds, so that their usual length is known
AFTER = 12  # rounds that are counted after the first with the newcomer
DELAY_S = 0.04  # one way


class Cell(NamedTuple):
    """Describe one size of model, and the link of every island."""

    values: int
    bits_per_s: float


CELLS = (Cell(17_000, 5e5), Cell(250_000, 2e6), Cell(1_000_000, 2e7))
SLOW_ALONE = 10.0  # times slower than the others' links
BESIDE = 60  # rounds of the others beside such a newcomer


def measure(pace_s: float = 1.0) -> Report:
    """Measure every cell, with all islands on the same link, and a newcomer whose link alone is slow."""
    rows = {f"{cell.values} values at {cell.bits_per_s:.0f} bit/s": _cell(cell, pace_s) for cell in CELLS}
    alone = _slow_alone(CELLS[-1], pace_s)
    joins = [join for row in rows.values() for join in row.values()]
    return Report(
        [
            Check("join.rounds_until_in", max(join["rounds_until_in"] for join in joins), 3, "lower"),
            Check("join.share_after", min(join["share_after"] for join in joins), 0.8, "higher"),
            Check("join.rounds_beside_slow", alone["ratio"], 1.1, "lower"),
        ],
        {"cells": rows, "slow alone": alone},
    )


def _cell(cell: Cell, pace_s: float) -> dict[str, Any]:
    setting = BareConfig(
        cell.values, pace_s=pace_s, bits_per_s=cell.bits_per_s, delay_s=DELAY_S, partition="quorum", silence_s=3.0
    )
    with crew(setting, NAMES) as team:
        _await_rounds(team, BEFORE, 0.0)
        rows = {}
        for which in ("first", "after a kill"):
            team.prepare(NEWCOMER)
            _await_rounds(team, 1, time.monotonic())
            rows[which] = _join(team)
            team.end(NEWCOMER)
            _await_rounds(team, 2, time.monotonic())
        return rows


def _slow_alone(cell: Cell, pace_s: float) -> dict[str, Any]:
    """Let a newcomer join whose link alone is slow: the others' rounds before and after, and in how many it is.

    Where one result takes longer to download than a round, it is never at the head, and in none.
    """
    setting = BareConfig(
        cell.values, pace_s=pace_s, bits_per_s=cell.bits_per_s, delay_s=DELAY_S, partition="quorum", silence_s=3.0
    )
    with crew(setting, NAMES) as team:
        _await_rounds(team, BEFORE + AFTER, 0.0)
        usual = _lengths(team, 0.0)[BEFORE:]
        team.setting = replace(setting, bits_per_s=cell.bits_per_s / SLOW_ALONE)
        team.prepare(NEWCOMER)
        since = time.monotonic()
        team.admit(NEWCOMER)
        _await_rounds(team, BESIDE, since)
        rounds, times = _rounds(team, since), _lengths(team, since)
        islands = [rounds[number][1] for number in sorted(rounds)]
        return {
            "usual_round_s": mean(usual), "round_s": mean(times), "ratio": mean(times) / mean(usual),
            "rounds": len(islands), "rounds_with_it": sum(NEWCOMER in each for each in islands),
            "round_s_of_each": times,
        }  # fmt: skip


def _lengths(team: Crew, since: float) -> list[float]:
    rounds = _rounds(team, since)
    return [later - earlier for earlier, later in pairwise(rounds[number][0] for number in sorted(rounds))]


def _join(team: Crew) -> dict[str, Any]:
    """Let the newcomer fetch the state and take part; return when it came in and how steadily it stayed."""
    since = time.monotonic()
    team.admit(NEWCOMER)
    fetched = team.told(NEWCOMER, "fetched", since)
    try:
        first = team.expect(lambda e: _is_round(e) and NEWCOMER in e.data["islands"], 120.0, since=since)
    except TimeoutError:
        return {"rounds_until_in": len(_rounds(team, fetched.at)), "share_after": 0.0, "fetch_s": fetched.at - since}
    downloaded = _downloaded(team, fetched, first.at)
    _await_rounds(team, AFTER, first.at + 1e-6, after=first.data["round"])
    rounds = _rounds(team, fetched.at)
    later = {number: islands for number, (_, islands) in rounds.items() if number > first.data["round"]}
    counted = [NEWCOMER in later[number] for number in sorted(later)[:AFTER]]
    ends = [at for at, _ in (rounds[number] for number in sorted(rounds))]
    in_time = [at for number, (at, _) in rounds.items() if number <= first.data["round"]]
    return {
        "rounds_until_in": sum(at > downloaded for at in in_time),
        "rounds_from_state": len(in_time),
        "share_after": mean(counted),
        "fetch_s": fetched.at - since,
        "round_s": mean(later - earlier for earlier, later in pairwise(ends)) if len(ends) > 1 else 0.0,
    }


def _downloaded(team: Crew, fetched: Event, until: float) -> float:
    """Return when the newcomer had the state, and the results of the rounds made while that was on its way."""
    missed = [number for number, (at, _) in _rounds(team, 0.0).items() if at < fetched.at]
    if max(missed, default=0) <= fetched.data["round"]:
        return fetched.at
    updates = (e for e in team.events if e.island == NEWCOMER and e.kind == "caught up")
    return next((e.at for e in updates if fetched.at < e.at < until), fetched.at)


def _is_round(event: Event) -> bool:
    return event.kind == "commit" and bool(event.data["islands"]) and event.island in NAMES


def _rounds(team: Crew, since: float) -> dict[int, tuple[float, tuple[str, ...]]]:
    """Return the rounds with contributions that were first committed since then: when, and by whom."""
    found: dict[int, tuple[float, tuple[str, ...]]] = {}
    for event in filter(_is_round, team.events):
        found.setdefault(event.data["round"], (event.at, event.data["islands"]))
    return {number: each for number, each in found.items() if each[0] >= since}


def _await_rounds(team: Crew, count: int, since: float, *, after: int = 0) -> None:
    seen: set[int] = set()

    def enough(event: Event) -> bool:
        if _is_round(event) and event.data["round"] > after:
            seen.add(event.data["round"])
        return len(seen) >= count

    team.expect(enough, since=since)
