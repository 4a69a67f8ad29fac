"""Make the folder of a run with many islands and a long past, and let it go on: for pages that have to show one.

Its islands are simulated protocol nodes, whose time is made to pass as fast as that of the wall; one of them writes
what it sees into its folder, as an island does. The rounds of the past are made up, those that follow are theirs.
"""

import hashlib
import math
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from diloco.checkpoint.log.history import HISTORY, ContributionHeader, RoundHeader
from diloco.elastic.protocol import messages as m
from diloco.elastic.protocol.record import LoggedRecord
from diloco.elastic.runtime.headers import header_of
from diloco.report.events import Event, IslandNews, Validation
from diloco.report.sinks import EVENTS, JsonLines
from diloco.report.status import REFRESH_S
from diloco.run.folder import OUTER
from diloco.run.seeing import view_of
from diloco.run.status import with_process, write_status
from diloco.simulate.virtual.scenario import parse, world_of

PACE_S = 0.1
ROUND_S, STEPS, TOKENS, SIZE = 4.0, 50, 400_000, 30_000_000  # of a round of the past
LAST_HEADERS = 50
LINK_BYTES_PER_S = 12_500_000.0


class MadeRun:
    """Hold a run that is made up as far as it is past, and simulated from there on."""

    def __init__(
        self, folder: Path, islands: int, rounds: int, *, later: int = 0, names: Mapping[str, str] | None = None
    ) -> None:
        """Write the past of a run of so many islands; `later` can join it. `names` are what ids are called."""
        self.folder, self._names = folder, dict(names or {})
        self.ids = [f"island-{number}" for number in range(1, islands + later + 1)]
        script = parse(f"islands {' '.join(self.ids[:islands])}")
        script.setup = replace(script.setup, islands=islands + later)
        self.world = world_of(script)
        self.world.observers.append(self._see)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._founders, self._roster = islands, tuple[str, ...]()
        self._rounds, self._chain, self._total, self._step = rounds, "", 0, 0
        self._headers: list[RoundHeader] = []
        (folder / OUTER).mkdir(parents=True)
        self._events = JsonLines(folder / EVENTS)
        self._began = time.time()
        self._write([self._past(number) for number in range(1, rounds + 1)])
        self.world.found(script.founders, None)
        self._status()
        self._thread = threading.Thread(target=self._go_on, name="made-run", daemon=True)

    def __enter__(self) -> "MadeRun":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._events.close()

    def called(self, peer: str) -> str:
        """Return what an island is called."""
        return self._names.get(peer, peer)

    def kill(self, peer: str) -> None:
        """End an island without a word: nobody is told that its connections broke."""
        with self._lock:
            self.world.crash(peer, silent=True)

    def start(self, peer: str) -> None:
        """Start an island that joins."""
        with self._lock:
            self.world.start(peer)

    @property
    def silence_s(self) -> float:
        """Return after how many seconds without a sign of life an island counts as lost."""
        return self.world.options.silence_s

    def _go_on(self) -> None:
        """Let the world's time pass as fast as that of the wall, and write what its first island sees."""
        begun, at, written = time.monotonic(), self.world.now, -REFRESH_S
        while not self._closed.wait(PACE_S):
            passed = time.monotonic() - begun
            with self._lock:
                self.world.timeline.run(at + passed)
            if passed - written >= REFRESH_S:
                written = passed
                self._status()

    def _status(self) -> None:
        with self._lock:
            node, clock = self.world.lives[self.ids[0]].node, self.world.costs.clock(self.ids[0])
            view = view_of(node, self._headers, self.called, now=clock, at=time.time())
        sent = int((time.time() - self._began) * LINK_BYTES_PER_S / 3)
        islands = [
            replace(
                each, tokens_per_s=9000.0 + 100 * len(each.name), bytes_sent=sent, bytes_received=sent,
                link_bytes_per_s=LINK_BYTES_PER_S * 0.6, link_limit_bytes_per_s=LINK_BYTES_PER_S,
                loss=each.loss or self._headers[-1].loss, told_by=each.name,
            )
            if each.state not in ("lost", "left") else each
            for each in view.islands
        ]  # fmt: skip
        told = replace(
            view, run=self.folder.name, round=self._rounds, step=self._step, steps=4 * self._step + STEPS,
            islands=tuple(islands), phase_since=view.phase_since,
        )  # fmt: skip
        write_status(self.folder, with_process(told, self.folder))

    def _see(self, name: str, effect: m.Effect) -> None:
        """Take down what the first island commits and reports."""
        if name != self.ids[0]:
            return
        match effect:
            case m.Append(record, stored_by, phases):
                logged = LoggedRecord(record, stored_by, int(1000 * time.time()), phases)
                made = header_of(logged, self._roster, 0, SIZE)
                self._roster = record.proposal.roster
                if made.contributions or self._rounds == 0:
                    self._rounds += 1
                    joined = () if self._first else made.joined
                    self._write([self._linked(replace(made, round=self._rounds, joined=joined))])
            case m.Note(kind, peer, text):
                named = re.sub(r"island-\d+", lambda found: self.called(found[0]), text)
                self._emit(IslandNews(what=kind, island=self.called(peer), text=named))

    @property
    def _first(self) -> bool:
        """Tell whether the world has committed no round with contributions yet: its founders do not join."""
        return self._headers[-1].time_ms < 1000 * self._began

    def _emit(self, event: Event) -> None:
        self._events.emit(event)

    def _past(self, number: int) -> RoundHeader:
        """Return a made round: now and then an island is missing, late or silent."""
        peers = [peer for at, peer in enumerate(self.ids[: self._founders]) if (at * 37 + number * 11) % 97]
        loss = _loss(number)
        parts = tuple(
            ContributionHeader(peer, TOKENS, STEPS, TOKENS, round(loss + 0.001 * at, 4), 55 + at % 7)
            for at, peer in enumerate(peers)
        )
        ago_s = (self._rounds - number) * ROUND_S
        header = RoundHeader(
            "", "", number, int(1000 * (self._began - ROUND_S - ago_s)), 0, 0, 0, 0, SIZE, parts, len(peers),
            joined=tuple(peers) if number == 1 else (), collect_ms=3100, exchange_ms=800 + 10 * (number % 13),
        )  # fmt: skip
        if number % 20 == 0:
            self._emit(Validation(time=header.time_ms / 1000, step=number * STEPS, round=number, validation_loss=loss))
        return self._linked(header)

    def _linked(self, header: RoundHeader) -> RoundHeader:
        """Return a header as the next one of the chain, with the sums up to it."""
        tokens = TOKENS * len(header.contributions)
        parts = tuple(replace(part, loss=part.loss or _loss(header.round)) for part in header.contributions)
        self._total, self._step = self._total + tokens, self._step + STEPS
        digest = hashlib.sha256(f"{self._chain} {header.round}".encode()).hexdigest()
        linked = replace(
            header, digest=digest, parent=self._chain, step=self._step, tokens=tokens, total_tokens=self._total,
            contributions=parts,
        )  # fmt: skip
        self._chain = digest
        self._headers = [*self._headers[-LAST_HEADERS:], linked]
        return linked

    def _write(self, headers: list[RoundHeader]) -> None:
        with (self.folder / OUTER / HISTORY).open("ab") as file:
            file.writelines(header.line() for header in headers)


def _loss(number: int) -> float:
    """Return a loss that falls as losses do."""
    return round(2.1 + 4 * math.exp(-number / 60) + 0.03 * math.sin(number * 1.7), 4)
