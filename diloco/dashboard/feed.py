"""Keep what the page shows, and say what of it a viewer does not know yet.

One thread looks at the run twice a second while somebody watches; viewers take what is newest, each at its own pace.
There is no queue: a viewer that is slow, asleep or comes back after hours gets what it lacks, or all of it, and nobody
waits for it, least of all an island, whose files are only read.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from diloco.errors import DilocoError, first_line
from diloco.report.shape import MOST, Row, View, thinned

LOOK_S = 0.5  # islands write their status every second: so that it is seen soon after
SERIES = ("rounds", "waits", "marks", "flow", "validation")

log = logging.getLogger(__name__)


class Book:
    """Hold the series of a run as they grow, and the present. One thread writes, viewers read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._islands: Sequence[str] = ()
        self._now: Mapping[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._series: dict[str, list[Row]] = {name: [] for name in SERIES}
        self._dropped = dict.fromkeys(SERIES, 0)  # from the front
        self._epoch = secrets.token_hex(4)  # another one where a series begins anew

    def update(
        self, rows: Mapping[str, Sequence[Row]], islands: Sequence[str], now: Mapping[str, Any], *, reset: bool = False
    ) -> None:
        """Append rows to the series, and replace the rest. Of all series but the rounds the oldest rows are dropped
        beyond a number. `reset`: forget all rows first, since the run is another one, or rounds were undone."""
        with self._lock:
            if reset:
                self._forget()
            for name, added in rows.items():
                kept = self._series[name]
                kept += added
                surplus = max(0, len(kept) - MOST.get(name, len(kept)))
                del kept[:surplus]
                self._dropped[name] += surplus
            self._islands, self._now = islands, now

    def since(self, place: str) -> tuple[str, View]:
        """Return where a viewer comes to that was told everything up to a place, and what it lacks; that is all of it,
        if the place is not known here."""
        with self._lock:
            counts = [str(self._dropped[name] + len(self._series[name])) for name in SERIES]
            known = self._parse(place)
            if known is None:
                rows = {name: list(self._series[name]) for name in SERIES}
                rows["rounds"] = list(thinned(rows["rounds"]))
            else:
                rows = {name: self._series[name][known[name] - self._dropped[name] :] for name in SERIES}
            view = View(reset=known is None, islands=self._islands, now=self._now, **rows)
            return ".".join([self._epoch, *counts]), view

    def _parse(self, place: str) -> dict[str, int] | None:
        epoch, *counts = place[:200].split(".")
        if epoch != self._epoch or len(counts) != len(SERIES) or not all(each.isdecimal() for each in counts):
            return None
        known = {name: int(each) for name, each in zip(SERIES, counts, strict=True)}
        kept = {name: len(rows) for name, rows in self._series.items()}
        fits = all(self._dropped[name] <= known[name] <= self._dropped[name] + kept[name] for name in SERIES)
        return known if fits else None


class Source(Protocol):
    """Look at a run: at its islands' files, or from afar."""

    def look(self, book: Book) -> None:
        """Bring a book up to date; raise DilocoError if the run cannot be seen now."""

    def close(self) -> None: ...


class Feed:
    """Look at a source again and again while somebody watches, and hand out what each viewer lacks."""

    def __init__(self, source: Source) -> None:
        self._source, self._book = source, Book()
        self._problem, self._looks = "", 0
        self._told: tuple[int, dict[str, tuple[str, str]]] = 0, {}  # of the last look, by the viewers' places
        self._listeners: list[Callable[[], object]] = []
        self._awake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Begin to look, as soon as somebody listens."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        with self._awake:
            self._closed = True
            self._awake.notify_all()
        self._thread.join(2 * LOOK_S)

    def listen(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call a function, on the feed's thread, after every look; return what ends that."""
        with self._awake:
            self._listeners.append(listener)
            self._awake.notify_all()

        def leave() -> None:
            with self._awake:
                self._listeners.remove(listener)

        return leave

    def news(self, place: str) -> tuple[str, str]:
        """Return where a viewer at this place comes to, and the message that brings it there; empty: nothing is known
        yet."""
        looks, told = self._looks, self._told[1]
        if not looks:
            return place, ""
        if self._told[0] != looks:
            self._told = looks, (told := {})
        if place not in told:  # most viewers are at the same one: it is encoded once for all of them
            there, view = self._book.since(place)
            told[place] = there, json.dumps(view.plain(), separators=(",", ":"))
        return told[place]

    @property
    def problem(self) -> str:
        """Return why the run cannot be seen now; empty if it can."""
        return self._problem

    def _run(self) -> None:
        while True:
            with self._awake:
                self._awake.wait_for(lambda: self._listeners or self._closed)
                if self._closed:
                    break
            began = time.monotonic()
            self._look()
            with self._awake:
                for listener in self._listeners:
                    listener()
                self._awake.wait_for(lambda: self._closed, max(0.05, LOOK_S - (time.monotonic() - began)))
        self._source.close()

    def _look(self) -> None:
        try:
            self._source.look(self._book)
            self._looks, self._problem = self._looks + 1, ""
        except DilocoError as error:
            self._problem = first_line(error)
        except Exception:  # the thread's outermost frame: viewers are told, and it looks again
            log.exception("the run cannot be looked at")
            self._problem = "the dashboard failed to look at the run: what it printed says why"
