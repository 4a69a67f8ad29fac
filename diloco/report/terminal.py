"""The run as a person watches it: a live view in a terminal, plain lines everywhere else."""

import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.report.events import Event, Sink
from diloco.units import format_count, format_duration

BARS = "▁▂▃▄▅▆▇█"
CURVE_POINTS = 48
NAMED = 6  # islands in a line; more are counted


def open_view(stream: TextIO | None = None) -> Sink:
    console = Console(file=stream or sys.stdout, highlight=False)
    return LiveView(console) if console.is_terminal else PlainView(console)


def sentence(event: Event) -> str | None:
    """One line for an event worth a line of its own; None for the rest."""
    match event["event"]:
        case "start":
            mesh = "" if event["mesh"] == "fsdp 1 x tp 1" else f", {event['mesh']}"
            model = f"{event['model']}, {format_count(event['parameters'])} parameters"
            data = f"{event['data']}, {format_count(event['data_tokens'])} tokens"
            return f"{event['run']}: {model}, on {data}; {event['device']}, {event['dtype']}{mesh}"
        case "note":
            return f"note: {event['text']}"
        case "resume":
            return f"resumed at step {event['step']} from {event['path']}"
        case "validation":
            return f"round {event['round']:>3}  step {event['step']:>5}  validation loss {event['validation_loss']:.4f}"
        case "save":
            return f"saved step {event['step']} to {event['path']}"
        case "ticket":
            return f"others join with: diloco join {event['ticket']}"
        case "amended":
            return f"the run's owner sets {event['text']}"
        case "elastic":
            return f"{event['island']} {event['what']}: {event['text']}"
        case "round" if len(event["contributors"]) > 1:  # an island alone is told by its validation
            return f"round {event['round']:>3}  step {event['step']:>5}  {names(event['contributors'])}"
    return None


def names(islands: Sequence[str]) -> str:
    return ", ".join(islands) if len(islands) <= NAMED else f"{len(islands)} islands"


def figures(event: Event, start: Event) -> list[str]:
    """Of a step, with the remaining time from the recent speed."""
    eta_s = (start["steps"] - event["step"]) * start["tokens_per_step"] / max(1e-9, event["tokens_per_s"])
    parts = [f"loss {event['loss']:.4f}", f"{format_count(event['tokens_per_s'])} tokens/s"]
    if event["mfu"] is not None:
        parts.append(f"MFU {event['mfu']:.1%}")
    if event["skipped"]:
        parts.append(f"{event['skipped']} steps skipped")
    return [*parts, f"ETA {format_duration(eta_s)}"]


class PlainView:
    _start: Event  # of the run, which comes before every step

    def __init__(self, console: Console) -> None:
        self._console = console

    def emit(self, event: Event) -> None:
        if event["event"] == "start":
            self._start = event
        text = sentence(event)
        if event["event"] == "step":
            text = "  ".join([f"step {event['step']:>5}/{self._start['steps']}", *figures(event, self._start)])
        if text:
            self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        pass


class LiveView:
    """Milestones scroll by; the last lines show the bar, the figures and the curve of the loss."""

    _start: Event

    def __init__(self, console: Console) -> None:
        self._losses: deque[float] = deque(maxlen=CURVE_POINTS)
        self._live = Live(console=console, transient=True, refresh_per_second=8)

    def emit(self, event: Event) -> None:
        if event["event"] == "start":
            self._start = event
            self._live.start()
        if event["event"] == "step":
            self._losses.append(event["loss"])
            self._live.update(self._picture(event))
        elif text := sentence(event):
            self._live.console.print(text, markup=False, style="bold" if event["event"] == "start" else "")

    def _picture(self, event: Event) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        steps = self._start["steps"]
        bar = ProgressBar(total=steps, completed=event["step"], width=28)
        row.add_row(f"step {event['step']}/{steps}", bar, *figures(event, self._start))
        return Group(row, Text(f"loss {curve(self._losses)}", style="cyan"))

    def close(self) -> None:
        self._live.stop()


def curve(values: deque[float] | list[float]) -> str:
    """The values as a row of block characters, lowest to highest; a gap where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
