"""Show a run to the person who watches it: a live view in a terminal, plain lines everywhere else."""

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.report.console import LastingConsole
from diloco.report.events import (
    Amended,
    Event,
    IslandNews,
    Note,
    Resume,
    Round,
    Saved,
    Start,
    Step,
    TicketReady,
    Validation,
    WitnessStart,
)
from diloco.report.sinks import Sink
from diloco.units import counted, format_count, format_duration, format_loss

BARS = "▁▂▃▄▅▆▇█"
CURVE_POINTS = 48
NAMED = 6  # islands in a line; more are counted


def open_view(stream: TextIO | None = None) -> Sink:
    """Open a live view if the stream is a terminal, otherwise plain lines. The default is standard output."""
    console = LastingConsole(file=stream or sys.stdout, highlight=False)
    return LiveView(console) if console.is_terminal else PlainView(console)


def sentence(event: Event) -> str | None:
    """Return one line for an event that deserves a line of its own; None for the rest."""
    match event:
        case Start():
            mesh = "" if event.mesh == "fsdp 1 x tp 1" else f", {event.mesh}"
            model = f"{event.model}, {format_count(event.parameters)} parameters"
            tokens = "" if event.data_tokens is None else f", {format_count(event.data_tokens)} tokens"
            return f"{event.run}: {model}, on {event.data}{tokens}; {event.device}, {event.dtype}{mesh}"
        case WitnessStart():
            size = format_count(event.trained_parameters)
            return f"{event.run}: witness from round {event.round} on: it stores {size} parameters and votes"
        case Note():
            return f"note: {event.text}"
        case Resume():
            return f"resumed at step {event.step} from {event.path}"
        case Validation():
            parts = [names(event.contributed)] if event.islands > 1 else []
            return "  ".join([_at(event), *parts, f"validation loss {format_loss(event.validation_loss)}"])
        case Saved():
            return f"saved step {event.step} to {event.path}"
        case TicketReady():
            return f"others join with: diloco join {event.file}"
        case Amended():
            return f"by the run's owner: {event.text}"
        case IslandNews():
            text = f"{event.island} {event.what}"
            return text if event.text in ("", "leaves") else f"{text}: {event.text}"
        # of one among several, its name is told, too: it may be another; a validation is told instead
        case Round() if event.contributors and event.islands > 1 and not event.validated:
            return f"{_at(event)}  {names(event.contributors)}"
    return None


def _at(event: Round | Validation) -> str:
    return f"round {event.round:>3}  step {event.step:>5}"


def names(islands: Sequence[str]) -> str:
    """List islands by name, or only count them where they are more than six."""
    return ", ".join(islands) if len(islands) <= NAMED else f"{len(islands)} islands"


def figures(event: Step, start: Start) -> list[str]:
    """Return a step's figures as short texts, with the remaining time at the recent speed."""
    parts = [f"loss {format_loss(event.loss)}", f"{format_count(event.tokens_per_s)} tokens/s"]
    if event.mfu is not None:
        parts.append(f"MFU {event.mfu:.1%}")
    if event.skipped:
        parts.append(f"{counted(event.skipped, 'step')} skipped")
    if start.tokens_per_step is None:
        return parts
    eta_s = (start.steps - event.step) * start.tokens_per_step / max(1e-9, event.tokens_per_s)
    return [*parts, f"ETA {format_duration(eta_s)}"]


def _start_after(event: Event, start: Start | None) -> Start | None:
    """Return what is known of the run after an event: the owner may change when it ends."""
    if isinstance(event, Start):
        return event
    return replace(start, steps=event.steps) if isinstance(event, Amended) and start is not None else start


class PlainView:
    """Print events and steps as plain lines, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start: Start | None = None  # of the run, which comes before every step

    def emit(self, event: Event) -> None:
        """Print a line for a step or for an event that deserves one."""
        self._start = _start_after(event, self._start)
        text = sentence(event)
        if isinstance(event, Step) and self._start is not None:
            text = "  ".join([f"step {event.step:>5}/{self._start.steps}", *figures(event, self._start)])
        if text:
            self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        pass


class LiveView:
    """Let milestones scroll by, above a progress bar, the figures and the curve of the loss."""

    def __init__(self, console: Console) -> None:
        self._start: Start | None = None
        self._losses: deque[float] = deque(maxlen=CURVE_POINTS)
        self._live = Live(console=console, transient=True, refresh_per_second=8)

    def emit(self, event: Event) -> None:
        """Update the bar on a step, and print a line for an event that deserves one."""
        self._start = _start_after(event, self._start)
        if isinstance(event, Start):
            self._live.start()
        if isinstance(event, Step) and self._start is not None:
            self._losses.append(math.nan if event.loss is None else event.loss)
            self._live.update(self._picture(event, self._start))
        elif text := sentence(event):
            self._live.console.print(text, markup=False, style="bold" if isinstance(event, Start) else "")

    def _picture(self, event: Step, start: Start) -> RenderableType:
        """Draw the last lines: the bar with the step's figures, and the curve."""
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=start.steps, completed=event.step, width=28)
        row.add_row(f"step {event.step}/{start.steps}", bar, *figures(event, start))
        return Group(row, Text(f"loss {curve(self._losses)}", style="cyan"))

    def close(self) -> None:
        """Stop the live display and remove it from the terminal."""
        self._live.stop()


def curve(values: deque[float] | list[float]) -> str:
    """Draw values as a row of block characters, lowest to highest, with a gap where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
