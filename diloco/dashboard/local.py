"""Look at a run through the files that its islands on this machine write."""

import time
from collections.abc import Sequence
from pathlib import Path

from diloco.checkpoint.log.history import RoundHeader
from diloco.dashboard.feed import Book
from diloco.dashboard.figures import Flow, TrainingShares
from diloco.dashboard.presence import present
from diloco.elastic.protocol.record import Amendment
from diloco.errors import SaveError
from diloco.history.find import names_of
from diloco.history.follow import EventsFollower, RoundsFollower
from diloco.history.present import LocalIsland, islands_in, request_remote, status_of
from diloco.report.events import Event, IslandNews, Validation, Wait
from diloco.report.shape import IslandNumbers, RoundRows, Row
from diloco.report.sinks import EVENTS
from diloco.report.status import RunStatus
from diloco.report.tables import harmless
from diloco.report.why import Facts, why_now
from diloco.run.folder import OUTER
from diloco.run.names import Names
from diloco.train.amend import in_words

LAST_HEADERS = 200  # that `why` looks at
LAST_NEWS = 2_000
NAMES_S = 5.0  # after which names are read again
BEHIND = 2  # rounds by which the island whose log is followed may be behind the best
SHORTEST_WAIT_S = 0.05  # that is shown
SAME_S = 10.0  # what several islands notice within so many seconds is one thing
MARKED = (  # what is marked on the timeline
    "lost", "gone", "excluded", "evicted", "cut off", "refused", "diverged", "caught up", "went back", "damaged",
    "not durable",
)  # fmt: skip


class LocalRun:
    """Read what islands of this machine write into their folders. Nothing is held open between two looks."""

    def __init__(self, place: Path) -> None:
        """`place` is a run's folder or one island's; it may come into being later."""
        self._place = place
        self._names, self._names_at = Names({}), -NAMES_S
        self._followed: tuple[Path, RoundsFollower] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._numbers = IslandNumbers()
        self._rows, self._trained, self._flow = RoundRows(self._numbers), TrainingShares(), Flow()
        self._headers: list[RoundHeader] = []
        self._news: list[IslandNews] = []
        self._followers: dict[Path, EventsFollower] = {}
        self._validated: set[tuple[int, int]] = set()

    def look(self, book: Book) -> None:
        """Read what was added to the files, and take in what islands say now."""
        islands = islands_in(self._place) if self._place.is_dir() else []
        if not islands:
            raise SaveError(f"{self._place.name} has not begun yet: no island is there")
        request_remote(islands)
        status = status_of(islands)
        self._read_names(islands, status)
        anew, headers = self._follow(islands)
        if anew:
            self._begin_anew()
        reported = self._reported(islands)
        rows = {
            "rounds": [self._row(header) for header in headers], "waits": self._waits(reported),
            "marks": self._marks(reported), "validation": self._validations(reported),
            "flow": self._flow.sample(status),
        }  # fmt: skip
        why = why_now(Facts(status, self._headers, self._news, self._names.of))
        now = present(status, why, self._numbers, self._names, self._trained)
        book.update(rows, self._numbers.names(self._names.of), now, reset=anew)

    def close(self) -> None:
        """Do nothing: all files are closed."""

    def _follow(self, islands: Sequence[LocalIsland]) -> tuple[bool, list[RoundHeader]]:
        """Return whether the chain of rounds is another one, and what was added to it; of the island that leads, unless
        the one that was followed is hardly behind."""
        best = max(islands, key=lambda each: (each.running, _round(each)))
        mine = next((each for each in islands if self._followed and each.folder == self._followed[0]), None)
        if mine is None or mine.running < best.running or _round(best) - _round(mine) > BEHIND:
            self._followed = best.folder, RoundsFollower(best.folder)
        assert self._followed is not None
        return self._followed[1].refresh()

    def _row(self, header: RoundHeader) -> Row:
        self._headers.append(header)
        del self._headers[:-LAST_HEADERS]
        self._trained.take(header)
        changes = in_words(Amendment(header.amendment, header.changes), self._names.of) if header.amendment else ""
        return self._rows.row(header, changes)

    def _read_names(self, islands: Sequence[LocalIsland], status: RunStatus | None) -> None:
        if time.monotonic() - self._names_at >= NAMES_S:
            self._names_at = time.monotonic()
            said = {each.island: each.name for each in (() if status is None else status.islands) if each.name}
            self._names = Names({**said, **names_of([each.folder / OUTER for each in islands]).known})

    def _reported(self, islands: Sequence[LocalIsland]) -> list[tuple[str, Event]]:
        """Return what islands have reported since the last look, oldest first, each with the id of who did."""
        found: list[tuple[str, Event]] = []
        for each in islands:
            if each.folder not in self._followers:
                kinds = (Wait, Validation, IslandNews)
                self._followers[each.folder] = EventsFollower(each.folder / EVENTS, *kinds)
            me = "" if each.status is None else each.status.me
            found += [(me, event) for event in self._followers[each.folder].refresh()]
        found.sort(key=lambda each: each[1].time)
        self._news += [event for _, event in found if isinstance(event, IslandNews)]
        del self._news[:-LAST_NEWS]
        return found

    def _waits(self, reported: Sequence[tuple[str, Event]]) -> list[Row]:
        rows: list[Row] = []
        for me, event in reported:
            if isinstance(event, Wait) and me:
                self._trained.take_wait(me, event.time - event.seconds, event.time)
                if event.seconds > SHORTEST_WAIT_S:
                    rows.append([self._numbers.of(me), round(event.time - event.seconds, 2), round(event.time, 2)])
        return rows

    def _validations(self, reported: Sequence[tuple[str, Event]]) -> list[Row]:
        """Return the validation losses: of each round the first one."""
        rows: list[Row] = []
        for _, event in reported:
            if isinstance(event, Validation) and event.validation_loss is not None:
                if (event.round, event.step) not in self._validated:
                    rows.append([event.round, event.step, round(event.time, 1), event.validation_loss])
                self._validated.add((event.round, event.step))
        return rows

    def _marks(self, reported: Sequence[tuple[str, Event]]) -> list[Row]:
        """Return what happened to islands; what several have noticed at about the same time is marked once."""
        rows: dict[tuple[str, str, int], Row] = {}
        known = {self._names.of(peer): peer for peer in self._names.known}
        for _, event in reported:
            if isinstance(event, IslandNews) and event.what in MARKED:
                number = self._numbers.of(known[event.island]) if event.island in known else -1
                row = [round(event.time, 1), number, event.what, harmless(event.text)[:300]]
                rows.setdefault((event.island, event.what, int(event.time / SAME_S)), row)
        return list(rows.values())


def _round(island: LocalIsland) -> int:
    return 0 if island.status is None else island.status.round
