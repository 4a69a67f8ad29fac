"""Write a run's report: the page of the dashboard as it is now, in one file."""

import time
from pathlib import Path

from diloco.dashboard.feed import Book
from diloco.dashboard.local import LocalRun
from diloco.errors import SaveError
from diloco.report.page import run_sections, still_page
from diloco.version import __version__


def write_report(folder: Path, path: Path) -> Path:
    """Write the report of the run in a folder, and return its path; raise SaveError if it cannot be written."""
    book = Book()
    LocalRun(folder).look(book)
    _, view = book.since("")
    made = f"as of {time.strftime('%Y-%m-%d %H:%M', time.localtime())}, diloco {__version__}"
    name = view.now.get("run") or folder.name
    try:
        path.write_text(still_page(f"{name}: report", run_sections(), {"run": view.plain(), "made": made}), "utf-8")
    except OSError as error:
        raise SaveError(f"{path} cannot be written: {error.strerror}; name another with --out") from None
    return path
