"""Look at a run elsewhere by a ticket to watch. Members tell their status and nothing else: the page knows the rounds
that were committed while it looked."""

import logging
import threading
from collections.abc import Iterator

from diloco.comm.peers.ticket import Ticket
from diloco.dashboard.feed import Book
from diloco.dashboard.figures import Flow, TrainingShares
from diloco.dashboard.presence import present
from diloco.errors import DilocoError, JoinRefused
from diloco.report.shape import CONTRIBUTED, IslandNumbers, Row
from diloco.report.status import IslandStatus, RunStatus
from diloco.report.why import Facts, why_now
from diloco.run.names import Names

ASK_S = 1.0  # from one question to the next

log = logging.getLogger(__name__)


class WatchedRun:
    """Ask the members of a run what they do, in a thread of its own: to find them takes seconds."""

    def __init__(self, ticket: Ticket) -> None:
        """Begin to ask; raise TicketError if the ticket is not to watch."""
        ticket.refuse_unless_to_watch()
        self._ticket = ticket
        self._numbers, self._flow, self._last_round = IslandNumbers(), Flow(), 0
        self._lock = threading.Lock()
        self._heard: RunStatus | None = None
        self._problem: DilocoError = JoinRefused("looking for the run's islands")
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _watch(self) -> None:
        from diloco.run.watcher import watch_run  # hivemind, which takes seconds

        while not self._over.is_set():
            try:
                self._hear(watch_run(self._ticket, pause_s=ASK_S))
            except DilocoError as error:  # nobody answers: it is told, and tried again
                self._lose(error)
            except Exception:  # the thread's outermost frame: viewers are told, and it asks again
                log.exception("the run's islands cannot be asked")
                self._lose(JoinRefused("the dashboard failed to ask the run's islands: what it printed says why"))

    def _lose(self, problem: DilocoError) -> None:
        with self._lock:
            self._heard, self._problem = None, problem
        self._over.wait(ASK_S)

    def _hear(self, looks: Iterator[RunStatus]) -> None:
        for status in looks:
            with self._lock:
                self._heard = status
            if self._over.is_set():
                return

    def look(self, book: Book) -> None:
        """Take in what members have said last; raise why nothing is known, if nobody has said anything."""
        with self._lock:
            status, problem = self._heard, self._problem
        if status is None:
            raise problem
        for each in status.islands:
            self._numbers.of(each.island)
        names = Names({each.island: each.name for each in status.islands})
        now = present(status, why_now(Facts(status, name=names.of)), self._numbers, names, TrainingShares())
        book.update(
            {"rounds": self._round(status), "flow": self._flow.sample(status)}, self._numbers.names(names.of), now
        )

    def close(self) -> None:
        """Stop asking, after the present look."""
        self._over.set()

    def _round(self, status: RunStatus) -> list[Row]:
        """Return a row if a round was committed since the last look; what only its record says is left out."""
        if status.round <= self._last_round:
            return []
        self._last_round = status.round
        took = 0.0 if status.round_s is None else max(0.0, status.round_s - status.exchange_s)
        who = "".join(CONTRIBUTED if each.share else "." for each in self._in_order(status))
        members = sum(each.member for each in status.islands)
        return [[
            status.round, round(status.at, 1), status.step, None, None, status.loss, round(took, 2),
            round(status.exchange_s, 2), 0, 0, members, who.rstrip("."), [], [], "", "",
        ]]  # fmt: skip

    def _in_order(self, status: RunStatus) -> list[IslandStatus]:
        by_number = {self._numbers.of(each.island): each for each in status.islands}
        return [by_number[number] for number in sorted(by_number)]
