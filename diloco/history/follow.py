"""Follow the files of a run that grow while it trains: the headers of its rounds, and what its islands report.

Nothing is read twice, and of files that are very long only the end. Nothing heavy is imported here.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diloco.checkpoint.log.history import HISTORY, Line, RoundHeader, chain_of, lines_in
from diloco.history.rounds import earlier_logs
from diloco.report.events import Event, read_event
from diloco.run.folder import OUTER

HISTORY_BYTES = 64 << 20  # of the end of a history
EVENTS_BYTES = 16 << 20  # of the end of an island's events


class FileFollower:
    """Read the lines that were added to a file since the last time; notice when it is another file, or was cut."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self._most = path, most_bytes
        self._at, self._file_id, self._rest = 0, 0, b""

    def read(self) -> tuple[bool, bytes]:
        """Return whether the file begins anew, and the whole lines that were added."""
        try:
            with self.path.open("rb") as file:
                found = self.path.stat()
                anew = found.st_ino != self._file_id or found.st_size < self._at
                if anew:
                    self._at, self._rest, self._file_id = max(0, found.st_size - self._most), b"", found.st_ino
                file.seek(self._at)
                added = file.read()
                whole = anew and self._at == 0
        except OSError:
            return False, b""
        self._at += len(added)
        lines, end, self._rest = (self._rest + added).rpartition(b"\n")
        if anew and not whole:
            lines = lines.partition(b"\n")[2]  # the first one may be half a line
        return anew, lines + end


class RoundsFollower:
    """Follow the chain of rounds as one island of this machine keeps it."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the island's."""
        self._folder = folder
        self._file = FileFollower(folder / OUTER / HISTORY, HISTORY_BYTES)
        self._last = ""  # the digest of the last round

    def refresh(self) -> tuple[bool, list[RoundHeader]]:
        """Return whether the chain is another one than before, and the rounds that were added, or all of them then."""
        anew, raw = self._file.read()
        added = lines_in(raw)
        if not anew and self._follows(added):
            headers = [line for line in added if isinstance(line, RoundHeader)]
            self._last = headers[-1].digest if headers else self._last
            return False, headers
        if not anew:  # a move to another branch, or rounds that came afterwards
            self._file = FileFollower(self._file.path, HISTORY_BYTES)
            added = lines_in(self._file.read()[1])
        chain = chain_of(added)
        self._last = chain[-1].digest if chain else ""
        before = [header for log in earlier_logs(self._folder) for header in chain_of(_lines(log / HISTORY))]
        return True, [*before, *chain]

    def _follows(self, added: Sequence[Line]) -> bool:
        """Tell whether lines simply continue the chain."""
        last = self._last
        for line in added:
            if not isinstance(line, RoundHeader) or line.added or (last and line.parent != last):
                return False
            last = line.digest
        return True


def _lines(path: Path) -> list[Line]:
    return lines_in(FileFollower(path, HISTORY_BYTES).read()[1])


class EventsFollower:
    """Follow the events of one island, of some kinds only: most lines are progress, and are not even parsed."""

    def __init__(self, path: Path, *kinds: type[Event]) -> None:
        self._file = FileFollower(path, EVENTS_BYTES)
        self._starts = tuple(f'{{"event": "{kind.kind}"'.encode() for kind in kinds)

    def refresh(self) -> list[Event]:
        """Return the events of these kinds that were added."""
        found: list[Event] = []
        for line in self._file.read()[1].split(b"\n"):
            if line.startswith(self._starts):
                with suppress(ValueError):  # half a line: its writer was killed
                    if (event := read_event(json.loads(line))) is not None:
                        found.append(event)
        return found
