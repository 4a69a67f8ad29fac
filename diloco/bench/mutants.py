"""Break the protocol core in many small ways, and count what scenarios and random disasters notice.

Mutants are generated from the syntax tree (`mutate.py`) and drawn by a seed. Each runs in a process of its own, forked
from this one with everything loaded, in which the changed function gets other code: first through the scenarios, then
through disasters, until one of them catches it.
"""

import gc
import multiprocessing
import resource
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import yaml

from diloco.bench.mutate import FINER_KINDS, KINDS, Mutant, Source, draw
from diloco.bench.report import Check, Report
from diloco.elastic import protocol
from diloco.errors import DilocoError, first_line
from diloco.simulate.virtual import scenario
from diloco.simulate.virtual.faults import disaster, harsh_disaster, run

ROOT = Path(__file__).resolve().parents[2]
REASONS = "tests/mutants.yaml"
NOT_MUTATED = {"__init__", "messages", "record", "wire", "rules", "options", "ranges"}  # they decide nothing
FINER = 3  # for each of the finer kinds, so many of the others are drawn
PATIENCE = 20  # times the longest trial without a change: whatever takes longer hangs
UNCHANGED_SEEDS = 20  # are timed
MEMORY_BYTES = 4 * 2**30  # some mutants would fill a list for ever
FORK = multiprocessing.get_context("fork")

CodeKey = tuple[str, str, int]


@dataclass(frozen=True)
class Trials:
    """Hold what every mutant goes through: scenarios, then the disasters of the first seeds, each second one harsh."""

    scenarios: tuple[Path, ...]
    seeds: Sequence[int]

    def __iter__(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for path in self.scenarios:
            yield path.name, partial(scenario.check, path)
        for seed in self.seeds:
            yield f"seed {seed}", partial(_suffer, seed)


@dataclass(frozen=True)
class Verdict:
    """Say how far a mutant came: the last trial, and what caught it there; nothing if it survived all of them."""

    trial: str = ""
    catch: str = ""


def measure(*, seed: int | None, count: int, seeds: int, jobs: int) -> Report:
    """Draw mutants by a seed, today's date if it is None, and run each through scenarios and so many disasters."""
    scenarios = tuple(sorted(ROOT.glob("tests/scenarios/*.txt")))
    if not scenarios:
        raise DilocoError("bench mutants needs a checkout of diloco: an installed package has no tests/scenarios")
    seed = int(f"{date.today():%Y%m%d}") if seed is None else seed
    started = time.perf_counter()
    possible = [mutation for source in core() for mutation in source.mutations()]
    mutants = draw((each for each in possible if each.kind in KINDS), count, seed)
    finer = draw((each for each in possible if each.kind in FINER_KINDS), -(-count // FINER), seed)
    few = Trials(scenarios, range(0, seeds, max(1, seeds // UNCHANGED_SEEDS)))
    limit_s = PATIENCE * slowest_s(few)
    verdicts = run_all([*mutants, *finer], Trials(scenarios, range(seeds)), limit_s, jobs)
    caught, of_finer = _share(verdicts[: len(mutants)]), _share(verdicts[len(mutants) :])
    weight = sum(each.kind in FINER_KINDS for each in possible) / len(possible)
    figures = {
        "seed": seed, "seeds": seeds, "possible": len(possible), "caught share of finer kinds": of_finer,
        "caught share of all kinds": (1 - weight) * caught + weight * of_finer,
        **_figures([*mutants, *finer], verdicts),
    }  # fmt: skip
    figures["unused reasons"] = _unused_reasons({(each.function, each.change) for each in possible})
    checks = [Check("mutants.count", len(mutants), 60, "higher"), Check("mutants.caught_share", caught, 0.9, "higher")]
    return Report(checks, {**figures, "seconds": time.perf_counter() - started})


def _share(verdicts: Sequence[Verdict]) -> float:
    return sum(bool(verdict.catch) for verdict in verdicts) / len(verdicts)


def core() -> list[Source]:
    """Load the modules of the protocol that decide something, as sources that can be mutated."""
    files = sorted(path for folder in protocol.__path__ for path in Path(folder).glob("*.py"))
    modules = [import_module(f"{protocol.__name__}.{path.stem}") for path in files if path.stem not in NOT_MUTATED]
    paths = [Path(str(module.__file__)) for module in modules]
    return [Source(path, str(path.resolve().relative_to(ROOT))) for path in paths]


def run_all(mutants: Sequence[Mutant], trials: Trials, limit_s: float, jobs: int) -> list[Verdict]:
    """Run each mutant in a process of its own, `jobs` at a time; a trial may take `limit_s` of processor time."""
    functions, waiting = _functions_by_code(), deque(range(len(mutants)))
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    verdicts = [Verdict()] * len(mutants)
    while waiting or running:
        while waiting and len(running) < jobs:
            index = waiting.popleft()
            code = mutants[index].code
            here, there = FORK.Pipe(duplex=False)
            process = FORK.Process(target=_attempt, args=(functions[_key(code)], code, trials, limit_s, there))
            process.start()
            there.close()
            running[here] = index, process
        for connection in wait(list(running)):
            assert isinstance(connection, Connection)
            index, process = running[connection]
            try:
                verdicts[index] = connection.recv()
            except EOFError:
                process.join()
                verdicts[index] = _final(verdicts[index], process.exitcode)
                del running[connection]
                left = len(waiting) + len(running)
                print(f"{_told(mutants[index], verdicts[index])} ({left} left)", file=sys.stderr, flush=True)
    return verdicts


def _told(mutant: Mutant, verdict: Verdict) -> str:
    """Say in a line what became of a mutant: its place and change, and what caught it."""
    outcome = f"caught by {verdict.trial}: {verdict.catch}" if verdict.catch else "SURVIVES"
    return f"{mutant.file}:{mutant.line} {mutant.change}: {outcome}"


def _final(last: Verdict, exit_code: int | None) -> Verdict:
    """Judge a mutant by the last verdict it has sent and by how its process ended."""
    if last.catch or not exit_code:
        return last
    killed = exit_code == -signal.SIGPROF
    return Verdict(last.trial, "it hangs" if killed else f"its process ended with {exit_code}")


def _attempt(
    functions: Sequence[FunctionType], code: CodeType, trials: Trials, limit_s: float, parent: Connection
) -> None:
    """Run through the trials with other code for these functions, and tell the parent of each before it begins."""
    for function in functions:
        function.__code__ = code
    gc.freeze()
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    for name, trial in trials:
        parent.send(Verdict(name))
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            trial()
        except Exception as error:  # noqa: BLE001 -- the process's outermost frame; the parent is told
            parent.send(Verdict(name, _reason(error)))
            return
    parent.send(Verdict())


def slowest_s(trials: Trials) -> float:
    """Return the processor time of the longest trial of the unchanged core, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(_slowest_s, trials).result()


def _slowest_s(trials: Trials) -> float:
    _limit_memory()
    longest_s = 0.0
    for name, trial in trials:
        started = time.process_time()
        try:
            trial()
        except AssertionError as error:
            raise DilocoError(f"{name} fails without any change of the protocol: {_reason(error)}") from None
        longest_s = max(longest_s, time.process_time() - started)
    return longest_s


def _reason(error: Exception) -> str:
    """Return an error's kind and first line; what else a violation carries is left out."""
    return f"{type(error).__name__}: {first_line(Exception(*error.args[:1]))}"


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _suffer(seed: int) -> None:
    run((harsh_disaster if seed % 2 else disaster)(seed))


def _functions_by_code() -> dict[CodeKey, list[FunctionType]]:
    """Return all functions that are loaded, by file, name and line of their code."""
    found: dict[CodeKey, list[FunctionType]] = {}
    gc.unfreeze()  # what is frozen is not among the objects
    for each in gc.get_objects():
        if type(each) is FunctionType:
            found.setdefault(_key(each.__code__), []).append(each)
    return found


def _key(code: CodeType) -> CodeKey:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _figures(mutants: Sequence[Mutant], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return how many of each kind were caught, by what, and all that survived."""
    reasons = {(row["function"], row["change"]): row["reason"] for row in _reasons()}
    drawn = Counter(mutant.kind for mutant in mutants)
    caught = Counter(mutant.kind for mutant, verdict in zip(mutants, verdicts, strict=True) if verdict.catch)
    trials = [verdict.trial for verdict in verdicts if verdict.catch]
    seeds = [int(trial.removeprefix("seed ")) for trial in trials if trial.startswith("seed ")]
    survivors = [
        {
            "file": mutant.file, "line": mutant.line, "function": mutant.function, "change": mutant.change,
            "source": mutant.source_line, "reason": reasons.get((mutant.function, mutant.change), ""),
        }
        for mutant, verdict in zip(mutants, verdicts, strict=True)
        if not verdict.catch
    ]  # fmt: skip
    return {
        "kinds": {kind: {"drawn": drawn[kind], "caught": caught[kind]} for kind in (*KINDS, *FINER_KINDS)},
        "caught by scenarios": len(trials) - len(seeds),
        "caught by disasters": len(seeds),
        "greatest seed needed": max(seeds, default=None),
        "survivors": survivors,
    }


def _reasons() -> list[dict[str, str]]:
    """Read why mutants that survive do no harm: by function and change."""
    return yaml.safe_load((ROOT / REASONS).read_text()) or []


def _unused_reasons(possible: set[tuple[str, str]]) -> list[str]:
    """Return the reasons for changes that are no longer possible, because the function is another one now."""
    rows = [(row["function"], row["change"]) for row in _reasons()]
    return [f"{function}: {change}" for function, change in rows if (function, change) not in possible]
