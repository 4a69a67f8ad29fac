"""Kill and stop processes of an island of 2 x 2 among three islands of one process, and measure what comes of it.

Real processes, started by `diloco run` and `diloco join` as people start them; the island restarts by itself. Every
rank is killed and stopped once: half of the faults in a run that the island has founded, half in one that it joined.

`named_s` is the longest time from a signal until the island has printed which process it was. `rounds_until_back` is
the largest number of rounds that the others commit after a signal, up to and with the first that contains work of the
island's new life. `others_round_ratio` compares medians over rounds as each of the three others reports their ends:
those that end between a signal and the island's return, over those in which all four islands took part, undisturbed.
Phases are of a fixed time (`sync.every`) and inner steps mostly sleep, because all islands share this machine: a
restart takes the processor away from everybody, which it would not on machines of their own. The first round after a
signal may still take longer (a stopped island is waited for): `longest_round_ratio` is the longest of all over the
undisturbed median.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from diloco.bench.report import Check, Report
from diloco.errors import DeviceError
from diloco.launch.processes import Child
from diloco.report.events import Event, Round, Start, of_kind
from diloco.report.watching import Tail
from diloco.run.invites import TICKET
from diloco.simulate.real.network import VARIABLE as SIMULATION

OTHERS = ("one", "two", "three")
FOUNDER = "island-1"  # as the others see it
MESH = ("island.fsdp=2", "island.tp=2")
RANKS = 4
CALM = 3  # undisturbed rounds of all islands before each fault
WARM = 1  # rounds of all that are not counted
INTO = 0.5  # of a phase, when the signal comes
SLOW, MESH_SLOW = 30.0, 4.0  # times longer that inner steps take: the rest of it they sleep
LINK_BITS_PER_S = 1e9
LOOK_S = 0.1
LONG_S = 900.0
FAULTS = {  # by who has founded the run; every rank and both signals, in as few faults as can be
    "the island itself": ((0, signal.SIGKILL), (1, signal.SIGSTOP), (2, signal.SIGKILL), (3, signal.SIGSTOP)),
    "another island": ((0, signal.SIGSTOP), (1, signal.SIGKILL), (2, signal.SIGSTOP), (3, signal.SIGKILL)),
}


def measure(*, every_s: float, faults: int) -> Report:
    """Inflict up to so many faults in each of the two runs, whose phases last `every_s` seconds."""
    rows, undisturbed, struck = dict[str, Any](), list[float](), list[float]()
    for founder, planned in FAULTS.items():
        with crew_of(every_s, founds=founder == "the island itself") as crew:
            for rank, number in planned[:faults]:
                row = strike(crew, rank, number, INTO * every_s)
                rows[f"{number.name} of rank {rank}, founded by {founder}"] = row
            undisturbed += crew.lengths(crew.calm)
            struck += crew.lengths(crew.disturbed)
    ratio = median(struck) / median(undisturbed)
    checks = [
        Check("ranks.named_s", max(row["named_s"] for row in rows.values()), 60.0, "lower"),
        Check("ranks.rounds_until_back", max(row["rounds_until_back"] for row in rows.values()), 3, "lower"),
        Check("ranks.others_round_ratio", ratio, 1.05, "lower"),
    ]
    figures = {
        "every_s": every_s, "faults": rows, "round_s": median(undisturbed), "struck_round_s": median(struck),
        "longest_round_ratio": max(struck) / median(undisturbed), "undisturbed_rounds": len(undisturbed),
        "struck_rounds": len(struck),
    }  # fmt: skip
    return Report(checks, figures)


@dataclass(frozen=True)
class Stretch:
    """Hold a stretch of time, in seconds since 1970."""

    begin: float
    end: float


class RankCrew:
    """Run the four islands, and read what they report."""

    def __init__(self, root: Path, every_s: float, *, founds: bool) -> None:
        self.root, self.founds = root, founds
        self.mesh = FOUNDER if founds else "mesh"
        self.names = (FOUNDER, *(OTHERS if founds else ("mesh", *OTHERS[1:])))
        self.children = {name: Child(name, root / "output" / name) for name in self.names}
        self._tails = {name: Tail(root / name / "events.jsonl") for name in self.names}
        self.events: dict[str, list[Event]] = {name: [] for name in self.names}
        self.calm, self.disturbed = list[Stretch](), list[Stretch]()
        write_config(root / "run.yaml", root / FOUNDER, every_s)
        slow = {name: MESH_SLOW if name == self.mesh else SLOW for name in self.names}
        write_network(root / "network.json", slow)

    @property
    def others(self) -> list[str]:
        """Return the islands of one process, which nothing happens to."""
        return [name for name in self.names if name != self.mesh]

    def begin(self) -> None:
        """Found the run, and let the others join it."""
        own = [word for change in MESH for word in ("--set", change)]
        first = own if self.founds else []
        self._start(FOUNDER, "run", str(self.root / "run.yaml"), "--islands", "1", *first)
        ticket = self.root / FOUNDER / TICKET
        self.wait_for(ticket.exists)
        for name in self.names[1:]:
            where = ["--name", name, "--dir", str(self.root / name), "--set", "island.batch=4"]
            self._start(name, "join", str(ticket), *where, *(own if name == self.mesh else ()))

    def _start(self, name: str, *arguments: str) -> None:
        file = str(self.root / "network.json")
        self.children[name].start(arguments, {"OMP_NUM_THREADS": "1", SIMULATION: file})

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; raise DeviceError if an island ends before, or after LONG_S seconds."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            ended = [child for child in self.children.values() if child.exit_code is not None]
            if ended or time.monotonic() > deadline:
                why = "; ".join(f"{child.name}: {child.reason()}" for child in ended) or "nothing happens any more"
                raise DeviceError(f"the islands of this benchmark do not work here: {why}")
            time.sleep(LOOK_S)
            for name, tail in self._tails.items():
                self.events[name] += tail.read()

    def rounds(self, name: str, since: float = 0.0) -> list[Round]:
        """Return the rounds with contributions that an island has reported since a time."""
        return [e for e in of_kind(self.events[name], Round) if e.contributors and e.time > since]

    def together(self, since: float) -> int:
        """Count the newest rounds, in a row, in which all islands took part."""
        count = 0
        for event in reversed(self.rounds(self.others[0], since)):
            if len(event.contributors) < len(self.names):
                break
            count += 1
        return count

    def lengths(self, stretches: list[Stretch]) -> list[float]:
        """Return the seconds from the end of one round to that of the next, as each of the others reports them, for
        rounds that end in one of these stretches."""
        found = []
        for name in self.others:
            for before, event in pairwise(self.rounds(name)):
                if any(each.begin < event.time <= each.end for each in stretches):
                    found.append(event.time - before.time)
        return found

    def pid(self, rank: int) -> int:
        """Return the number of the process of a rank: they are the island's last children, in the order of ranks."""
        started = self.children[self.mesh].pid
        return int(Path(f"/proc/{started}/task/{started}/children").read_text().split()[rank - RANKS])

    def named(self) -> list[str]:
        """Return what the island has printed about processes that failed."""
        text = (self.children[self.mesh].folder / "output.log").read_text(errors="replace")
        return [line for line in text.splitlines() if line.startswith("error[process]")]

    def close(self) -> None:
        """End all islands at once."""
        for child in self.children.values():
            child.kill()


@contextmanager
def crew_of(every_s: float, *, founds: bool) -> Iterator[RankCrew]:
    """Yield four islands that train together; `founds`: the one of several processes has founded the run."""
    with TemporaryDirectory(prefix="diloco-ranks-", ignore_cleanup_errors=True) as folder:
        crew = RankCrew(Path(folder), every_s, founds=founds)
        try:
            crew.begin()
            crew.wait_for(lambda: crew.together(0.0) >= WARM)
            yield crew
        finally:
            crew.close()


def strike(crew: RankCrew, rank: int, number: signal.Signals, into_s: float) -> dict[str, Any]:
    """Send a signal to one process of the island, wait until it is back, and return what was seen."""
    since = time.time()
    crew.wait_for(lambda: crew.together(since) >= CALM)
    crew.calm.append(Stretch(since + 1e-3, crew.rounds(crew.others[0])[-1].time + 1.0))
    until = time.time() + into_s
    crew.wait_for(lambda: time.time() > until)
    told, pid, at = len(crew.named()), crew.pid(rank), time.time()
    os.kill(pid, number)
    crew.wait_for(lambda: len(crew.named()) > told)
    named_s, line = time.time() - at, crew.named()[told]
    crew.wait_for(lambda: back(crew, at))
    returned = back(crew, at)
    assert returned is not None
    crew.disturbed.append(Stretch(at, returned.time + 1.0))
    rounds = [event.round for event in crew.rounds(crew.others[0], at) if event.time <= returned.time]
    return {
        "named_s": named_s, "rounds_until_back": len(rounds), "back_s": returned.time - at,
        "rounds_s": crew.lengths(crew.disturbed[-1:]),
        "right": f"process {rank} of {RANKS}" in line and f"pid {pid})" in line, "line": line,
    }  # fmt: skip


def back(crew: RankCrew, at: float) -> Round | None:
    """Return the first round with work of the life that the island began after a time; None until there is one."""
    lives = [event.time for event in of_kind(crew.events[crew.mesh], Start) if event.time > at]
    if not lives:
        return None
    return next((e for e in crew.rounds(crew.others[0], lives[0]) if crew.mesh in e.contributors), None)


def write_config(path: Path, folder: Path, every_s: float) -> None:
    """Write the configuration of a run without an end, of a model so small that seven processes fit on two cores."""
    tree = {
        "run": "ranks",
        "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"sequence": 16},
        "island": {"batch": 4, "device": "cpu"},
        "inner": {"lr": 1e-3, "warmup": 2, "steps": 10_000_000, "schedule": "constant"},
        "sync": {"every": f"{every_s:g}s"},
        "elastic": {"start_islands": len(OTHERS) + 1, "start_s": LONG_S},
        "evaluate": {"every": 0}, "log": {"every": 1000},
        "checkpoint": {"dir": str(folder)},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def write_network(path: Path, slow: dict[str, float]) -> None:
    """Write what a simulation says of these islands: fast links, and steps that take so many times as long."""
    rates = {"up_bits_per_s": LINK_BITS_PER_S, "down_bits_per_s": LINK_BITS_PER_S}
    islands = {name: {"id": name, **rates, "slow": factor} for name, factor in slow.items()}
    path.write_text(json.dumps({"islands": islands, "paths": [], "cut": [], "silent": []}), encoding="utf-8")
