"""What an island downloads when it comes: the whole state at the rate of its link, or the rounds that its disk lacks.

Three islands train over shaped links and give; the fourth comes with an empty disk, and then once more with the state
of two rounds ago on it. Real processes, mutual TLS, real files.
"""

import shutil
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from diloco.bench.bare import Setting
from diloco.bench.crew import Crew, crew
from diloco.bench.crew_member import Event
from diloco.bench.report import Check, Report
from diloco.checkpoint.log.snapshot import snapshots

DONORS = ("A", "B", "C")
NEWCOMER = "E"
CODEC = "int4"
PACE_S = 10.0  # of a phase: long enough for a process to start in between
SETTLE_S = 2.0  # after a round, until it is applied everywhere; the next one is a phase away
AWAY = 2  # rounds
WRITTEN_S = 60.0


def measure(*, values: int, bits_per_s: float, joins: int, pace_s: float = PACE_S) -> Report:
    state_bytes = 2 * 4 * values
    with TemporaryDirectory(prefix="diloco-bench-") as folder:
        setting = Setting(values, pace_s=pace_s, codec=CODEC, bits_per_s=bits_per_s, folder=folder)
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
    """Onto an empty disk. It dies as soon as it has a snapshot."""
    shutil.rmtree(folder / NEWCOMER, ignore_errors=True)
    team.prepare(NEWCOMER)
    _await_updates(team, 1, since=time.monotonic())
    time.sleep(SETTLE_S)
    since = time.monotonic()
    team.admit(NEWCOMER)
    fetched = team.expect(lambda event: event.kind == "fetched", since=since)
    deadline = time.monotonic() + WRITTEN_S
    while not snapshots(folder / NEWCOMER):
        assert time.monotonic() < deadline, "its snapshot should be on disk"
        time.sleep(0.05)
    team.end(NEWCOMER)
    return {"seconds": fetched.data["seconds"], "bytes_of_each": list(fetched.data["donors"].values())}


def _come_back(team: Crew) -> dict[str, Any]:
    """From its own disk to where the others are by now."""
    since = time.monotonic()
    team.prepare(NEWCOMER)
    _await_updates(team, AWAY, since=since)
    team.admit(NEWCOMER)
    caught_up = team.expect(lambda event: (event.island, event.kind) == (NEWCOMER, "caught up"), since=since)
    return {"bytes": caught_up.data["bytes"], "rounds": caught_up.data["updates"]}


def _await_updates(team: Crew, count: int, *, since: float) -> None:
    seen: set[int] = set()

    def enough(event: Event) -> bool:
        if event.kind == "commit" and event.data["islands"]:
            seen.add(event.data["round"])
        return len(seen) >= count

    team.expect(enough, since=since)
