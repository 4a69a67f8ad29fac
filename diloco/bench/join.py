"""Measure what a newcomer costs those who train, and what it downloads.

First their round times while it fetches the state, and when it contributes. Then, over shaped links, an island comes
with an empty disk and downloads the whole state at the rate of its link; and once more with the state of two rounds ago
on its disk, when it downloads the rounds since. Then newcomers on slow links (`newcomers.py`). Real processes, mutual
TLS, real files; last, more sizes and links in virtual time (`virtual_newcomers.py`).
"""

import shutil
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from diloco.bench import newcomers, virtual_newcomers
from diloco.bench.bare import BareConfig
from diloco.bench.crew import Crew, Event, crew
from diloco.bench.recover import NAMES
from diloco.bench.report import Check, Report
from diloco.checkpoint.log.snapshot import snapshots

NEWCOMER = "E"
ROUNDS = 4  # undisturbed
PACE_S = 8.0  # of a phase: short beside real ones, long beside a round
DONORS = NAMES[:3]
CODEC = "int4"
DOWNLOAD_PACE_S = 10.0  # of a phase: long enough for a process to start in between
SETTLE_S = 2.0  # after a round, until it is applied everywhere; the next one is a phase away
AWAY = 2  # rounds
WRITTEN_S = 60.0


def measure(*, values: int, joins: int, bits_per_s: float) -> Report:
    """Run all parts with vectors of so many values and so many newcomers, one after the other."""
    parts = (
        _company(values, joins),
        downloads(values, joins, bits_per_s),
        newcomers.measure(),
        virtual_newcomers.measure(),
    )
    figures = {name: value for part in parts for name, value in part.figures.items()}
    return Report([check for part in parts for check in part.checks], figures)


def _company(values: int, joins: int) -> Report:
    """Measure what the islands that train notice of newcomers."""
    with crew(BareConfig(values, pace_s=PACE_S), NAMES) as team:
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
    """Let one island fetch, contribute and die again, so that the next one finds the same four."""
    since = time.monotonic()
    first = team.newest()
    team.admit(NEWCOMER)
    fetched = team.told(NEWCOMER, "fetched", since)
    at_end = team.newest()
    contributed = team.expect(lambda e: e.kind == "commit" and NEWCOMER in e.data["islands"], since=since)
    # those with contributions: records that only lease samples take no time
    rounds = {e.data["round"] for e in team.events if e.kind == "commit" and e.data["islands"]}
    row = {
        "transfer_s": fetched.at - since,
        "donors": len(fetched.data["donors"]),
        "rounds_until_it_contributes": sum(at_end < number <= contributed.data["round"] for number in rounds),
        "round_s_of_each": _round_times(team, first, max(at_end, first + 2)),
    }
    team.end(NEWCOMER)
    team.await_commits(team.newest() + 2, NAMES)
    team.prepare(NEWCOMER)
    team.await_commits(team.newest() + 2, NAMES)
    return row


def _round_times(team: Crew, first: int, last: int) -> list[float]:
    """Return the seconds from the last island's commit to that of the next round with contributions."""
    ends: dict[int, float] = {}
    for event in team.events:
        if event.kind == "commit" and event.data["islands"] and event.island in NAMES:
            number = event.data["round"]
            ends[number] = max(ends.get(number, 0.0), event.at)
    order = [ends[number] for number in sorted(ends) if first <= number <= last]
    return [later - earlier for earlier, later in pairwise(order)]


def downloads(values: int, joins: int, bits_per_s: float, *, pace_s: float = DOWNLOAD_PACE_S) -> Report:
    """Measure downloads over links of this rate: of the whole state, and of the rounds that were missed."""
    state_bytes = 2 * 4 * values
    with TemporaryDirectory(prefix="diloco-bench-") as folder:
        setting = BareConfig(values, pace_s=pace_s, codec=CODEC, bits_per_s=bits_per_s, folder=folder)
        with crew(setting, DONORS) as team:
            _await_updates(team, 2, since=0.0)
            rows = {f"download {number + 1}": _download(team, Path(folder)) for number in range(joins)}
            back = _come_back(team)
    limit_s = 8 * state_bytes / bits_per_s
    seconds = median(row["seconds"] for row in rows.values())
    checks = [
        Check("join.time_over_link_limit", seconds / limit_s, 1.15, "lower"),
        Check("join.replay_byte_saving", state_bytes / back["bytes"], 5.0, "higher"),
    ]
    return Report(checks, {"state_bytes": state_bytes, "link_limit_s": limit_s, "downloads": rows, "return": back})


def _download(team: Crew, folder: Path) -> dict[str, Any]:
    """Let an island with an empty disk fetch the state; it is killed as soon as it has written a snapshot."""
    shutil.rmtree(folder / NEWCOMER, ignore_errors=True)
    team.prepare(NEWCOMER)
    _await_updates(team, 1, since=time.monotonic())
    time.sleep(SETTLE_S)
    since = time.monotonic()
    team.admit(NEWCOMER)
    fetched = team.told(NEWCOMER, "fetched", since)
    deadline = time.monotonic() + WRITTEN_S
    while not snapshots(folder / NEWCOMER):
        assert time.monotonic() < deadline, "its snapshot should be on disk"
        time.sleep(0.05)
    team.end(NEWCOMER)
    return {"seconds": fetched.data["seconds"], "bytes_of_each": list(fetched.data["donors"].values())}


def _come_back(team: Crew) -> dict[str, Any]:
    """Start the island from its own disk, and return what it downloads to catch up with the others."""
    since = time.monotonic()
    team.prepare(NEWCOMER)
    _await_updates(team, AWAY, since=since)
    team.admit(NEWCOMER)
    caught_up = team.told(NEWCOMER, "caught up", since).data
    return {"bytes": caught_up["bytes"], "rounds": caught_up["updates"]}


def _await_updates(team: Crew, count: int, *, since: float) -> None:
    """Wait until so many rounds with contributions were committed."""
    seen: set[int] = set()

    def enough(event: Event) -> bool:
        if event.kind == "commit" and event.data["islands"]:
            seen.add(event.data["round"])
        return len(seen) >= count

    team.expect(enough, since=since)
