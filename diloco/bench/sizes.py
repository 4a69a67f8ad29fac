"""Measure real islands of real sizes that share a GPU: the memory of their outer part, and how long rounds take.

Two islands train together, each round of both; one is killed after the second round and started again (`kill`). Or they
train on while a round is under way (`window`). Or one island trains in a run of one (`alone`).

What the same training takes without an outer part is taken off an island's memory, and the rest compared with what it
may take, `RUNTIME` of the process included. Folders that lie in memory are not counted. A round takes what the island
has waited that came last, since the other one has waited for it, too: from its cut until the result has entered.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from diloco.bench.memory import ENVIRONMENT, FOUNDER, LONG_S, OTHER, MemoryCrew, Peak, bare_peak
from diloco.bench.report import Check, Report
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.errors import DeviceError
from diloco.island.mesh import pick_device
from diloco.report.events import End, Event, Round, Saved, Start, Step, of_kind

CASES = ("kill", "window", "alone")
CODEC, ENCODED = "int4", 0.516  # bytes of a value
STATE, ANCHOR, PAYLOADS = 8, 4, 4  # bytes of a parameter; so many payloads
RUNTIME, SPARE = 3e9, 512 << 20  # bytes: of a process on the host; of buckets and the like on a GPU
LIMIT = 1.05
ROUND_LIMIT_S = {("1b", "device"): 1.0, ("1b", "host"): 1.6, ("150m", "device"): 0.2, ("150m", "host"): 0.3}
WINDOW, WINDOWS, WINDOW_LIMIT = 20, 4, 0.95  # steps of a window, and before it
EVERY = 10  # inner steps between two rounds that are waited for
WARM_UP = 1  # rounds, and windows: kernels are compiled in the first one
IN_MEMORY = Path("/dev/shm")


def measure(
    *, presets: tuple[str, ...], outers: tuple[str, ...], cases: tuple[str, ...], steps: int, batch: int, sequence: int,
    snapshots: int, device: str, folder: Path | None,
) -> Report:  # fmt: skip
    """Measure these cases for each size and each place of the outer state."""
    if unknown := [case for case in cases if case not in CASES]:
        raise DeviceError(f"{unknown[0]} is no case of this benchmark: {', '.join(CASES)} are")
    kind, rows, found = pick_device(device).type, dict[str, Any](), defaultdict[str, list[Check]](list)
    folder = folder or (IN_MEMORY if IN_MEMORY.is_dir() else None)
    for preset in presets:
        bare: Peak | None = None
        for outer, case in product(outers, cases):
            config = config_of(
                preset, outer, case, steps=steps, batch=batch, sequence=sequence, snapshots=snapshots, device=kind
            )
            bare = bare or bare_peak(config, environment_of(kind))
            events, peaks = train(config, case, folder, environment_of(kind))
            rows[f"{preset} {outer} {case}"], checks = row_of(config, case, events, peaks, bare)
            for check in checks:
                found[check.name].append(check)
    sign = {"lower": 1, "higher": -1}
    worst = [max(checks, key=lambda check: sign[check.better] * check.value) for checks in found.values()]
    return Report(worst, {"device": kind, "folder": str(folder), "rows": rows})


def environment_of(kind: str) -> Mapping[str, str]:
    """Return what islands on such a device find in their environment, besides what we do."""
    return ENVIRONMENT if kind == "cpu" else {}


def config_of(
    preset: str, outer: str, case: str, *, steps: int, batch: int, sequence: int, snapshots: int, device: str
) -> Config:
    """Configure a run whose islands meet every few steps, each time all of them."""
    sync: dict[str, Any] = {"every": EVERY, "codec": CODEC}
    if case == "window":  # a launch, a window, and as much again before the next launch, twice
        sync, steps = {**sync, "every": 3 * WINDOW, "delay": WINDOW}, WINDOW * (3 * WINDOWS + 1)
    islands = 1 if case == "alone" else 2
    return parse_config({
        "run": "sizes", "model": {"preset": preset, **({} if preset == "tiny" else {"vocab": 32768})},
        "data": {"sequence": sequence}, "island": {"batch": batch, "device": device, "outer": outer},
        "inner": {"steps": steps, "warmup": 2}, "sync": sync, "evaluate": {"every": 0},
        "elastic": {"start_islands": islands, "min_islands": islands, "start_s": LONG_S, "silence_s": 10.0},
        "log": {"every": 1 if case == "window" else EVERY}, "checkpoint": {"snapshot_every": snapshots, "keep": 1},
    })  # fmt: skip


def train(
    config: Config, case: str, folder: Path | None, environment: Mapping[str, str]
) -> tuple[dict[str, list[Event]], dict[str, list[int]]]:
    """Run the islands to their end; return their events, and the most host memory of each of their lives."""
    names = (FOUNDER,) if case == "alone" else (FOUNDER, OTHER)
    with TemporaryDirectory(prefix="diloco-sizes-", dir=folder, ignore_cleanup_errors=True) as root:
        crew = MemoryCrew(Path(root), config, names, environment)
        try:
            crew.found(alone=case == "alone")
            for name in names[1:]:
                crew.join(name)
            if case == "kill":
                crew.wait_for(lambda: crew.round >= 2)
                crew.children[OTHER].kill()
                crew.join(OTHER)
            crew.wait_for_end(*names)
        finally:
            crew.close()
    peaks = {name: [curve.peak[1] for curve in crew.curves[name]] for name in names}
    return {name: crew.events[name] for name in names}, peaks


def row_of(
    config: Config, case: str, events: Mapping[str, list[Event]], peaks: Mapping[str, list[int]], bare: Peak
) -> tuple[dict[str, Any], list[Check]]:
    """Return the figures of a case, and what of them has a limit."""
    every = [event for seen in events.values() for event in seen]
    parameters = of_kind(every, Start)[0].trained_parameters
    size, outer = config.model.preset or "", config.island.outer
    taken = Peak(max(map(max, peaks.values())), max(end.accelerator_bytes or 0 for end in of_kind(every, End)))
    allowed = budget_of(parameters, config, on_gpu=bare.accelerator > 0)
    over = {"host": (taken.host - bare.host) / allowed.host}
    if bare.accelerator:
        over["gpu"] = (taken.accelerator - bare.accelerator) / allowed.accelerator
    names = {where: size if case == "alone" else where for where in over}
    checks = [Check(f"sizes.over_budget_{names[where]}", value, LIMIT, "lower") for where, value in over.items()]
    seconds, rates = round_seconds(events), [window_rates(seen) for seen in events.values()]
    if case == "kill" and (size, outer) in ROUND_LIMIT_S:
        limit = ROUND_LIMIT_S[size, outer]
        checks.append(Check(f"sizes.round_s_{size}_{outer}", median(seconds), limit, "lower"))
    if case == "window":
        checks.append(Check("sizes.window_rate", min(map(median, rates)), WINDOW_LIMIT, "higher"))
    row = {
        "parameters": parameters, "over_budget": over, "budget_gb": [each / 1e9 for each in allowed],
        "peak_gb": [each / 1e9 for each in taken], "bare_gb": [each / 1e9 for each in bare],
        "bytes_a_parameter": [(mine - base) / parameters for mine, base in zip(taken, bare, strict=True)],
        "peak_gb_of_lives": {name: [each / 1e9 for each in lives] for name, lives in peaks.items()},
        "round_s": seconds, "step_s": step_seconds(every, config), "window_rates": rates,
        "save_s": [event.seconds for event in of_kind(every, Saved)],
    }  # fmt: skip
    return row, checks


def budget_of(parameters: int, config: Config, *, on_gpu: bool) -> Peak:
    """Return what an island may take beyond the same training without an outer part, in bytes."""
    moved, anchor = on_gpu and config.island.outer == "device", ANCHOR if config.sync.delay else 0
    host = PAYLOADS * ENCODED + (0 if moved else STATE + anchor)
    return Peak(int(host * parameters + RUNTIME), int((STATE + ANCHOR if moved else 0) * parameters) + SPARE)


def round_seconds(events: Mapping[str, Iterable[Event]]) -> list[float]:
    """Return how long each round took that all islands were in, after the first ones."""
    seen = defaultdict[int, list[float]](list)
    for heard in events.values():
        for event in of_kind(heard, Round):
            if len(event.contributors) == len(events):
                seen[event.round].append(event.round_s)
    return [min(seen[number]) for number in sorted(seen) if len(seen[number]) == len(events)][WARM_UP:]


def step_seconds(events: Iterable[Event], config: Config) -> float:
    """Return what a step usually takes, without waits."""
    return median(config.island.batch * config.data.sequence / step.tokens_per_s for step in of_kind(events, Step))


def window_rates(events: Iterable[Event]) -> list[float]:
    """Return, of each window with a round in flight after the first ones, the steps a second there over those in the
    steps before it."""
    ended = {event.step: event.time for event in of_kind(events, Step)}
    launches = [step for step in range(3 * WINDOW, max(ended, default=0), 3 * WINDOW) if step + WINDOW in ended]
    launches = launches[WARM_UP:]
    whole = [
        (ended[at] - ended[at - WINDOW], ended[at + WINDOW] - ended[at]) for at in launches if at - WINDOW in ended
    ]
    return [before / inside for before, inside in whole]
