"""What an island reports as lines of text: a sentence for each event that deserves one, and a step's figures."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

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
    Waiting,
    WitnessStart,
)
from diloco.report.status import CAUSES
from diloco.units import counted, format_count, format_duration, format_loss

BARS = "▁▂▃▄▅▆▇█"
NAMED = 6  # islands in a line; more are counted


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
        case Waiting():
            return wait_words(event)
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


def wait_words(event: Waiting) -> str:
    """Say for what an island waits, for whom, and for how long it has."""
    whom = f" for {names(event.islands)}" if event.islands else ""
    why = f": {CAUSES[event.cause]}".replace("`", "") if event.cause in CAUSES and event.cause != "round" else ""
    return f"{event.state}{whom} ({format_duration(max(0.0, event.time - event.since))} so far){why}"


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


def start_after(event: Event, start: Start | None) -> Start | None:
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
        self._start = start_after(event, self._start)
        text = sentence(event)
        if isinstance(event, Step) and self._start is not None:
            text = "  ".join([f"step {event.step:>5}/{self._start.steps}", *figures(event, self._start)])
        if text:
            self._console.print(text, soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        pass


def curve(values: deque[float] | list[float]) -> str:
    """Draw values as a row of block characters, lowest to highest, with a gap where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
