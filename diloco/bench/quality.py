"""What low communication costs in quality: DiLoCo's variants against data parallel, on the same tokens.

Data parallel is one island with the global batch: what a perfect all-reduce at every step would give. The variants are
real islands in processes of their own over real transports, each with its part of the batch. Same seeds, same start,
same samples over all; the figure is the validation loss of the outer parameters at the end.
"""

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.bench.peers import BenchPeer, Line, run_peers
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
class Setting:
    model: Mapping[str, Any] = field(default_factory=lambda: {"preset": "tiny"})
    data: Mapping[str, Any] = field(default_factory=lambda: {"sequence": 32})
    island: Mapping[str, Any] = field(default_factory=lambda: {"device": "cpu"})
    inner: Mapping[str, Any] = field(default_factory=lambda: {"lr": 4e-4, "warmup": 30})
    outer: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.7, "momentum": 0.7})
    islands: int = 4
    batch: int = 16  # of all islands together
    every: int = 30
    steps: int = 600
    seeds: int = 3
    validation: int = 1024  # samples
    variants: tuple[str, ...] = DEFAULT
    baselines: bool = True
    log_every: int = 1

    @property
    def evaluate_every(self) -> int:
        """Rounds: the figure is that of the end, one before it makes the plot."""
        return max(1, self.steps // self.every // 2)

    def config(self, seed: int, *, batch: int, sync: Mapping[str, Any], outer: Mapping[str, Any]) -> Config:
        return parse_config({
            "run": "quality", "seed": seed, "model": dict(self.model), "data": dict(self.data),
            "island": {**self.island, "batch": batch}, "inner": {**self.inner, "steps": self.steps},
            "sync": {"every": self.every, **sync}, "outer": dict(outer),
            "elastic": {"min_islands": self.islands, "straggler": 100.0, "silence_s": 30.0},
            "evaluate": {"every": self.evaluate_every, "samples": self.validation}, "log": {"every": self.log_every},
            "checkpoint": {"snapshot_every": 1000000},
        })  # fmt: skip


def measure(setting: Setting, *, plot: Path | None = None, bytes_too: bool = True) -> Report:
    if unknown := [name for name in setting.variants if name not in variants()]:
        raise ConfigError(f"--variant {unknown[0]}: there are {', '.join(variants())}")
    if setting.batch % setting.islands:
        raise ConfigError(f"--batch {setting.batch} cannot be divided by {setting.islands} islands")
    runs = _by_name(run_peers(setting.islands, _work, setting, bytes_too)[0])
    sent = runs.pop("bytes", [{}])[0]
    checks = [
        Check(name, _ratio(runs, variant, against), limit, "lower")
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
    """DiLoCo with nobody else, with each codec, and what streaming or eager updates make of some."""
    return {SINGLE: {}} | {name: {"codec": name} for name in CODECS} | COMBINED


def _by_name(rows: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, row in rows:
        found.setdefault(name, []).append(row)
    return found


def _work(peer: BenchPeer, setting: Setting, bytes_too: bool) -> list[tuple[str, Any]]:
    found = _runs_alone(peer, setting)
    among_others = [variant for variant in setting.variants if variant != SINGLE]
    for seed, variant in itertools.product(range(setting.seeds), among_others):
        sync = variants()[variant]
        warm_up(sync["codec"])
        outer = _outer_for(sync["codec"], setting)
        config = setting.config(seed, batch=setting.batch // setting.islands, sync=sync, outer=outer)
        row = _row(peer, setting, train_together(peer, config, Line()))
        found.append((variant, row))
        if peer.index == 0:
            _tell(seed, variant, row)
    if bytes_too:
        found.append(("bytes", _byte_reductions(peer, setting)))
    return found


def _runs_alone(peer: BenchPeer, setting: Setting) -> list[tuple[str, Any]]:
    """What needs nobody else is dealt out to the workers, long runs first."""
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
        _tell(seed, name, mine[number])
    rows = {number: row for part in peer.exchange(mine, WAIT_S) for number, row in part.items()}
    return [(name, rows[number]) for number, (_, name, *_) in enumerate(jobs)]


def _tell(seed: int, name: str, row: dict[str, Any]) -> None:
    """A long bench says how far it is."""
    print(f"seed {seed}: {name}: validation loss {row['loss']:.4f}", file=sys.stderr, flush=True)


def _outer_for(codec: str, setting: Setting) -> Mapping[str, Any]:
    return codec_named(codec).outer or setting.outer


def _row(peer: BenchPeer, setting: Setting, row: dict[str, Any]) -> dict[str, Any]:
    rows = peer.exchange(row, WAIT_S)
    if len({other["digest"] for other in rows}) != 1:
        raise DilocoError("the islands do not hold the same bits")
    sent = statistics.mean(other["bytes_sent"] for other in rows)
    losses = {step: loss for other in rows for step, loss in other["losses"].items()}  # whoever was first looked
    return {
        "loss": losses[setting.steps], "losses": losses, "bytes": sent,
        "full_rounds": row["full_rounds"], "rounds": row["rounds"],
        "reduction": all_reduce_bytes(row["parameters"], setting.islands, row["steps"]) / sent,
        "utilisation": 1 - row["waited_s"] / row["wall_s"],
    }  # fmt: skip


def all_reduce_bytes(parameters: int, islands: int, steps: int) -> float:
    """What data parallel in bf16 sends, each of them."""
    return 2 * (islands - 1) / islands * 2 * parameters * steps


def _byte_reductions(peer: BenchPeer, setting: Setting) -> dict[str, float]:
    """All bytes that an island sends in training, control messages included."""
    found = {}
    for _, codec, _ in BYTES_LIMITS:
        small = Setting(
            model=BYTES_MODEL, data={"sequence": 16}, island=setting.island, islands=setting.islands,
            batch=setting.islands, every=BYTES_EVERY, steps=BYTES_EVERY * BYTES_ROUNDS, validation=4,
        )  # fmt: skip
        warm_up(codec)
        config = small.config(0, batch=1, sync={"codec": codec}, outer=_outer_for(codec, small))
        found[codec] = _row(peer, small, train_together(peer, config, Line()))["reduction"]
    return found


def _ratio(runs: Mapping[str, list[dict[str, Any]]], variant: str, against: str) -> float:
    """Of losses of the same seed, then their mean."""
    return statistics.mean(one["loss"] / other["loss"] for one, other in zip(runs[variant], runs[against], strict=True))


def _table(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, seeds in runs.items():
        losses = [seed["loss"] for seed in seeds]
        against = runs.get(PARALLEL, [])
        over = [one["loss"] / other["loss"] - 1 for one, other in zip(seeds, against, strict=False)]
        rows[name] = {
            "loss": statistics.mean(losses),
            "deviation": statistics.stdev(losses) if len(losses) > 1 else 0.0,
            "over data parallel": f"{100 * statistics.mean(over):+.2f} %" if over else "",
        }
        for key in ("bytes", "reduction", "utilisation"):
            if key in seeds[0]:
                rows[name][key] = statistics.mean(seed[key] for seed in seeds)
    return rows


def draw(runs: Mapping[str, list[dict[str, Any]]], setting: Setting, path: Path) -> None:
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
