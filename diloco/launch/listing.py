"""What `diloco launch --list` shows: how each island's job is, as its scheduler says, and how far it is in the run.

The run's part comes from the islands' events. Those whose folders are on other machines are known by what others say.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco.launch.backend import Island, JobState, Launch
from diloco.report.events import Event
from diloco.report.watching import Tail
from diloco.units import format_duration

HEADER = ("ISLAND", "JOB", "STATE", "WHERE", "ROUND", "STEP", "SEEN")


@dataclass(frozen=True)
class Progress:
    """Hold how far an island is: its last round and step, and when it said so."""

    round: int
    step: int
    at: float


def progress_of(folders: Mapping[str, Path]) -> dict[str, Progress]:
    """Return how far the islands of these folders are, and those who took part in their rounds, by their names."""
    found: dict[str, Progress] = {}
    for name, folder in folders.items():
        for event in Tail(folder / "events.jsonl").read():
            for island in (name, *_contributors(event)):
                found[island] = _later(found.get(island, Progress(0, 0, 0.0)), event, own=island == name)
    return {name: progress for name, progress in found.items() if progress.at}


def _contributors(event: Event) -> list[str]:
    return [str(name) for name in event["contributors"]] if event["event"] == "round" else []


def _later(before: Progress, event: Event, *, own: bool) -> Progress:
    """Return what is known of an island after an event of its own, or after a round that it was part of."""
    if event["time"] < before.at or event["event"] not in ("round", "step"):
        return before
    step = max(before.step, event["step"]) if own else before.step
    return Progress(max(before.round, event.get("round", 0)), step, event["time"])


def table(launch: Launch, states: Mapping[str, JobState], now: float | None = None) -> list[str]:
    """Return the lines of the list: a header, and a line for each island."""
    base = Path(launch.config.launch.dir or launch.folder)
    reached = progress_of({island.name: base / island.name for island in launch.islands})
    at = time.time() if now is None else now
    rows = [HEADER, *(tuple(_cells(island, states.get(island.name), reached, at)) for island in launch.islands)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(island: Island, job: JobState | None, reached: Mapping[str, Progress], now: float) -> Iterator[str]:
    yield island.name
    yield island.job or "-"
    if job is None:
        yield "not submitted"
    else:
        yield f"{job.state} ({job.detail})" if job.detail else job.state
    yield " at ".join(filter(None, (job.where, job.address))) if job is not None else ""
    progress = reached.get(island.name)
    yield str(progress.round) if progress is not None else "-"
    yield str(progress.step) if progress is not None and progress.step else "-"
    yield f"{format_duration(max(0.0, now - progress.at))} ago" if progress is not None else "never"
