"""Measure what low communication costs in quality: DiLoCo's variants against data parallel, on the same tokens.

Data parallel is one island with the global batch: what a perfect all-reduce at every step would give. The variants are
real islands in processes of their own over real transports, each with its part of the batch. Seeds, start and samples
are the same for all; the figure is the validation loss of the outer parameters at the end.
"""

import itertools
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco.bench.processes import BenchPeer, LinkRate, run_peers
from diloco.bench.report import Check, Report
from diloco.bench.team import train_alone, train_together
from diloco.comm.codec.registry import CODECS, codec_named, warm_up
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.errors import ConfigError, DilocoError

WAIT_S = 3600.0  # for the slowest of the others
ALONE, PARALLEL, SINGLE = "one island", "data parallel", "M=1"
COMBINED: dict[str, dict[str, Any]] = {
    "streaming fp4": {"codec": "fp4", "fragments": 3, "delay": 3, "apply": "mix"},
    "streaming int4": {"codec": "int4", "fragments": 3, "delay": 3, "apply": "mix"},
    "eager int8": {"codec": "int8", "apply": "eager"},
}
DEFAULT = ("fp32", "int8", "int4", "streaming fp4")
LIMITS = (  # check, variant, against, at most
    ("quality.int8_over_dp", "int8", PARALLEL, 1.03),
    ("quality.stream_fp4_over_dp", "streaming fp4", PARALLEL, 1.04),
    ("quality.int4_over_fp32", "int4", "fp32", 1.003),
    ("quality.int8_over_one_island", "int8", ALONE, 1.0),
    ("quality.stream_fp4_over_one_island", "streaming fp4", ALONE, 1.0),
)
# enough parameters that signs of life do not count, so little to compute that they are soon trained
BYTES_MODEL = {"preset": "tiny", "blocks": 4, "width": 192, "heads": 4, "feed_forward": 512}
BYTES_EVERY, BYTES_ROUNDS = 100, 2
BYTES_LIMITS = (("quality.byte_reduction_4bit", "int4", 370.0), ("quality.byte_reduction_sparse", "sparse", 2000.0))


@dataclass(frozen=True)
class QualityConfig:
    """Describe the runs to compare: sections of their configuration, sizes, seeds and variants."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    island: Mapping[str, Any]
    inner: Mapping[str, Any]
    outer: Mapping[str, Any]
    islands: int
    batch: int  # of all islands together
    every: int
    steps: int
    seeds: int
    variants: tuple[str, ...]
    baselines: bool
    log_every: int
    validation: int = 1024  # samples

    def config(self, seed: int, *, batch: int, sync: Mapping[str, Any], outer: Mapping[str, Any]) -> Config:
        """Make one run's configuration; rounds wait for all islands, and validation comes at half and at the end."""
        evaluate_every = max(1, self.steps // self.every // 2)  # the figure is that of the end, one before it is drawn
        return parse_config({
            "run": "quality", "seed": seed, "model": dict(self.model), "data": dict(self.data),
            "island": {**self.island, "batch": batch}, "inner": {**self.inner, "steps": self.steps},
            "sync": {"every": self.every, **sync}, "outer": dict(outer),
            "elastic": {"min_islands": self.islands, "straggler": 100.0, "silence_s": 30.0},
            "evaluate": {"every": evaluate_every, "samples": self.validation}, "log": {"every": self.log_every},
            "checkpoint": {"snapshot_every": 1000000},
        })  # fmt: skip


def measure(setting: QualityConfig, *, plot: Path | None = None, bytes_too: bool = True) -> Report:
    """Train all variants and baselines; `bytes_too` also counts what is sent, on a small model of its own."""
    if unknown := [name for name in setting.variants if name not in variants()]:
        raise ConfigError(f"--variant {unknown[0]}: there are {', '.join(variants())}")
    if setting.batch % setting.islands:
        raise ConfigError(f"--batch {setting.batch} cannot be divided by {setting.islands} islands")
    runs: dict[str, list[Any]] = {}
    for name, row in run_peers(setting.islands, _work, setting, bytes_too)[0]:
        runs.setdefault(name, []).append(row)
    sent = runs.pop("bytes", [{}])[0]
    checks = [
        Check(name, statistics.mean(_ratios(runs[variant], runs[against])), limit, "lower")
        for name, variant, against, limit in LIMITS
        if variant in runs and against in runs
    ]
    checks += [Check(name, sent[codec], limit, "higher") for name, codec, limit in BYTES_LIMITS if codec in sent]
    figures = {"islands": setting.islands, "every": setting.every, "steps": setting.steps, "table": _table(runs)}
    if plot is not None:
        draw(runs, setting, plot)
        figures["plot"] = str(plot)
    return Report(checks, figures | {"byte_reduction": sent})


def variants() -> dict[str, dict[str, Any]]:
    """Return the `sync` settings of each variant: one island alone, each codec, some with streaming or eager."""
    return {SINGLE: {}} | {name: {"codec": name} for name in CODECS} | COMBINED


def _work(peer: BenchPeer, setting: QualityConfig, bytes_too: bool) -> list[tuple[str, Any]]:
    """Train all runs as one of the islands, in one worker."""
    found = _runs_alone(peer, setting)
    among_others = [variant for variant in setting.variants if variant != SINGLE]
    for seed, variant in itertools.product(range(setting.seeds), among_others):
        sync = variants()[variant]
        warm_up(sync["codec"])
        outer = codec_named(sync["codec"]).outer or setting.outer
        config = setting.config(seed, batch=setting.batch // setting.islands, sync=sync, outer=outer)
        row = _row(peer, setting, train_together(peer, config, LinkRate()))
        found.append((variant, row))
        if peer.index == 0:
            _report(seed, variant, row)
    if bytes_too:
        found.append(("bytes", _byte_reductions(peer, setting)))
    return found


def _runs_alone(peer: BenchPeer, setting: QualityConfig) -> list[tuple[str, Any]]:
    """Deal out the runs that need no other island to the workers, long runs first."""
    plain: dict[str, Any] = {"outer": {"optimizer": "sgd", "lr": 1.0}}  # changes nothing
    kinds = [(PARALLEL, setting.batch, plain), (ALONE, setting.batch // setting.islands, plain)]
    kinds = kinds if setting.baselines else []
    if SINGLE in setting.variants:  # DiLoCo with nobody else
        kinds.insert(1, (SINGLE, setting.batch, {"outer": setting.outer}))
    jobs = [(seed, *kind) for kind in kinds for seed in range(setting.seeds)]
    mine: dict[int, dict[str, Any]] = {}
    for number in range(peer.index, len(jobs), peer.count):
        seed, name, batch, options = jobs[number]
        losses = train_alone(setting.config(seed, batch=batch, sync={"every": setting.every}, **options))["losses"]
        mine[number] = {"loss": losses[max(losses)], "losses": losses}
        _report(seed, name, mine[number])
    rows = {number: row for part in peer.exchange(mine, WAIT_S) for number, row in part.items()}
    return [(name, rows[number]) for number, (_, name, *_) in enumerate(jobs)]


def _report(seed: int, name: str, row: dict[str, Any]) -> None:
    """Print how far a long bench is, to standard error."""
    print(f"seed {seed}: {name}: validation loss {row['loss']:.4f}", file=sys.stderr, flush=True)


def _row(peer: BenchPeer, setting: QualityConfig, row: dict[str, Any]) -> dict[str, Any]:
    """Combine what the islands of one run saw, and require that all hold the same bits."""
    rows = peer.exchange(row, WAIT_S)
    if len({other["digest"] for other in rows}) != 1:
        raise DilocoError("the islands do not hold the same bits")
    sent = statistics.mean(other["bytes_sent"] for other in rows)
    losses = {step: loss for other in rows for step, loss in other["losses"].items()}  # whoever was first looked
    in_parallel = 2 * (setting.islands - 1) / setting.islands * 2 * row["parameters"] * row["steps"]  # bytes, in bf16
    return {
        "loss": losses[setting.steps], "losses": losses, "bytes": sent,
        "full_rounds": row["full_rounds"], "rounds": row["rounds"],
        "reduction": in_parallel / sent,
        "utilisation": 1 - row["waited_s"] / row["wall_s"],
    }  # fmt: skip


def _byte_reductions(peer: BenchPeer, setting: QualityConfig) -> dict[str, float]:
    """Return how many times fewer bytes an island sends than data parallel, control messages included."""
    found = {}
    small = replace(
        setting, model=BYTES_MODEL, data={"sequence": 16}, inner={"warmup": 30}, batch=setting.islands,
        every=BYTES_EVERY, steps=BYTES_EVERY * BYTES_ROUNDS, validation=4, log_every=1,
    )  # fmt: skip
    for _, codec, _ in BYTES_LIMITS:
        warm_up(codec)
        config = small.config(0, batch=1, sync={"codec": codec}, outer=codec_named(codec).outer or small.outer)
        found[codec] = _row(peer, small, train_together(peer, config, LinkRate()))["reduction"]
    return found


def _ratios(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[float]:
    """Return the ratios of losses of the same seed."""
    return [one["loss"] / other["loss"] for one, other in zip(runs, others, strict=True)]


def _table(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the means over seeds for each variant, and the deviation of its loss."""
    rows: dict[str, dict[str, Any]] = {}
    for name, seeds in runs.items():
        losses = [seed["loss"] for seed in seeds]
        over = statistics.mean(_ratios(seeds, runs[PARALLEL])) - 1 if PARALLEL in runs else None
        rows[name] = {
            "loss": statistics.mean(losses),
            "deviation": statistics.stdev(losses) if len(losses) > 1 else 0.0,
            "over data parallel": "" if over is None else f"{100 * over:+.2f} %",
        }
        for key in ("bytes", "reduction", "utilisation"):
            if key in seeds[0]:
                rows[name][key] = statistics.mean(seed[key] for seed in seeds)
    return rows


def draw(runs: Mapping[str, list[dict[str, Any]]], setting: QualityConfig, path: Path) -> None:
    """Draw the mean validation loss of each variant over inner steps, as a PNG."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'diloco[plots]', or leave it out") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, seeds in runs.items():
        steps = sorted(set.intersection(*(set(seed["losses"]) for seed in seeds)) - {0})
        means = [statistics.mean(seed["losses"][step] for seed in seeds) for step in steps]
        axes.plot(steps, means, label=name, marker=".")
    axes.set(xlabel="inner steps", ylabel="validation loss of the outer parameters", yscale="log")
    axes.set_title(f"{setting.islands} islands, a round every {setting.every} steps, {setting.seeds} seeds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
