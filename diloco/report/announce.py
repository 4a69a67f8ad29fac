"""Say what an island does before it trains, for whom it waits, and for how long: nothing waits in silence.

In a terminal it is one line that is redrawn and goes away. Elsewhere waits for others are lines on standard error,
after a while and then now and then; what is done on this machine alone is not worth any.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from diloco.report.picture import ECHO, fitted
from diloco.report.terminal import names
from diloco.units import format_duration, format_size

FIRST_SAID_S, SAY_AGAIN_S = 5.0, 60.0
REFRESH_HZ = 4
BAR_WIDTH = 24
INTERRUPTED = "interrupted: nothing was trained since this start"  # it may have resumed


class Announcer:
    """Show what is done at present (`during`), and more about it (`searching`, `downloading`). For one thread."""

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without a console it is that of standard error. In a terminal, what prints lines meanwhile must share it."""
        self._console = console or Console(stderr=True, highlight=False, emoji=False)
        self._quiet, self._clock = quiet, clock
        self._what, self._more, self._since = "", "", 0.0
        self._progress: tuple[int, int] | None = None
        self._began: tuple[float, int] | None = None  # of a download: when, and what was there

    @contextmanager
    def during(self, what: str, *, local: bool = False) -> Iterator[None]:
        """Show what is done inside; `local`: on this machine alone, which is shown in a terminal only."""
        self._what, self._more, self._since = what, "", self._clock()
        self._progress = self._began = None
        over = threading.Event()
        try:
            if self._quiet:
                yield
            elif self._console.is_terminal:
                with Live(self, console=self._console, transient=True, refresh_per_second=REFRESH_HZ):
                    yield
            else:
                if not local:
                    threading.Thread(target=self._say, args=(over,), daemon=True).start()
                yield
        except KeyboardInterrupt:  # answered here: closing what is open may take seconds
            self._console.print(INTERRUPTED, soft_wrap=True, markup=False, emoji=False)
            raise
        finally:
            over.set()

    def say(self, text: str) -> None:
        """Print a line at once, whatever is done meanwhile."""
        if not self._quiet:
            self._console.print(text, soft_wrap=True, markup=False, emoji=False)

    def searching(self, waited_s: float, reason: str) -> None:
        """Show why no member has answered yet."""
        self._more = reason if waited_s > 0.0 else ""

    def downloading(self, done: int, total: int, donors: Mapping[str, int]) -> None:
        """Show how much of the run's state is there, at which rate it comes, and who gives it (bytes by name)."""
        now = self._clock()
        if self._began is None:
            self._began = now, done
        began, before = self._began
        rate = (done - before) / (now - began) if now > began else 0.0
        eta = f", ETA {format_duration((total - done) / rate)}" if rate > 0 else ""
        giving = [name for name, size in donors.items() if size > 0]
        whom = f" from {names(giving)}" if giving else ""
        self._progress = done, total
        self._more = f"{format_size(done)} of {format_size(total)}, {format_size(rate)}/s{eta}{whom}"

    @property
    def text(self) -> str:
        """Return what is done, for how long, and what is known of it."""
        if self._progress is not None:
            return f"{self._what}: {self._more}"
        lasted = format_duration(self._clock() - self._since)
        return f"{self._what} ({lasted} so far){f': {self._more}' if self._more else ''}"

    def _say(self, over: threading.Event) -> None:
        wait_s = FIRST_SAID_S
        while not over.wait(wait_s):
            self._console.print(self.text, soft_wrap=True, markup=False, emoji=False)
            wait_s = SAY_AGAIN_S

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - ECHO)
        if self._progress is None or width < 3 * BAR_WIDTH:
            yield fitted(self.text, width, "yellow")
            return
        done, total = self._progress
        row = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=total, completed=done, width=BAR_WIDTH)
        row.add_row(bar, fitted(self.text, width - BAR_WIDTH - 2))
        yield row
