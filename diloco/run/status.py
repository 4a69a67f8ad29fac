"""Keep an island's status: in a file of its folder, for other processes of this machine, and for peers that ask.

The file is replaced every second and not synced: it says what is, and after a crash that is nothing. Whoever reads it
tells by its age, and by the process that it names, whether that is still so. What other islands say of themselves is
asked for only while somebody wants to see it, and travels on streams of its own (`status_streams.py`).
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from diloco.comm.peers.clock import RUN_CLOCK
from diloco.report.events import End, Event, IslandNews, Start, Step, Validation, Waiting, WitnessStart
from diloco.report.status import ASKED, REFRESH_S, STATUS, IslandStatus, RunStatus, merged
from diloco.run.seeing import view_of
from diloco.run.status_streams import StatusAsker, StatusServer
from diloco.run.typed import again
from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.elastic.runtime.driver import Driver
    from diloco.run.join import Entrant
    from diloco.run.local import LocalPeer

LAST_SPEEDS = 15
WAITS = ("waiting", "sending", "catching up")  # what is reported when it lasts
WAITS_S, WAITS_AGAIN_S = 10.0, 60.0
ASKED_S = 10.0  # for so long after somebody has looked, others are asked
WAIT_S, LOOK_S = 2.0, 0.2

log = logging.getLogger(__name__)


class StatusKeeper:
    """Refresh an island's status while it takes part in a run, and answer those who ask for it. An event sink, too.

    Nothing here can hold the island up or end it: a view that fails is logged, and the file grows old.
    """

    def __init__(self, folder: Path, driver: "Driver", peer: "LocalPeer", part: "Entrant") -> None:
        self._folder, self._driver, self._peer, self._part = folder, driver, peer, part
        self._step: Step | None = None
        self._speeds: deque[float] = deque(maxlen=LAST_SPEEDS)  # tokens/s: one report alone is noise
        self._validation: float | None = None
        self._device = ""
        self._end: End | None = None
        self._news: dict[str, str] = {}  # the last words about each island, by name
        self._states: dict[str, tuple[str, float]] = {}  # by island: its state, and since when
        self._last: RunStatus | None = None
        self._wait_told = 0.0  # when a wait was last reported
        self._now, self._taken = b"", time.monotonic()
        self._reports: list[RunStatus] = []  # what others said of themselves
        self._lock = threading.Lock()  # of the file
        self._refused = ""  # why it could not be written, and was said to be so
        self._stop = threading.Event()
        self._server = StatusServer(peer.plain, lambda: (self._now, time.monotonic() - self._taken))
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("status", self._refresh), ("status-asker", self._ask_others))
        ]
        for thread in self._threads:
            thread.start()

    def emit(self, event: Event) -> None:
        """Take in what the island reports."""
        match event:
            case Step():
                self._step = event
                self._speeds.append(event.tokens_per_s)
            case Validation():
                self._validation = event.validation_loss
            case End():
                self._end = event
            case Start():
                self._device = event.device
            case WitnessStart():
                self._device = "witness"
            case IslandNews():
                self._news[event.island] = f"{event.what}: {event.text}" if event.text else event.what

    def close(self) -> None:
        """Write a last status and stop: that the island has left, or, where it has not said so, that it failed."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._server.close()
        if self._driver.failure is None:
            self._look()
        if self._last is not None:
            left, finished = self._end is not None, self._end is not None and self._end.finished
            self._write(replace(self._last, at=time.time(), ended=left, failed=not left, finished=finished))

    def _refresh(self) -> None:
        while not self._stop.is_set():
            if self._look():
                self._write()
                self._report_wait()
            self._stop.wait(REFRESH_S)

    def _report_wait(self) -> None:
        """Report that this island does not train, and why, when that has lasted for a while."""
        own, now = self._last.own if self._last is not None else None, time.time()
        if own is None or own.state not in WAITS:
            self._wait_told = 0.0
        elif now - own.since > WAITS_S and now - self._wait_told > WAITS_AGAIN_S:
            self._wait_told = now
            self._part.events.emit(
                Waiting(state=own.state, since=own.since, cause=own.cause, islands=own.waiting_for)
            )  # fmt: skip

    def _look(self) -> bool:
        """Take a view of the run; return False if none could be had."""
        try:
            view = self._view()
            # others need nothing of the machine
            told = replace(view, pid=0, pid_started=0, host="", folder="", command="")
            self._now, self._taken, self._last = told.encode(), time.monotonic(), view
        except TimeoutError:  # its driver has ended, or has much to do: the file grows old, and that says it
            return False
        except Exception:  # a bug in what people see must not end the thread, nor the island
            log.exception("no status can be told")
            return False
        return True

    def _view(self) -> RunStatus:
        """Return what the node sees, with what only this process knows; the node is asked on its own thread."""
        driver, answer = self._driver, Future[RunStatus]()

        def look(now: float) -> list[object]:
            try:
                headers = list(driver.applier.headers)
                answer.set_result(view_of(driver.node, headers, self._peer.name_of, now=now, at=time.time()))
            except Exception as error:  # noqa: BLE001  # raised where it is waited for: the driver goes on
                answer.set_exception(error)
            return []

        driver.post(look)  # type: ignore[arg-type]
        return self._completed(answer.result(WAIT_S))

    def _completed(self, view: RunStatus) -> RunStatus:
        config, driver, own, step = self._part.config, self._driver, view.own, self._step
        outcome = driver.last_outcome
        moved = 0 if outcome is None else max(outcome.bytes_sent, outcome.bytes_received)
        rate = moved / outcome.seconds if outcome is not None and outcome.seconds else None
        limits = [bits / 8 for bits in self._peer.connection.rates if bits]
        waits, state = self._part.place.activity.now.waits, own.state
        if state in ("training", "sending", "waiting"):  # the trainer knows better than the node
            state = "training" if not waits else "sending" if state == "sending" else "waiting"
        told = waits or own.leads or own.cause != "round"  # for whom a round waits is no news of one that trains
        own = replace(
            own, state=state, step=own.step if step is None else step.step,
            loss=own.loss if step is None else step.loss,
            waiting_for=own.waiting_for if told else (), cause=own.cause if told else "",
            tokens_per_s=median(self._speeds) if self._speeds else own.tokens_per_s, bytes_sent=driver.bytes_sent,
            bytes_received=driver.bytes_received, link_bytes_per_s=rate,
            link_limit_bytes_per_s=min(limits, default=None), device=self._device,
            disk=getattr(driver.store, "failing", ""), clock_off_s=round(RUN_CLOCK.now() - time.time(), 1),
        )  # fmt: skip
        others = [
            replace(each, text=each.text or self._news.get(each.name, "")) for each in view.islands if each != view.own
        ]
        islands = tuple(self._dated(each, view.at) for each in (own, *others))
        known = replace(view, run=config.run, validation_loss=self._validation, islands=islands)
        return with_process(known, self._folder)

    def _dated(self, each: IslandStatus, at: float) -> IslandStatus:
        """Return an island's status with since when it has its state, where the node does not know that."""
        state, since = self._states.get(each.island, ("", at))
        if state != each.state:
            since = at
        self._states[each.island] = each.state, since
        return each if each.since else replace(each, since=since)

    def _ask_others(self) -> None:
        """Ask what others say of themselves, while somebody looks."""
        asked_at, asker = -REFRESH_S, StatusAsker(self._peer.plain, self._stop.is_set)
        while not self._stop.wait(LOOK_S):
            if not self._is_wanted():
                asker.close()
                continue
            if time.monotonic() - asked_at < REFRESH_S:
                continue
            asked_at = time.monotonic()
            try:
                alive = self._driver.node.liveness.alive(asked_at)
                known = {peer: address for peer, address in list(self._driver.addresses.items()) if peer in alive}
                self._reports = asker.ask(known)
            except Exception:  # the node is another thread's: it may have changed meanwhile
                log.exception("others were not asked for their status")
            self._write()
        asker.close()

    def _is_wanted(self) -> bool:
        try:
            return time.time() - (self._folder / ASKED).stat().st_mtime < ASKED_S
        except OSError:
            return False

    def _write(self, last: RunStatus | None = None) -> None:
        """Write the view as it is now, with what others have said lately; or the very last one, after which none is."""
        with self._lock:
            if last is None and self._last is not None and not self._stop.is_set():
                last = merged(self._last, self._reports)
            if last is not None:
                self._refused = write_status(self._folder, last, told=self._refused)


def write_status(folder: Path, status: RunStatus, *, told: str = "") -> str:
    """Replace the status in an island's folder, and return why that failed: a full disk keeps the old one, which grows
    stale. It is logged, unless it is what has been told."""
    path = folder / STATUS
    try:
        part = path.with_suffix(".part")
        part.write_bytes(status.encode())
        part.replace(path)
    except OSError as error:
        if str(error) != told:
            log.warning("%s could not be written: %s", path, error)
        return str(error)
    return ""


def say_starting(folder: Path, run: str, me: str, name: str) -> None:
    """Write that an island has begun to look for its run's state: its last life may have left another status."""
    own = IslandStatus(me, name, "starting", since=time.time(), told_by=name)
    write_status(folder, with_process(RunStatus(run, me, time.time(), islands=(own,)), folder))


def with_process(status: RunStatus, folder: Path) -> RunStatus:
    """Return a status with what is known of this process."""
    return replace(
        status, pid=os.getpid(), pid_started=started_at(os.getpid()), host=socket.gethostname(),
        folder=str(folder.resolve()), command=again(), diloco=__version__,
    )  # fmt: skip


def started_at(pid: int) -> int:
    """Return when a process was started, by the kernel's count; 0 where it is gone or the kernel does not say."""
    return int(_stat_of(pid, 19))


def parent_of(pid: int) -> int:
    """Return which process started this one; 0 where it is gone or the kernel does not say."""
    return int(_stat_of(pid, 1))


def is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger has stopped a process, as far as the kernel says."""
    return _stat_of(pid, 0) in ("T", "t")


def _stat_of(pid: int, field: int) -> str:
    """Read what Linux tells of a process, counted from behind its name, which may be anything; "0": it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field]
    except (OSError, IndexError):
        return "0"


def is_running(status: RunStatus) -> bool:
    """Tell whether the process that wrote a status on this machine is still there."""
    if status.is_over or not status.pid or status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return not status.pid_started or started_at(status.pid) == status.pid_started
