"""`diloco plan`: of a CONFIG, what it will do on these links; without one, Gbit/s by the published model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import Json, MaxDown, MaxUp, Overrides, parse_option, parse_positive
from diloco.errors import ConfigError
from diloco.units import parse_count, parse_duration, parse_link, parse_rate, parse_share

if TYPE_CHECKING:
    from diloco.config.schema import Config
    from diloco.plan.plan import Machine
    from diloco.plan.predict import Line

TARGETS = "50%,80%,90%,95%,99%"
TARGET = "95%"
USUAL = "h100"
MAX_LAYERS = 10_000
MAX_BITS = 64


def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML file.", show_default=False)
    ] = None,
    set_: Overrides = None,
    islands: Annotated[int | None, typer.Option(min=1, max=1024, help="Number of islands that take part.")] = None,
    link: Annotated[str | None, typer.Option(help="Rate and one-way delay of each island: 1gbit,40ms")] = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    accelerator: Annotated[str | None, typer.Option(help="h100, h200, a100, 4090, cpu, …")] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Instead of --accelerator: the JSON of bench speed, and of bench codec. Can be repeated."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Utilisation to reach, with commas: 95%")] = None,
    json: Json = False,
    layers: Annotated[str | None, typer.Option(help="Without CONFIG: number of transformer blocks.")] = None,
    step_time: Annotated[str | None, typer.Option(help="Without CONFIG: duration of a step: 0.1s")] = None,
    params: Annotated[str | None, typer.Option(help="Without CONFIG: number of parameters: 1B")] = None,
    every: Annotated[
        str | None, typer.Option(help="Without CONFIG: steps between two synchronisations (default 100).")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Without CONFIG: data-parallel, diloco, streaming or overlap.")
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Without CONFIG: bits of a parameter on its way (default 16).")
    ] = None,
) -> None:
    """Predict what a slow network will cost.

    With a CONFIG: seconds, bytes, utilisation and memory, and the setting that suits these links; with --target and
    no --link, the rate that is needed. Without CONFIG: Gbit/s by the model of the Streaming DiLoCo paper, from
    --layers, --step-time and --params.
    """
    published = {
        "--layers": layers, "--step-time": step_time, "--params": params, "--every": every, "--method": method,
        "--bits": bits,
    }  # fmt: skip
    ours = {
        "--islands": islands, "--link": link, "--max-up": max_up, "--max-down": max_down,
        "--accelerator": accelerator, "--profile": profile, "--set": set_,
    }  # fmt: skip
    if config is None:
        if not any(published.values()):
            raise ConfigError("plan: give a CONFIG, or --layers, --step-time and --params")
        refuse(ours, "belongs to a CONFIG: name one, or leave it out")
        answer_as_published(published, parse_targets(target or TARGETS), as_json=json)
        return
    refuse(published, "is for a plan without CONFIG: leave it out, or change keys by --set")
    from diloco.cli.plan_view import show
    from diloco.config.file import load_config
    from diloco.plan.plan import make_plan

    loaded = load_config(config, set_ or [])
    if link is None and target is None:
        raise ConfigError("--link is missing: give --link 1gbit,40ms, or ask which one is needed by --target 95%")
    targets = parse_targets(target or TARGET)
    if islands is None:
        raise ConfigError("--islands is missing: say how many will take part")
    line, machine = line_of(link, max_up, max_down), machine_of(loaded, accelerator, profile or [])
    from diloco.plan.workload import workload_of

    work = workload_of(loaded)
    show(make_plan(loaded, work, machine, islands=islands, line=line, targets=targets), as_json=json)


def refuse(options: Mapping[str, object], why: str) -> None:
    for option, value in options.items():
        if value not in (None, []):
            raise ConfigError(f"{option} {why}")


def line_of(link: str | None, max_up: str | None, max_down: str | None) -> "Line":
    from diloco.plan.plan import NO_LINE
    from diloco.plan.predict import Line

    if link is None:
        if max_up or max_down:
            raise ConfigError("--max-up and --max-down are caps on a link: give --link, too")
        return NO_LINE
    bits_per_s, delay_s = parse_option("--link", link, parse_link)
    up, down = (
        min(bits_per_s, parse_positive(option, text, parse_rate)) if text else bits_per_s
        for option, text in (("--max-up", max_up), ("--max-down", max_down))
    )
    return Line(up, down, delay_s)


def machine_of(config: "Config", accelerator: str | None, profiles: Sequence[Path]) -> "Machine":
    """What was measured counts; else a name; else what the configuration says, and for a GPU the most usual one."""
    from diloco.model.accelerators import CPU, accelerator_named, called
    from diloco.plan.plan import Machine
    from diloco.plan.profiles import read_profiles

    profile, dtype = read_profiles(profiles), config.island.dtype
    if profile.flops is not None and accelerator:
        raise ConfigError("--accelerator and a --profile of bench speed say the same thing twice: leave one out")
    name = profile.device or accelerator or (CPU if config.island.device == "cpu" else USUAL)
    if dtype == "auto":
        dtype = "fp32" if name.lower().startswith(CPU) else "bf16"
    return Machine(name, dtype, profile, called(name) if profile.device else accelerator_named(name))


def answer_as_published(given: Mapping[str, str | None], targets: tuple[float, ...], *, as_json: bool) -> None:
    import json

    from rich.console import Console
    from rich.table import Table

    from diloco.plan.utilisation import METHODS, Training, bandwidth_for

    option = {"--every": "100", "--method": "overlap", "--bits": "16"}
    option |= {name: text for name, text in given.items() if text}
    if missing := [name for name in given if name not in option]:
        raise ConfigError(f"{missing[0]} is missing: without a CONFIG give --layers, --step-time and --params")
    if option["--method"] not in METHODS:
        raise ConfigError(f"--method {option['--method']}: there are {', '.join(METHODS)}")
    bits = parse_positive("--bits", option["--bits"], float)
    if not bits <= MAX_BITS:
        raise ConfigError(f"--bits {option['--bits']}: of a parameter, at most {MAX_BITS}")
    training = Training(
        layers=parse_whole("--layers", option["--layers"], most=MAX_LAYERS),
        step_s=parse_positive("--step-time", option["--step-time"], parse_duration),
        params=parse_whole("--params", option["--params"]),
        every=parse_whole("--every", option["--every"]),
        method=option["--method"],
        bits=bits,
    )
    found = bandwidth_for(training, targets)
    if as_json:
        print(json.dumps({"gbit_per_s": [rate and float(f"{rate:.6g}") for rate in found]}))
        return
    title = f"{training.method}, every {training.every} steps"
    table = Table("utilisation", "Gbit/s", title=title, title_justify="left")
    for target, rate in zip(targets, found, strict=True):
        table.add_row(f"{100 * target:.4g} %", f"{rate:.1f}" if rate else "more than 1000")
    console = Console(highlight=False)
    console.print(table)
    console.print("by the published model, on its grid of 20.7 % steps; with a CONFIG our own trainer is planned for")


def parse_whole(option: str, text: str, *, most: int | None = None) -> int:
    number = parse_option(option, text, parse_count)
    if number < 1 or (most is not None and number > most):
        raise ConfigError(f"{option} {text}: write a whole number from 1" + (f" to {most}" if most else " up"))
    return number


def parse_targets(text: str) -> tuple[float, ...]:
    return tuple(parse_option("--target", part.strip(), parse_share) for part in text.split(","))
