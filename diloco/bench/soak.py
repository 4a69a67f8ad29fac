"""Train with islands that suffer faults of every kind, and check that nothing was lost and that rounds went on.

Islands are processes of their own: one founds the run, the others join it by a ticket. Faults are drawn from a seed
(`soak_plan.py`), carried out by an operator (`soak_operator.py`) over a network that can be cut (`soak_network.py`),
and judged by what the islands reported and what their logs hold (`soak_checks.py`, `soak_timeline.py`).
"""

import json
import random
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from diloco.bench.report import Report
from diloco.bench.soak_checks import Observation, judge
from diloco.bench.soak_network import choose_backend, open_network
from diloco.bench.soak_operator import OWN, Operator
from diloco.bench.soak_plan import Fault, PlanConfig, draw_faults
from diloco.bench.soak_process import SOURCE
from diloco.bench.soak_report import render_report
from diloco.bench.soak_timeline import percentile
from diloco.checkpoint.log.replica import vectors_digest
from diloco.elastic.protocol.ranges import size
from diloco.errors import ConfigError, SaveError
from diloco.history.log import furthest, newest_state, state_of

PARTITIONS = ("auto", "quorum", "merge")
QUIET_SHARE, QUIET_S = 0.1, (20.0, 60.0)  # how long the run without faults is, as a share of the soak and in seconds
TEXT_BYTES = 8 << 20  # no soak reaches the end of an epoch: leases of lost islands are not needed again
GRACE_S, MIN_ISLANDS = 5.0, 2


@dataclass(frozen=True)
class SoakConfig:
    """Specify a soak; `baseline` are the rounds per second without faults, None to measure them first."""

    minutes: float
    islands: int
    every: float
    seed: int
    partition: str
    faults: bool
    baseline: float | None
    backend: str


def measure(
    *, minutes: float, islands: int, every: float, seed: int, partition: str, keep: Path | None, faults: bool,
    baseline: float | None, backend: str,
) -> Report:  # fmt: skip
    """Run a soak in `keep`, which has to be a new folder, or in a temporary one."""
    if partition not in PARTITIONS:
        raise ConfigError(f"--partition {partition}: there are {', '.join(PARTITIONS)}")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep {keep} already exists: name a new folder")
    config = SoakConfig(minutes, islands, every, seed, partition, faults, baseline, choose_backend(backend))
    with ExitStack() as stack:
        root = keep or Path(stack.enter_context(TemporaryDirectory(prefix="diloco-soak-")))
        root.mkdir(parents=True, exist_ok=True)
        return _soak(config, root.resolve())


def _soak(config: SoakConfig, root: Path) -> Report:
    """Run the islands without faults for a while, then with them; write the report and all figures to the folder."""
    seconds, quiet_per_s = 60.0 * config.minutes, config.baseline
    if config.faults and quiet_per_s is None:
        least, most = QUIET_S
        quiet = observe(config, root / "quiet", (), min(most, max(least, QUIET_SHARE * seconds)))
        quiet_per_s = judge(quiet, merge=_merges(config), quiet_per_s=None).per_s
    plan = PlanConfig(config.seed, config.islands, seconds, config.every, one_way=config.backend == "netns")
    faults = draw_faults(plan) if config.faults else ()
    seen = observe(config, root / "soak", faults, seconds)
    verdict = judge(seen, merge=_merges(config), quiet_per_s=quiet_per_s)
    title = f"Soak: {config.islands} islands, {config.minutes:g} minutes, seed {config.seed}, {config.partition}"
    (root / "report.md").write_text(render_report(title, seen, verdict), encoding="utf-8")
    figures: dict[str, Any] = {
        **asdict(config), "faults": len(faults),
        "rounds": len(verdict.commits), "rounds_per_s": verdict.per_s, "quiet_rounds_per_s": quiet_per_s,
        "quorum_s": sum(span.seconds for span in verdict.spans), "seconds": seen.end_s,
        "heal_median_s": percentile(verdict.heals, 0.5), "longest_gap_s": verdict.gap_s,
        "together_s": seen.together_s, "rounds_lost": [each.round for each in verdict.lost],
        "samples_twice": seen.samples_twice, "refusals": [text for _, text in seen.refusals],
        "crashes": [text for _, text in seen.crashes],
    }  # fmt: skip
    report = Report(verdict.checks, figures)
    text = json.dumps({"checks": [asdict(check) for check in report.checks], **figures}, indent=1)
    (root / "soak.json").write_text(text + "\n", encoding="utf-8")
    print(f"report: {root / 'report.md'}", file=sys.stderr)
    return report


def observe(config: SoakConfig, root: Path, faults: tuple[Fault, ...], seconds: float) -> Observation:
    """Run the islands for so many seconds with these faults, and return what was seen."""
    root.mkdir(parents=True)
    file = write_config(config, root)
    most = PlanConfig(config.seed, config.islands, seconds).most
    with open_network(config.backend, root, most) as network:
        operator = Operator(root, file, network, config.islands)
        with closing(operator):
            operator.begin()
            operator.inflict(faults, seconds)
            operator.come_together()
            operator.end()
    _read_logs(operator.survivors, operator.seen)
    return operator.seen


def write_config(config: SoakConfig, root: Path) -> Path:
    """Write the run's configuration, and a text to train on: a model so small that many islands fit on two cores."""
    text, path = root / "words.txt", root / "run.yaml"
    text.write_bytes(random.Random(config.seed).randbytes(TEXT_BYTES // 2).hex().encode())
    tree: dict[str, Any] = {
        "run": "soak",
        "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"source": SOURCE, "path": str(text), "sequence": 16},
        "inner": {"lr": 1e-3, "warmup": 2, "steps": 10_000_000, "schedule": "constant"},
        "sync": {"every": 20},
        "elastic": {
            "min_islands": MIN_ISLANDS, "grace_s": GRACE_S,
            "partition": config.partition,
        },
        "checkpoint": {"dir": str(root / "island-1")},
    }  # fmt: skip
    for key, value in (own.split("=") for own in OWN):
        section, _, leaf = key.partition(".")
        tree.setdefault(section, {})[leaf] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def _merges(config: SoakConfig) -> bool:
    return config.partition == "merge"


def _read_logs(logs: list[Path], seen: Observation) -> None:
    """Read what the survivors' logs hold: the final chain's end, the ledger, and states of the last common round."""
    state = newest_state(furthest(logs))
    seen.head, seen.samples_twice = state.head.digest, size(state.ledger.overlaps)
    common = min(newest_state(log).head.round for log in logs)
    digests = set()
    for log in logs:
        try:
            each, vectors = state_of(log, common)
        except SaveError as error:
            seen.crashes.append((seen.end_s, str(error)))
            return
        digests.add((each.head.digest, vectors_digest(vectors)))
    seen.digests_equal = len(digests) == 1
