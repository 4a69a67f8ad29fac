"""The console that views print to: whoever reads it may stop, and training goes on."""

import os
import sys

from rich.console import Console

WIDE = 1000  # letters, which no table needs


def table_console() -> Console:
    """Return a console on which tables wrap on a terminal only: who reads a pipe wants lines as they are."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=WIDE)


class LastingConsole(Console):
    """Print to a pipe that may be closed, as by `| head`: then say so once, on standard error, and print no more."""

    def on_broken_pipe(self) -> None:
        """Go on without the reader: rich would end the process without a word."""
        self.quiet = True
        print(
            "nobody reads this output any more: training goes on, events.jsonl in the run's folder has all of it, and "
            "diloco stop RUN ends it",
            file=sys.stderr,
            flush=True,
        )
        if self.file is sys.stdout:  # else Python complains at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
