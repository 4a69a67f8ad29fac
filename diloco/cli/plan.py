"""`diloco plan`: of a CONFIG, what it will do on these links; without one, Gbit/s by the published model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from diloco.config.file import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.model.accelerators import CPU, accelerator_named, called
from diloco.plan.plan import NO_LINE, Machine, Plan, make_plan
from diloco.plan.predict import Line
from diloco.plan.profiles import read_profiles
from diloco.plan.utilisation import METHODS, Training, bandwidth_for
from diloco.units import parse_count, parse_duration, parse_link, parse_rate, parse_share

T = TypeVar("T")

TARGETS = "50%,80%,90%,95%,99%"
TARGET = "95%"
USUAL = "h100"
MAX_LAYERS = 10_000
MAX_BITS = 64


@dataclass(frozen=True)
class Bare:
    """As written on the command line; None: not given."""

    layers: str | None
    step_time: str | None
    params: str | None
    every: str | None
    method: str | None
    bits: str | None

    def options(self) -> list[str]:
        return [f"--{field.name.replace('_', '-')}" for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True)
class Links:
    """As written on the command line; None: not given."""

    islands: int | None
    link: str | None
    max_up: str | None
    max_down: str | None
    accelerator: str | None
    profile: Sequence[Path]

    def options(self) -> list[str]:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, [])]
        return [f"--{name.replace('_', '-')}" for name in given]


def plan_command(
    config: Path | None, overrides: Sequence[str], bare: Bare, links: Links, *, target: str | None, as_json: bool
) -> None:
    if config is None and not bare.options():
        raise ConfigError("plan: give a CONFIG, or --layers, --step-time and --params")
    if config is None:
        if misplaced := [*links.options(), *(["--set"] if overrides else [])]:
            raise ConfigError(f"{misplaced[0]} belongs to a CONFIG: name one, or leave it out")
        answer_bare(bare, _targets(target or TARGETS), as_json=as_json)
        return
    if misplaced := bare.options():
        raise ConfigError(f"{misplaced[0]} is for a plan without CONFIG: leave it out, or change keys by --set")
    loaded = load_config(config, overrides)
    if links.link is None and target is None:
        raise ConfigError("--link is missing: give --link 1gbit,40ms, or ask which one is needed by --target 95%")
    from diloco.cli.plan_view import show

    show(_plan(loaded, links, _targets(target or TARGET)), as_json=as_json)


def _plan(config: Config, links: Links, targets: tuple[float, ...]) -> Plan:
    if links.islands is None:
        raise ConfigError("--islands is missing: say how many will take part")
    line, machine = _line(links), _machine(config, links)
    from diloco.plan.workload import workload_of

    return make_plan(config, workload_of(config), machine, islands=links.islands, line=line, targets=targets)


def _line(links: Links) -> Line:
    if links.link is None:
        if links.max_up or links.max_down:
            raise ConfigError("--max-up and --max-down are caps on a link: give --link, too")
        return NO_LINE
    bits_per_s, delay_s = parsed("--link", links.link, parse_link)
    up, down = (
        min(bits_per_s, _positive(option, text, parse_rate)) if text else bits_per_s
        for option, text in (("--max-up", links.max_up), ("--max-down", links.max_down))
    )
    return Line(up, down, delay_s)


def _machine(config: Config, links: Links) -> Machine:
    """What was measured counts; else a name; else what the configuration says, and for a GPU the most usual one."""
    profile = read_profiles(links.profile)
    if profile.flops is not None and links.accelerator:
        raise ConfigError("--accelerator and a --profile of bench speed say the same thing twice: leave one out")
    name = profile.device or links.accelerator or (CPU if config.island.device == "cpu" else USUAL)
    dtype = (
        ("fp32" if name.lower().startswith(CPU) else "bf16") if config.island.dtype == "auto" else config.island.dtype
    )
    known = called(name) if profile.device else accelerator_named(name)
    return Machine(name, dtype, profile, known)


def answer_bare(bare: Bare, targets: tuple[float, ...], *, as_json: bool) -> None:
    training = _training(bare)
    found = bandwidth_for(training, targets)
    if as_json:
        print(json.dumps({"gbit_per_s": [rate and float(f"{rate:.6g}") for rate in found]}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "utilisation", "Gbit/s", title=f"{training.method}, every {training.every} steps", title_justify="left"
    )
    for target, rate in zip(targets, found, strict=True):
        table.add_row(f"{100 * target:.4g} %", f"{rate:.1f}" if rate else "more than 1000")
    console = Console(highlight=False)
    console.print(table)
    console.print("by the published model, on its grid of 20.7 % steps; with a CONFIG our own trainer is planned for")


def _training(bare: Bare) -> Training:
    missing = [name for name in ("layers", "step_time", "params") if getattr(bare, name) is None]
    if missing:
        option = missing[0].replace("_", "-")
        raise ConfigError(f"--{option} is missing: without a CONFIG give --layers, --step-time and --params")
    method = bare.method or "overlap"
    if method not in METHODS:
        raise ConfigError(f"--method {method}: there are {', '.join(METHODS)}")
    return Training(
        layers=_whole("--layers", bare.layers, most=MAX_LAYERS),
        step_s=_positive("--step-time", bare.step_time, parse_duration),
        params=_whole("--params", bare.params),
        every=_whole("--every", bare.every or "100"),
        method=method,
        bits=_bits(bare.bits or "16"),
    )


def _bits(text: str) -> float:
    bits = _positive("--bits", text, float)
    if not bits <= MAX_BITS:
        raise ConfigError(f"--bits {text}: of a parameter, at most {MAX_BITS}")
    return bits


def _whole(option: str, text: str | None, *, most: int | None = None) -> int:
    number = parsed(option, text, parse_count)
    if number < 1 or (most is not None and number > most):
        raise ConfigError(f"{option} {text}: write a whole number from 1" + (f" to {most}" if most else " up"))
    return number


def _positive(option: str, text: str | None, parse: Callable[[str], float]) -> float:
    number = parsed(option, text, parse)
    if not number > 0:
        raise ConfigError(f"{option} {text}: must be above 0")
    return number


def parsed(option: str, text: str | None, parse: Callable[[str], T]) -> T:
    assert text is not None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _targets(text: str) -> tuple[float, ...]:
    return tuple(parsed("--target", part.strip(), parse_share) for part in text.split(","))
