"""Declare `diloco plan`: what a CONFIG will do on these links; without one, Gbit/s by the published model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.shared import Json, MaxDown, MaxUp, Overrides, parse_option
from diloco.errors import ConfigError
from diloco.units import parse_share

TARGETS = "50%,80%,90%,95%,99%"
TARGET = "95%"
ISLANDS = 2  # where neither the command nor the configuration says how many


def plan(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML file.", show_default=False)
    ] = None,
    set_: Overrides = None,
    islands: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of islands that take part (default 2).")
    ] = None,
    link: Annotated[str | None, typer.Option(help="Rate and one-way delay of each island: 1gbit,40ms")] = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    accelerator: Annotated[str | None, typer.Option(help="h100, h200, a100, 4090, cpu, …")] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Instead of --accelerator: a file with the JSON of bench speed or bench codec. Repeatable."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Utilisation to reach (default 95%), or several: 90%,95%")] = None,
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
    bits: Annotated[str | None, typer.Option(help="Without CONFIG: bits sent for each parameter (default 16).")] = None,
) -> None:
    """Predict what a slow network will cost.

    With a CONFIG: seconds, bytes, utilisation and memory, and the setting that suits these links. Without
    --link: the rate that is needed. Without a CONFIG: Gbit/s by the model of the Streaming DiLoCo paper, from --layers,
    --step-time and --params.
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
        from diloco.cli.planning import answer_as_published

        answer_as_published(published, parse_targets(target or TARGETS), as_json=json)
        return
    refuse(published, "is for a plan without CONFIG: leave it out, or change keys by --set")
    from diloco.cli.planning import answer, line_of, machine_of
    from diloco.config.file import load_config

    loaded = load_config(config, set_ or [])
    targets, islands = parse_targets(target or TARGET), islands or max(ISLANDS, loaded.elastic.start_islands)
    line, machine = line_of(link, max_up, max_down), machine_of(loaded, accelerator, profile or [])
    answer(loaded, machine, line, islands, targets, as_json=json)


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise ConfigError for the first of these options that was given; `why` completes the message."""
    for option, value in options.items():
        if value not in (None, []):
            raise ConfigError(f"{option} {why}")


def parse_targets(text: str) -> tuple[float, ...]:
    """Parse shares of the time, separated by commas, such as `90%,95%`."""
    return tuple(parse_option("--target", part.strip(), parse_share) for part in text.split(","))
