"""Keep an island's status: in a file of its folder, for other processes of this machine, and for peers that ask.

The file is replaced every second and not synced: it says what is, and after a crash that is nothing. Whoever reads it
tells by its age, and by the process that it names, whether that is still so. What other islands say of themselves is
asked for only while somebody wants to see it, and travels on streams of its own (`CHANNEL`).
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.errors import FrameError, StreamClosed, TransportError, TransportTimeout
from diloco.report.events import End, Event, IslandNews, Start, Step, Validation, WitnessStart
from diloco.report.status import ASKED, REFRESH_S, STATUS, IslandStatus, RunStatus, decode_status, merged
from diloco.run.seeing import view_of
from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.elastic.runtime.driver import Driver
    from diloco.run.join import Entrant
    from diloco.run.local import LocalPeer

CHANNEL = "status"
LAST_SPEEDS = 15
ASK, ANSWER = 1, 2
ASKED_S = 10.0  # for so long after somebody has looked, others are asked
ASK_TIMEOUT_S, AT_ONCE = 2.0, 8
MAX_STREAMS, IDLE_S, WAIT_S = 16, 60.0, 2.0
MAX_STATUS_BYTES = 4 << 20

log = logging.getLogger(__name__)


class StatusKeeper:
    """Refresh an island's status while it takes part in a run, and answer those who ask for it. An event sink, too."""

    def __init__(self, folder: Path, driver: "Driver", peer: "LocalPeer", part: "Entrant") -> None:
        self._folder, self._driver, self._peer, self._part = folder, driver, peer, part
        self._step: Step | None = None
        self._speeds: deque[float] = deque(maxlen=LAST_SPEEDS)  # tokens/s: one report alone is noise
        self._validation: float | None = None
        self._device, self._finished = "", False
        self._news: dict[str, str] = {}  # the last words about each island, by name
        self._states: dict[str, tuple[str, float]] = {}  # by island: its state, and since when
        self._reports: dict[str, RunStatus] = {}
        self._now = b""
        self._stop = threading.Event()
        self._server = StatusServer(peer.plain, lambda: self._now)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Take in what the island reports."""
        match event:
            case Step():
                self._step = event
                self._speeds.append(event.tokens_per_s)
            case Validation():
                self._validation = event.validation_loss
            case End():
                self._finished = event.finished
            case Start():
                self._device = event.device
            case WitnessStart():
                self._device = "witness"
            case IslandNews():
                self._news[event.island] = f"{event.what}: {event.text}" if event.text else event.what

    def close(self) -> None:
        """Write a last status, that the island has left, and stop."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._server.close()
        if (last := decode_status(self._now)) is not None:
            self._write(replace(last, at=time.time(), ended=True, finished=self._finished))

    def _run(self) -> None:
        while True:
            try:
                view = self._view()
            except TimeoutError:  # its driver has ended, or has much to do: the file grows old, and that says it
                view = None
            if view is not None:
                self._now = view.encode()
                self._write(merged(view, self._asked()))
            if self._stop.wait(REFRESH_S):
                return

    def _view(self) -> RunStatus:
        """Return what the node sees, with what only this process knows; the node is asked on its own thread."""
        driver, found, asked = self._driver, list[RunStatus](), threading.Event()

        def look(now: float) -> list[object]:
            headers = list(driver.applier.headers)
            found.append(view_of(driver.node, headers, self._peer.name_of, now=now, at=time.time()))
            asked.set()
            return []

        driver.post(look)  # type: ignore[arg-type]
        if not asked.wait(WAIT_S):
            raise TimeoutError
        return self._completed(found[0])

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

    def _asked(self) -> Iterable[RunStatus]:
        """Return what others say of themselves, if somebody has looked lately."""
        try:
            wanted = time.time() - (self._folder / ASKED).stat().st_mtime < ASKED_S
        except OSError:
            return ()
        if not wanted:
            return ()
        alive = self._driver.node.liveness.alive(time.monotonic())
        addresses = {peer: address for peer, address in list(self._driver.addresses.items()) if peer in alive}
        return ask_all(self._peer.plain, addresses)

    def _write(self, status: RunStatus) -> None:
        write_status(self._folder, status)


def write_status(folder: Path, status: RunStatus) -> None:
    """Replace the status in an island's folder; a disk that refuses keeps the old one, which grows stale."""
    path = folder / STATUS
    try:
        part = path.with_suffix(".part")
        part.write_bytes(status.encode())
        part.replace(path)
    except OSError as error:
        log.warning("%s could not be written: %s", path, error)


def say_starting(folder: Path, run: str, me: str, name: str) -> None:
    """Write that an island has begun to look for its run's state: its last life may have left another status."""
    own = IslandStatus(me, name, "starting", since=time.time(), told_by=name)
    write_status(folder, with_process(RunStatus(run, me, time.time(), islands=(own,)), folder))


def with_process(status: RunStatus, folder: Path) -> RunStatus:
    """Return a status with what is known of this process."""
    return replace(
        status, pid=os.getpid(), pid_started=started_at(os.getpid()), host=socket.gethostname(),
        folder=str(folder.resolve()), diloco=__version__,
    )  # fmt: skip


def started_at(pid: int) -> int:
    """Return when a process was started, by the kernel's count; 0 where it is gone or the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_running(status: RunStatus) -> bool:
    """Tell whether the process that wrote a status on this machine is still there."""
    if status.ended or not status.pid or status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not status.pid_started or started_at(status.pid) == status.pid_started


class StatusServer:
    """Answer peers that ask for this island's status, members and watchers alike, on a channel of its own."""

    def __init__(self, transport: Transport, status: Callable[[], bytes]) -> None:
        self._transport, self._status = transport, status
        self._closed = False
        self._places = threading.Semaphore(MAX_STREAMS)
        self._thread = threading.Thread(target=self._accept, name="status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuse whoever asks from now on."""
        self._closed = True
        self._transport.forget(CHANNEL)
        self._thread.join(WAIT_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream = self._transport.accept(CHANNEL, timeout_s=0.5)
            except TransportTimeout:
                continue
            except StreamClosed:
                return
            if not self._places.acquire(blocking=False):
                stream.close()
                continue
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        try:
            while not self._closed:
                stream.receive(_no_payload, timeout_s=IDLE_S)
                stream.send(ANSWER, b"", self._status(), timeout_s=ASK_TIMEOUT_S)
        except (TransportError, FrameError) as over:
            log.debug("%s does not ask any more: %s", stream.peer, over)
        finally:
            stream.close()
            self._places.release()


def ask(transport: Transport, address: PeerAddress, timeout_s: float = ASK_TIMEOUT_S) -> RunStatus | None:
    """Return what a peer says of itself and of the run; None if it does not answer, or with nonsense."""
    try:
        stream = transport.connect(address, CHANNEL, timeout_s=timeout_s)
    except TransportError as error:
        log.info("%s was not asked for its status: %s", address.identity, error)
        return None
    try:
        stream.send(ASK, timeout_s=timeout_s)
        status = decode_status(bytes(stream.receive(_status_only, timeout_s=timeout_s).payload))
    except (TransportError, FrameError) as error:
        log.info("%s does not say its status: %s", address.identity, error)
        return None
    finally:
        stream.close()
    return status if status is not None and status.me == address.identity else None


def ask_all(transport: Transport, addresses: Mapping[str, PeerAddress]) -> list[RunStatus]:
    """Return what these peers say of themselves; those who do not answer in time are left out."""
    with ThreadPoolExecutor(AT_ONCE, "ask") as pool:
        return [said for said in pool.map(lambda each: ask(transport, each), addresses.values()) if said is not None]


def _no_payload(kind: int, head: bytes, length: int) -> memoryview:
    if kind != ASK or length or head:
        raise FrameError(f"a frame of kind {kind} with {length} bytes, a question was due")
    return memoryview(bytearray())


def _status_only(kind: int, head: bytes, length: int) -> memoryview:
    if kind != ANSWER or head or length > MAX_STATUS_BYTES:
        raise FrameError(f"a frame of kind {kind} with {length} bytes, a status was due")
    return memoryview(bytearray(length))
