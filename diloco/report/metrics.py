"""An island's figures for Prometheus: a table of metrics, each with its name, its meaning and where it comes from.

`docs/reference/metrics.md` is written from the table. `render` is pure; `Metrics` is an event sink that answers at
`log.metrics` with what the island's status says and what its events add up to.
"""

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from diloco.config.fields import parse_address
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.report.admitted import is_own_host
from diloco.report.events import Event, IslandNews, Round, Saved, Step, Wait
from diloco.report.status import STATES, IslandStatus, RunStatus, read_status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
READERS = 8  # at once, each by a thread of the process that trains; one more is closed
REQUEST_S = 10.0  # for a reader to ask and to take its answer, however slowly bytes trickle

Labels = dict[str, str]
Sample = tuple[Labels, float | None]


@dataclass
class Totals:
    """Add up what an island reports by its events since it was started."""

    step: Step | None = None
    pseudo_gradient_norm: float | None = None
    waited_s: float = 0.0
    saves: int = 0
    rounds: int = 0
    news: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Step():
                self.step = event
            case Wait():
                self.waited_s += event.seconds
            case Saved():
                self.saves += 1
            case Round() if event.contributors:
                self.rounds += 1
                if event.pseudo_gradient_norm is not None:
                    self.pseudo_gradient_norm = event.pseudo_gradient_norm
            case IslandNews():
                self.news[event.what] += 1


@dataclass(frozen=True)
class Metric:
    """Describe one metric: its name without `diloco_`, its type, its meaning, and how its samples are found."""

    name: str
    kind: str  # gauge or counter
    about: str
    samples: Callable[[RunStatus, Totals], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Return the name under which Prometheus knows it."""
        return f"diloco_{self.name}"


def _run(name: str, about: str, value: Callable[[RunStatus], float | None], kind: str = "gauge") -> Metric:
    return Metric(name, kind, about, lambda status, totals: [({}, value(status))])


def _own(name: str, about: str, value: Callable[[IslandStatus], float | None], kind: str = "gauge") -> Metric:
    return Metric(name, kind, about, lambda status, totals: [({}, value(status.own))])


def _total(name: str, about: str, value: Callable[[Totals], float | None], kind: str = "counter") -> Metric:
    return Metric(name, kind, about, lambda status, totals: [({}, value(totals))])


def _each(name: str, about: str, value: Callable[[IslandStatus], float | None]) -> Metric:
    def samples(status: RunStatus, totals: Totals) -> list[Sample]:
        return [({"peer": each.name}, value(each)) for each in unique(status)]

    return Metric(name, "gauge", about, samples, ("peer",))


def _info(status: RunStatus, totals: Totals) -> list[Sample]:
    return [({"device": status.own.device, "version": status.diloco}, 1.0)]


def _states(status: RunStatus, totals: Totals) -> list[Sample]:
    return [
        ({"peer": each.name, "state": state}, float(each.state == state)) for each in unique(status) for state in STATES
    ]


def _news(status: RunStatus, totals: Totals) -> list[Sample]:
    return [({"what": what}, float(number)) for what, number in sorted(totals.news.items())]


METRICS = (
    Metric("info", "gauge", "1; the island's accelerator and version are in its labels.", _info, ("device", "version")),
    _run("round", "The last committed round.", lambda status: status.round),
    _run("run_step", "The run's clock after that round, in inner steps.", lambda status: status.step),
    _run("run_steps", "The step at which the run ends.", lambda status: status.steps or None),
    _run("run_loss", "Mean training loss behind the last round, by weight.", lambda status: status.loss),
    _run("validation_loss", "The last one, on the island that validates.", lambda status: status.validation_loss),
    _run("round_seconds", "What a round usually takes.", lambda status: status.round_s),
    _run("exchange_seconds", "What an exchange usually takes.", lambda status: status.exchange_s),
    _run("eta_seconds", "Seconds until the last step at the pace of the last rounds.", lambda status: status.eta_s),
    _run("status_timestamp_seconds", "When the island last looked, in seconds since 1970.", lambda status: status.at),
    _own("step", "The run's clock on this island, its own steps included.", lambda own: own.step),
    _own("loss", "Mean training loss of this island's last steps.", lambda own: own.loss),
    _own("tokens_per_second", "This island's speed, waits not counted.", lambda own: own.tokens_per_s),
    _own("share_ratio", "This island's share of the weights in the last round, 0 to 1.", lambda own: own.share),
    _own("sent_bytes_total", "Bytes that this island has sent for rounds.", lambda own: own.bytes_sent, "counter"),
    _own("received_bytes_total", "Bytes received for rounds.", lambda own: own.bytes_received, "counter"),
    _own("disk_write_seconds", "What a write to this island's disk takes.", lambda own: own.write_s),
    _own("disk_failing", "1 while nothing is durable on this island.", lambda own: float(bool(own.disk))),
    _own("link_bytes_per_second", "The rate of the last exchange.", lambda own: own.link_bytes_per_s),
    _own("link_limit_bytes_per_second", "The rate not to be exceeded.", lambda own: own.link_limit_bytes_per_s),
    _own("clock_offset_seconds", "How far this machine's clock is behind the run's.", lambda own: own.clock_off_s),
    _total("mfu_ratio", "Share of the accelerator's peak that was used.",
           lambda totals: None if totals.step is None else totals.step.mfu, "gauge"),
    _total("learning_rate", "Of the last inner step.",
           lambda totals: None if totals.step is None else totals.step.lr, "gauge"),
    _total("gradient_norm", "Of the last inner step that was reported, before clipping.",
           lambda totals: None if totals.step is None else totals.step.gradient_norm, "gauge"),
    _total("pseudo_gradient_norm", "Of this island's last contribution that a round contains.",
           lambda totals: totals.pseudo_gradient_norm, "gauge"),
    _total("skipped_steps_total", "Steps whose gradients were not finite.",
           lambda totals: totals.step.skipped if totals.step is not None else 0),
    _total("waited_seconds_total", "How long this island did not train, since it was started: for rounds and samples.",
           lambda totals: totals.waited_s),
    _total("rounds_total", "Rounds with contributions that this island has seen since it was started.",
           lambda totals: totals.rounds),
    _total("saves_total", "Saves written since this island was started.", lambda totals: totals.saves),
    Metric("news_total", "counter", "What happened to islands, by the words of the event `elastic`.", _news, ("what",)),
    Metric("island_state", "gauge", "1 for the state that an island has now, 0 for all others.", _states,
           ("peer", "state")),
    _each("island_round", "The last round that an island has.", lambda each: each.round),
    _each("island_loss", "An island's mean training loss.", lambda each: each.loss),
    _each("island_tokens_per_second", "An island's speed.", lambda each: each.tokens_per_s),
    _each("island_share_ratio", "An island's share of the weights in the last round, 0 to 1.", lambda each: each.share),
)  # fmt: skip
ALWAYS = ("run", "island")  # labels that every sample has: the run's name, and that of the island that tells


def unique(status: RunStatus) -> list[IslandStatus]:
    """Return the islands of a status, each name once: two samples of one metric may not have the same labels."""
    return list({each.name: each for each in reversed(status.islands)}.values())[::-1]


def render(status: RunStatus | None, totals: Totals) -> str:
    """Return all metrics in the text format of Prometheus; what is not known has no sample."""
    return "".join(f"{line}\n" for metric in METRICS for line in _lines(metric, status, totals))


def _lines(metric: Metric, status: RunStatus | None, totals: Totals) -> Iterator[str]:
    yield f"# HELP {metric.full_name} {metric.about}"
    yield f"# TYPE {metric.full_name} {metric.kind}"
    if status is None:
        return
    always = {"run": status.run, "island": status.own.name}
    for labels, value in metric.samples(status, totals):
        if value is not None:
            said = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**always, **labels}.items())
            yield f"{metric.full_name}{{{said}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")


class Metrics:
    """Answer Prometheus at `log.metrics`, an address of this machine: an event sink, made from a `Config`."""

    def __init__(self, config: Config) -> None:
        assert config.log.metrics is not None
        self._folder, self._totals = Path(config.dir), Totals()
        host, port = parse_address(config.log.metrics)
        try:
            self._server = _Server((host, port), self._answer)
        except OSError as error:
            raise ConfigError(
                f"log.metrics={config.log.metrics}: nobody can listen there ({error.strerror}): choose another port"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def port(self) -> int:
        """Return the port at which it answers."""
        return int(self._server.server_address[1])

    def emit(self, event: Event) -> None:
        """Add an event up."""
        self._totals.add(event)

    def _answer(self) -> bytes:
        return render(read_status(self._folder), self._totals).encode()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Callable[[], bytes]) -> None:
        self.answer, self.host = answer, address[0]
        self._lock = threading.Lock()
        self._deadlines: dict[object, float] = {}  # of the readers' sockets that are open
        super().__init__(address, _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Answer a reader by a thread of its own, if there are not too many."""
        with self._lock:
            admitted = len(self._deadlines) < READERS
            if admitted:
                self._deadlines[request] = time.monotonic() + REQUEST_S
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """End the readers whose time is over; called about twice a second."""
        with self._lock:  # whose socket is in the table is not closed yet, so no other file has its number
            for request, deadline in self._deadlines.items():
                if time.monotonic() > deadline and isinstance(request, socket.socket):
                    with suppress(OSError):  # the other end was faster
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close a reader's socket."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a reader that has left: it is no trouble of the run's."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with all metrics at /metrics, and with 404 everywhere else; with 421 who asks another machine."""
        if not is_own_host(self.headers.get("Host", ""), self.server.host):
            self.send_error(421, "by that name anybody could ask: use an address, or start with --metrics NAME:PORT")
            return
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "metrics are at /metrics")
            return
        said = self.server.answer()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal is the run's."""
