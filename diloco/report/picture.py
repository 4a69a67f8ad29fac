"""The picture of a run in a terminal, from its status: a bar, the round that comes next, and a row for each island.

`diloco run`, `join`, `simulate` and `status --watch` draw the same one. Every line fits the terminal's width: columns
that matter least are left out first, and of many islands those that are in trouble are shown.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.report.shown import HEAD, cells, is_over, over_words
from diloco.report.status import IslandStatus, RunStatus
from diloco.report.tables import harmless
from diloco.units import counted, format_count, format_duration, format_loss

LEFT_OUT_FIRST = ("step", "round", "received", "sent", "", "loss", "share", "tokens/s", "for")
GAP = 2  # blanks between two columns
SHORTEST_STATE, SHORTEST_NAME, SHORTEST_NOTE = 8, 6, 12
WIDEST_BAR, SHORTEST_BAR = 40, 8
MOST_NOTE = 60
ECHO = 3  # columns that stay free: a terminal writes ^C behind the last line
STYLES = {
    "lost": "red", "ended": "red", "silent": "red", "excluded": "red", "evicted": "dim", "left": "dim",
    "waiting": "yellow", "catching up": "yellow", "starting": "yellow", "leaving": "yellow", "sending": "cyan",
}  # fmt: skip
CALM = ("training", "sending", "waiting", "witnessing")


class RunPicture:
    """Draw a run's status anew whenever the terminal is refreshed, at the width that it has then.

    `look` returns the status, and is called at most every `every_s` seconds; `notice` a line for below, or "".
    """

    def __init__(
        self, look: Callable[[], RunStatus | None], *, notice: Callable[[], str] = lambda: "", every_s: float = 0.5
    ) -> None:
        self._look, self._notice, self._every_s = look, notice, every_s
        self._looked_at = 0.0
        self.status: RunStatus | None = None
        self.below: Callable[[], str] = lambda: ""  # a line below the islands

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now, width, height = time.time(), max(1, options.max_width - ECHO), console.height
        if now - self._looked_at >= self._every_s:
            self._looked_at, self.status = now, self._look() or self.status
        lines = [] if self.status is None else drawn(self.status, now=now, width=width, height=height - 3)
        if below := self.below():
            lines.append(fitted(below, width, "cyan"))
        if notice := self._notice():
            lines.append(Text(harmless(notice), style="bold yellow"))  # wrapped: all of it matters
        yield Group(*lines)


def drawn(status: RunStatus, *, now: float, width: int, height: int) -> list[RenderableType]:
    """Return the lines of a run: its bar, its next round, and as many of its islands as there is room for."""
    lines = [bar_line(status, now, width), fitted(round_line(status, now), width)]
    return [*lines, *table(status, now, width, height - 3)]


def bar_line(status: RunStatus, now: float, width: int) -> RenderableType:
    """Draw how far the run is, with its loss, its speed and the time that is left."""
    step = max([status.step, *(each.step for each in status.islands if each.state not in ("lost", "ended"))])
    if status.steps:
        step = min(step, status.steps)
    done = f"step {step}/{status.steps}" if status.steps else f"step {step}"
    figures = _figures(status, now)
    while figures and len(done) + len("  ".join(figures)) + SHORTEST_BAR + 3 * GAP > width:
        figures.pop()
    room = width - len(done) - sum(len(each) + GAP for each in figures) - GAP
    if not status.steps or room < SHORTEST_BAR:
        return fitted("  ".join([done, *figures]), width)
    row = Table.grid(padding=(0, GAP, 0, 0))
    row.add_row(done, ProgressBar(total=status.steps, completed=step, width=min(WIDEST_BAR, room)), *figures)
    return row


def _figures(status: RunStatus, now: float) -> list[str]:
    """Return the run's figures, the most important first: the last ones are left out where there is no room."""
    speeds = [each.tokens_per_s for each in status.islands if each.state in CALM and each.tokens_per_s]
    own = status.own.loss if status.loss is None else status.loss
    figures = []
    if status.eta_s is not None and not is_over(status):
        figures.append(f"ETA {format_duration(max(0.0, status.eta_s - max(0.0, now - status.at)))}")
    if own is not None:
        figures.append(f"loss {format_loss(own)}")
    if speeds:
        figures.append(f"{format_count(sum(speeds))} tokens/s")
    if status.validation_loss is not None:
        figures.append(f"validation loss {format_loss(status.validation_loss)}")
    return figures


def round_line(status: RunStatus, now: float) -> str:
    """Say which round comes next, what it does now, and when it is to be expected."""
    if is_over(status):
        return f"round {status.round}, {over_words(status, now)}"
    since_s = max(0.0, now - status.phase_since)
    said = f"round {status.round + 1}: {status.phase} for {format_duration(since_s)}"
    if status.round_s is None or status.phase != "collecting":
        return said
    left_s = status.round_s - since_s
    return f"{said}, next round in about {format_duration(left_s)}" if left_s > 0 else (
        f"{said}, {format_duration(-left_s)} longer than usual"
    )  # fmt: skip


def table(status: RunStatus, now: float, width: int, height: int) -> list[RenderableType]:
    """Build the table of islands, of a width that fits, and of so many lines at most."""
    islands = sorted(status.islands, key=lambda each: each.name)
    shown, left = chosen(islands, status.me, max(1, height))
    rows = [tuple(map(harmless, cells(each, now))) for each in shown]
    columns = fitting([HEAD, *rows], width)
    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for at, size in columns.items():
        plain = HEAD[at] in ("island", "state", "")
        made.add_column(
            HEAD[at], justify="left" if plain else "right", width=size, no_wrap=True, overflow="ellipsis"
        )  # fmt: skip
    for each, row in zip(shown, rows, strict=True):
        style = STYLES.get(each.state, "") + (" bold" if each.island == status.me else "")
        made.add_row(*(Text(row[at]) for at in columns), style=style.strip())
    return [made, *([fitted(f"… {left}", width, "dim")] if left else [])]


def chosen(islands: Sequence[IslandStatus], me: str, rows: int) -> tuple[list[IslandStatus], str]:
    """Return whom to show in so many rows, and words for the rest: the teller and those in trouble come first."""
    if len(islands) <= rows:
        return list(islands), ""
    first = sorted(islands, key=lambda each: (each.island != me, each.state in CALM, each.state in ("left", "evicted")))
    kept = {each.island for each in first[: rows - 1]}
    rest = Counter(each.state for each in islands if each.island not in kept)
    words = ", ".join(f"{number} {state}" for state, number in rest.most_common())
    return [
        each for each in islands if each.island in kept
    ], f"and {counted(sum(rest.values()), 'more island')}: {words}"


def fitting(rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Choose the columns that fit a width, each with its own; empty ones are left out, notes and states are cut."""
    sizes = {at: max(cell_len(row[at]) for row in rows) for at in range(len(HEAD)) if any(row[at] for row in rows[1:])}
    last = HEAD.index("")
    if last in sizes:
        room = width - sum(size + GAP for at, size in sizes.items() if at != last)
        sizes[last] = min(sizes[last], max(SHORTEST_NOTE, room), MOST_NOTE)
    for name in LEFT_OUT_FIRST:
        if sum(size + GAP for size in sizes.values()) - GAP <= width:
            return sizes
        sizes.pop(HEAD.index(name), None)
    over = sum(size + GAP for size in sizes.values()) - GAP - width
    for name, least in (("state", SHORTEST_STATE), ("island", SHORTEST_NAME)):
        at = HEAD.index(name)
        if over > 0 and at in sizes:
            cut = min(over, max(0, sizes[at] - least))
            sizes[at], over = sizes[at] - cut, over - cut
    return sizes


def fitted(text: str, width: int, style: str = "") -> Text:
    """Return a line that is cut where the terminal ends."""
    line = Text(harmless(text), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def with_starting(status: RunStatus | None, run: str, starting: Sequence[str], now: float) -> RunStatus | None:
    """Return a status with islands that have been started here and have not said anything yet, by name."""
    if status is None:
        status = RunStatus(run, "", now, phase_since=now)
    gone = {each.name for each in status.islands if each.name in starting and each.state in ("ended", "lost", "left")}
    kept = [each for each in status.islands if each.name not in gone]
    known = {each.name for each in kept}
    new = [IslandStatus(name, name, "starting") for name in starting if name not in known]
    return replace(status, islands=(*kept, *new))
