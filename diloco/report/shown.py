"""A run's status in words: lines of text for a pipe, and the cells that the picture in a terminal is made of, too."""

import time

from diloco.report.status import IslandStatus, RunStatus
from diloco.report.tables import aligned
from diloco.report.terminal import names
from diloco.units import format_count, format_duration, format_loss, format_size

HEAD = ("island", "state", "for", "round", "step", "loss", "tokens/s", "share", "sent", "received", "")
DATED = ("lost", "left", "silent", "ended", "starting", "waiting", "catching up", "sending")
NOTED = ("lost", "excluded", "silent", "ended", "starting", "catching up", "evicted")  # whose text is news
FOR = {"min_islands": "more islands", "start_islands": "more islands", "samples": "samples"}  # where nobody is named
OVER = ("ended", "lost", "left", "evicted")


def status_lines(status: RunStatus, now: float | None = None) -> list[str]:
    """Return the run's line and a table of its islands."""
    at = time.time() if now is None else now
    rows = [cells(each, at) for each in sorted(status.islands, key=lambda each: each.name)]
    return [run_line(status, at), *aligned(HEAD, rows, left=("island", "state"))]


def run_line(status: RunStatus, now: float) -> str:
    """Return how far the run is, in which phase of a round, and when it will end at this pace."""
    parts = [f"round {status.round}", f"step {status.step}/{status.steps}" if status.steps else f"step {status.step}"]
    if is_over(status):
        parts.append(over_words(status, now))
    else:
        parts.append(phase_words(status, now))
        if status.eta_s is not None:
            parts.append(f"ETA {format_duration(status.eta_s)}")
    if status.loss is not None:
        parts.append(f"loss {format_loss(status.loss)}")
    if status.validation_loss is not None:
        parts.append(f"validation loss {format_loss(status.validation_loss)}")
    return f"{status.run}: {', '.join(parts)}"


def is_over(status: RunStatus) -> bool:
    """Tell whether no island of the run is there any more."""
    return all(each.state in OVER for each in status.islands)


def over_words(status: RunStatus, now: float) -> str:
    """Return whether a run that is over was finished, and when it was heard last."""
    elsewhere = any(each.state == "lost" for each in status.islands)  # nobody can tell
    how = "finished" if status.finished else "not running here" if elsewhere else "not running"
    return f"{how}; last heard {format_duration(max(0.0, now - status.at))} ago"


def phase_words(status: RunStatus, now: float) -> str:
    """Return the phase of the round that comes next, for how long, and what a round usually takes."""
    usual = "" if status.round_s is None else f" (a round takes {format_duration(status.round_s)})"
    return f"{status.phase} for {format_duration(max(0.0, now - status.phase_since))}{usual}"


def state_words(each: IslandStatus) -> str:
    """Return an island's state, with what or whom it waits for."""
    if each.state != "waiting":
        return each.state
    if each.cause in FOR and not each.waiting_for:
        return f"waiting for {FOR[each.cause]}"
    return f"waiting for {names(each.waiting_for)}" if each.waiting_for else "waiting"


def cells(each: IslandStatus, now: float) -> tuple[str, ...]:
    """Return an island's texts in the order of HEAD; what is not known stays empty."""
    since = format_duration(max(0.0, now - each.since)) if each.since and each.state in DATED else ""
    cut = not each.reaches_me and each.state not in (*NOTED, *OVER)
    outside = not each.member and each.state != "starting"
    notes = [
        "leads" * each.leads, "not in the roster" * outside, each.text if each.state in NOTED else "",
        f"heard by {names(each.heard_by)}" if each.heard_by else "",
        f"disk: {each.disk}" if each.disk else "", "cannot be reached from here" * cut,
    ]  # fmt: skip
    return (
        each.name, state_words(each), since, str(each.round or ""), str(each.step or ""),
        "" if each.loss is None else format_loss(each.loss),
        "" if each.tokens_per_s is None else format_count(each.tokens_per_s),
        "" if each.share is None else f"{each.share:.0%}",
        "" if each.bytes_sent is None else format_size(each.bytes_sent),
        "" if each.bytes_received is None else format_size(each.bytes_received),
        "; ".join(note for note in notes if note),
    )  # fmt: skip
