"""Measure the memory that an island's outer part takes, by real islands of two sizes, over the budget for it.

An island founds a run with another one; after half of the rounds the other is killed, and a newcomer takes its place:
the measured island serves its state. Snapshots and saves happen several times. Memory is what the kernel counts for all
processes of the island, anonymous and shared pages (PSS), twenty times a second; pages of files do not count. The same
training without an outer part is measured alike and taken off. What is compared is the slope between the two sizes:
bytes for each parameter. The largest counts, from the start of the process to its end.
"""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from diloco.bench.overhead import BareLoop
from diloco.bench.report import Check, Report
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.data.batches import open_samples
from diloco.errors import DeviceError
from diloco.island.mesh import accelerator_peak, pick_device
from diloco.launch.processes import Child
from diloco.plan.memory import memory_of
from diloco.plan.workload import workload_of
from diloco.report.events import Event, Round, Start, of_kind
from diloco.report.watching import Tail
from diloco.run.invites import TICKET

ENCODED = 1.02  # bytes of a value in int8
BUDGET = {  # bytes of a parameter: the outer state, the anchor, four payloads of the largest fragment
    "classic": 8 + 0 + 4 * ENCODED,
    "overlapped": 8 + 4 + 4 * ENCODED,
    "streaming": 8 + 4 + 4 * ENCODED / 3,
}
SYNC: dict[str, dict[str, Any]] = {
    "classic": {}, "overlapped": {"delay": 1}, "streaming": {"fragments": 3, "delay": 1},
}  # fmt: skip
LIMIT, GROWTH_LIMIT, PLAN_LIMIT = 1.05, 1.0, 0.15
EVERY = 4  # inner steps of a phase
SETTLED = 8  # rounds, after which nothing may grow
WIDTH, FEED_FORWARD = 512, 1536
BLOCK = 4 * WIDTH**2 + 3 * WIDTH * FEED_FORWARD  # parameters
PAUSE_S = 0.05
REST = 9  # times as long as a look has taken
LONG_S = 900.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
FOUNDER, OTHER, NEWCOMER = "island-1", "other", "newcomer"


def measure(*, modes: tuple[str, ...], small: int, large: int, rounds: int) -> Report:
    """Measure these modes with models of two sizes, in parameters, over so many rounds."""
    unknown = [mode for mode in modes if mode not in BUDGET]
    if unknown:
        raise DeviceError(f"{unknown[0]} is no mode of this benchmark: {', '.join(BUDGET)} are")
    rows, checks, growth, plan_errors = dict[str, Any](), list[Check](), list[float](), list[float]()
    bare = {size: bare_peak(config_of("classic", size, rounds)).host for size in (small, large)}
    for mode in modes:
        seen = {size: island_memory(config_of(mode, size, rounds), rounds) for size in (small, large)}
        one, two = seen[small], seen[large]
        values = two.parameters - one.parameters
        slope = ((two.peak - bare[large]) - (one.peak - bare[small])) / values
        planned = (two.planned - one.planned) / values
        growth += [each.growth_a_round / 1e6 for each in seen.values()]
        plan_errors.append(abs(planned / slope - 1))
        checks.append(Check(f"memory.over_budget_{mode}", slope / BUDGET[mode], LIMIT, "lower"))
        rows[mode] = {
            "bytes_a_parameter": slope, "budget": BUDGET[mode], "planned": planned,
            "peak_gb": [each.peak / 1e9 for each in seen.values()], "peak_at": [each.peak_at for each in seen.values()],
            "usual_bytes_a_parameter": (two.usual - one.usual - bare[large] + bare[small]) / values,
        }  # fmt: skip
    worst = max((check.value for check in checks), default=0.0)
    checks = [
        Check("memory.over_budget", worst, LIMIT, "lower"), *checks,
        Check("memory.growth_mb_a_round", max(growth), GROWTH_LIMIT, "lower"),
        Check("memory.plan_error", max(plan_errors), PLAN_LIMIT, "lower"),
    ]  # fmt: skip
    figures = {"parameters": [small, large], "bare_gb": [peak / 1e9 for peak in bare.values()], "modes": rows}
    return Report(checks, figures)


def config_of(mode: str, parameters: int, rounds: int) -> Config:
    """Configure a run of about so many parameters, whose steps are as short as can be."""
    return parse_config(settings_of(mode, parameters, rounds))


def settings_of(mode: str, parameters: int, rounds: int) -> dict[str, Any]:
    """Return what the run's file says."""
    model = {"preset": "tiny", "width": WIDTH, "heads": 8, "kv_heads": 8, "feed_forward": FEED_FORWARD}
    return {
        "run": "memory", "model": {**model, "blocks": max(3, round(parameters / BLOCK))},
        "data": {"sequence": 8}, "island": {"batch": 1, "device": "cpu"},
        "inner": {"steps": EVERY * rounds, "warmup": 2}, "sync": {"every": EVERY, "codec": "int8", **SYNC[mode]},
        "elastic": {"start_islands": 2, "start_s": LONG_S, "silence_s": 10.0}, "evaluate": {"every": 0},
        "log": {"every": 1}, "checkpoint": {"snapshot_every": 5, "keep": 1},
    }  # fmt: skip


@dataclass
class Curve:
    """Hold the memory of a tree of processes over time, in bytes."""

    moments: list[tuple[float, int]] = field(default_factory=list)

    @property
    def peak(self) -> tuple[float, int]:
        """Return the largest amount, and when that was."""
        return max(self.moments, key=lambda each: each[1])

    def between(self, begin: float, end: float) -> list[int]:
        """Return the amounts of a stretch of time."""
        return [amount for moment, amount in self.moments if begin < moment <= end]


@contextmanager
def watching(pid: int, apart: str = "") -> Iterator[Curve]:
    """Yield the memory of a process and of all that it has started, as it grows while the block lasts. Files below
    `apart`, which lie in memory themselves, are not counted where they are mapped."""
    curve, over, pause_s = Curve(), threading.Event(), PAUSE_S

    def look() -> None:
        nonlocal pause_s
        while not over.wait(pause_s):
            began = time.perf_counter()
            if amount := sum(_memory_of(each, apart) for each in _tree(pid)):
                curve.moments.append((time.time(), amount))
            pause_s = max(PAUSE_S, REST * (time.perf_counter() - began))  # the kernel holds a lock of the process

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield curve
    finally:
        over.set()
        thread.join()


def _tree(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _memory_of(pid: int, apart: str) -> int:
    """Return a process' share of anonymous and shared pages, in bytes; 0 where it has ended."""
    amount = 0
    with suppress(OSError):
        process = Path(f"/proc/{pid}")
        lines = (process / "smaps_rollup").read_text().splitlines()
        amount = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        if apart and apart in (process / "maps").read_text():
            amount -= _mapped((process / "smaps").read_text(), apart)
    return 1024 * max(0, amount)


def _mapped(maps: str, apart: str) -> int:
    """Return how many KiB of a process' mappings are pages of files below a folder."""
    amount, below = 0, False
    for line in maps.splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):  # a mapping begins: its addresses, and last its file
            below = apart in line
        elif below and name in ("Pss:", "Anonymous:"):
            amount += int(values[0]) if name == "Pss:" else -int(values[0])
    return amount


class Peak(NamedTuple):
    """Hold the most that a process took, in bytes."""

    host: int
    accelerator: int  # 0 without one


def bare_peak(config: Config, environment: Mapping[str, str] = ENVIRONMENT) -> Peak:
    """Return the most that the shortest loop takes with the same model, data and optimizer."""
    context = multiprocessing.get_context("spawn")
    os.environ |= environment
    found, told = context.Pipe(duplex=False)
    process = context.Process(target=_train_bare, args=(config, told), daemon=True)
    process.start()
    assert process.pid is not None
    with watching(process.pid) as curve:
        process.join()
    if process.exitcode:
        raise DeviceError(f"the loop that is compared with ended with exit code {process.exitcode}")
    return Peak(curve.peak[1], found.recv())


def _train_bare(config: Config, told: Connection) -> None:
    device = pick_device(config.island.device)
    loop = BareLoop(config, open_samples(config), device)
    for _ in range(2 * EVERY):
        loop.advance()
    told.send(accelerator_peak(device) or 0)


@dataclass(frozen=True)
class Seen:
    """Hold what was measured of one island."""

    parameters: int
    peak: int
    peak_at: str
    usual: float  # the median of the settled rounds
    growth_a_round: float
    planned: float


def island_memory(config: Config, rounds: int) -> Seen:
    """Run the islands, and measure the one that has founded the run."""
    with TemporaryDirectory(prefix="diloco-memory-", ignore_cleanup_errors=True) as folder:
        crew = MemoryCrew(Path(folder), config)
        try:
            crew.found()
            crew.join(OTHER)
            crew.wait_for(lambda: crew.round >= rounds // 2)
            crew.children[OTHER].kill()
            crew.join(NEWCOMER)
            crew.wait_for_end(FOUNDER)
        finally:
            crew.close()
        return seen_in(config, crew.events[FOUNDER], crew.curves[FOUNDER][0])


def seen_in(config: Config, events: list[Event], curve: Curve) -> Seen:
    """Work out the figures of an island from its events and its curve."""
    over = [event for event in of_kind(events, Round) if event.contributors]
    lengths = {later.round: curve.between(before.time, later.time) for before, later in pairwise(over)}
    medians = [(number, median(amounts)) for number, amounts in lengths.items() if number > SETTLED and amounts]
    moment, peak = curve.peak
    at = next((f"round {event.round}" for event in over if event.time >= moment), "the end")
    growth = linear_regression(*zip(*medians, strict=True)).slope if len(medians) > 1 else 0.0
    work = workload_of(config)
    planned = memory_of(work, config, "fp32", islands=2, step_s=1.0).host
    usual = median(amount for _, amount in medians)
    return Seen(of_kind(events, Start)[0].parameters, peak, at, usual, growth, planned)


class MemoryCrew:
    """Run the islands as people start them, watch their memory, and read what they report."""

    def __init__(
        self, root: Path, config: Config, watched: tuple[str, ...] = (FOUNDER,),
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:  # fmt: skip
        self._root, self._config, self._watched, self._environment = root, root / "run.yaml", watched, dict(environment)
        names = (FOUNDER, OTHER, NEWCOMER)
        self.children = {name: Child(name, root / "output" / name) for name in names}
        self._tails = {name: Tail(root / name / "events.jsonl") for name in names}
        self.events: dict[str, list[Event]] = {name: [] for name in names}
        self.curves: dict[str, list[Curve]] = {name: [] for name in names}  # of each life
        self._watching = ExitStack()
        tree = json.loads(config.model_dump_json(exclude_unset=True))
        tree["checkpoint"]["dir"] = str(root / FOUNDER)
        self._config.write_text(json.dumps(tree), encoding="utf-8")
        sections = {section: tree.get(section, {}) for section in ("island", "checkpoint", "evaluate", "log")}
        self._own = [  # of an island that joins, too: from the others it has the run's settings only
            f"--set={section}.{key}={json.dumps(value)}"
            for section, keys in sections.items() for key, value in keys.items() if key != "dir"
        ]  # fmt: skip

    def _start(self, name: str, *arguments: str) -> None:
        child = self.children[name]
        child.start(arguments, self._environment)
        if name in self._watched:
            assert child.pid is not None
            self.curves[name].append(self._watching.enter_context(watching(child.pid, str(self._root))))

    def found(self, *, alone: bool = False) -> None:
        """Found the run; unless alone, so that others can join it when this returns."""
        self._start(FOUNDER, "run", str(self._config), *(() if alone else ("--islands", "1")))
        if not alone:
            self.wait_for((self._root / FOUNDER / TICKET).exists)

    def join(self, name: str) -> None:
        """Start an island that joins, or comes back."""
        where = ("--name", name, "--dir", str(self._root / name))
        self._start(name, "join", str(self._root / FOUNDER / TICKET), *where, *self._own)

    @property
    def round(self) -> int:
        """Return the last round that the founder reported."""
        return max((event.round for event in of_kind(self.events[FOUNDER], Round)), default=0)

    def read(self) -> None:
        """Read the events that came since the last call."""
        for name, tail in self._tails.items():
            self.events[name] += tail.read()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; raise DeviceError if an island fails before, or after LONG_S seconds."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            failed = [child for child in self.children.values() if (child.exit_code or 0) > 0]
            if failed or time.monotonic() > deadline:
                why = "; ".join(f"{child.name}: {child.reason()}" for child in failed) or "nothing happens any more"
                raise DeviceError(f"the islands of this benchmark do not work here: {why}")
            time.sleep(PAUSE_S)
            self.read()

    def wait_for_end(self, *names: str) -> None:
        """Wait until these islands have ended, and read their last events; raise DeviceError where one has failed."""
        children = [self.children[name] for name in names]
        self.wait_for(lambda: all(child.exit_code is not None for child in children))
        self.read()
        for child in children:
            if child.exit_code:
                raise DeviceError(f"{child.name} ended: {child.reason()}")

    def close(self) -> None:
        """End all islands at once."""
        for child in self.children.values():
            child.kill()
        self._watching.close()
