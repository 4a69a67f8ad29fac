"""Show a run to the person who watches it: a live picture in a terminal, plain lines or JSON everywhere else."""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live

from diloco.report.board import Row
from diloco.report.console import LastingConsole
from diloco.report.events import Event, Note, Start, Step, Waiting, WitnessStart
from diloco.report.picture import RunPicture, with_starting
from diloco.report.sinks import Sink
from diloco.report.status import RunStatus, ask_for_others, read_status
from diloco.report.terminal import PlainView, curve, sentence, start_after
from diloco.report.watching import IslandsView
from diloco.units import counted

Show = Literal["auto", "json", "quiet"]
CURVE_POINTS = 48
REFRESH_HZ = 4
ASK_EVERY_S = 5.0  # for what other islands say of themselves, as long as the picture is shown


def open_view(
    folder: Path, show: Show = "auto", *, console: Console | None = None, notice: Callable[[], str] = lambda: ""
) -> Sink | None:
    """Open what shows an island: a picture if the console is a terminal, else plain lines; or JSON, or nothing.

    The default console is that of standard output. `notice` returns a line for the person, or "".
    """
    console = console or LastingConsole(file=sys.stdout, highlight=False, emoji=False)
    if show == "quiet":
        return None
    if show == "json":
        return JsonView(console)
    return LiveView(console, folder, notice) if console.is_terminal else PlainView(console)


class JsonView:
    """Print each event as a line of JSON, as `events.jsonl` has it."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def emit(self, event: Event) -> None:
        """Print the event."""
        self._console.print(json.dumps(event.plain()), soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        pass


class WaitsView:
    """Print only what an island waits for, to standard error: for a loop of somebody's own, which owns its terminal."""

    def emit(self, event: Event) -> None:
        """Print a line for a wait."""
        if isinstance(event, Waiting):
            print(f"diloco: {sentence(event)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """Let milestones scroll by, above a picture of the run as this island's status tells it."""

    def __init__(self, console: Console, folder: Path, notice: Callable[[], str] = lambda: "") -> None:
        self._folder = folder
        self._start: Start | None = None
        self._step: Step | None = None
        self._losses: deque[float] = deque(maxlen=CURVE_POINTS)
        self._asked_at = 0.0
        self._picture = RunPicture(self._look, notice=notice)
        self._picture.below = self._below
        self._live = Live(self._picture, console=console, transient=True, refresh_per_second=REFRESH_HZ)

    def emit(self, event: Event) -> None:
        """Start the picture when training or witnessing starts, and print a line for an event that deserves one."""
        self._start = start_after(event, self._start)
        if isinstance(event, Step):
            self._step = event
            self._losses.append(math.nan if event.loss is None else event.loss)
        elif not isinstance(event, Waiting) and (text := sentence(event)):  # the picture shows who waits
            style = "bold" if isinstance(event, Start | WitnessStart) else ""
            self._live.console.print(text, markup=False, emoji=False, style=style)
        if isinstance(event, Start | WitnessStart):
            self._live.start()

    @property
    def drawn(self) -> bool:
        """Tell whether the picture is on the screen now."""
        return self._live.is_started

    def _look(self) -> RunStatus | None:
        """Read what this process has last written down, and have other islands asked what they do."""
        status = read_status(self._folder)
        if status is None or status.pid != os.getpid():
            return None
        if len(status.islands) > 1 and time.monotonic() - self._asked_at > ASK_EVERY_S:
            self._asked_at = time.monotonic()
            ask_for_others(self._folder)
        steps = status.steps or (self._start.steps if self._start is not None else 0)
        return replace(status, steps=steps, eta_s=self._eta_s() if status.eta_s is None else status.eta_s)

    def _eta_s(self) -> float | None:
        """Return the time until the last step at the recent speed; None if that is not known."""
        start, step = self._start, self._step
        if start is None or step is None or start.tokens_per_step is None or step.tokens_per_s <= 0:
            return None
        return (start.steps - step.step) * start.tokens_per_step / step.tokens_per_s

    def _below(self) -> str:
        losses = list(self._losses)  # at once: the trainer appends while this thread draws
        parts = [f"loss {curve(losses)}"] if losses else []
        if self._step is not None and self._step.mfu is not None:
            parts.append(f"MFU {self._step.mfu:.1%}")
        if self._step is not None and self._step.skipped:
            parts.append(f"{counted(self._step.skipped, 'step')} skipped")
        return "  ".join(parts)

    def close(self) -> None:
        """Stop the live display and remove it from the terminal."""
        self._live.stop()


class LiveIslands(IslandsView):
    """Keep a picture of all islands below the milestones, in a terminal. `look` returns the run's status."""

    def __init__(self, console: Console, look: Callable[[], RunStatus | None]) -> None:
        super().__init__(console)
        self._look, self._starting = look, list[str]()
        self._live = Live(RunPicture(self._seen), console=console, transient=True, refresh_per_second=REFRESH_HZ)

    def show(self, rows: Iterable[Row]) -> None:
        """Take note of who is starting; the first call starts the display."""
        self._starting = [row.name for row in rows if row.state == "starting"]
        self._live.start()

    def _seen(self) -> RunStatus | None:
        return with_starting(self._look(), "", self._starting, time.time())

    def close(self) -> None:
        """Stop the display, which removes the picture."""
        self._live.stop()


class JsonIslands(IslandsView):
    """Print the events of all islands as lines of JSON, each with the island's name; milestones are notes."""

    def hear(self, island: str, event: Event) -> None:
        """Print an event of an island."""
        super().say(json.dumps({"island": island, **event.plain()}))

    def say(self, line: str) -> None:
        """Print what the launcher has to say as a note of no island."""
        self.hear("", Note(text=line))


class SilentIslands(IslandsView):
    """Print nothing."""

    def say(self, line: str) -> None:
        pass


def open_islands_view(
    look: Callable[[], RunStatus | None], show: Show = "auto", *, stream: TextIO | None = None
) -> IslandsView:
    """Open what shows several islands: a picture if the stream is a terminal, else lines; or JSON, or nothing."""
    console = LastingConsole(file=stream or sys.stdout, highlight=False, emoji=False)
    if show != "auto":
        return JsonIslands(console) if show == "json" else SilentIslands(console)
    return LiveIslands(console, look) if console.is_terminal else IslandsView(console)
