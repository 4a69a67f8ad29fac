"""Print what `diloco plan` answers, for people and for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from rich.table import Table

from diloco import units
from diloco.cli.shared import parse_option, parse_positive
from diloco.config.schema import Config, SyncConfig
from diloco.errors import ConfigError
from diloco.model.accelerators import CPU, accelerator_named, called
from diloco.plan.plan import NO_LINE, Machine, Plan, Row, advice, make_plan, percent
from diloco.plan.predict import LinkModel
from diloco.plan.profiles import read_profiles
from diloco.plan.search import cost, kind
from diloco.plan.utilisation import METHODS, Training, bandwidth_for
from diloco.report.console import table_console

USUAL = "h100"
MAX_LAYERS = 10_000
MAX_BITS = 64


def line_of(link: str | None, max_up: str | None, max_down: str | None) -> LinkModel:
    """Combine a link with caps on its rates; without a link return NO_LINE."""
    if link is None:
        if max_up or max_down:
            raise ConfigError("--max-up and --max-down are caps on a link: give --link, too")
        return NO_LINE
    bits_per_s, delay_s = parse_option("--link", link, units.parse_link)
    up, down = (
        min(bits_per_s, parse_positive(option, text, units.parse_rate)) if text else bits_per_s
        for option, text in (("--max-up", max_up), ("--max-down", max_down))
    )
    return LinkModel(up, down, delay_s)


def machine_of(config: Config, accelerator: str | None, profiles: Sequence[Path]) -> Machine:
    """Decide what an island computes on.

    What was measured counts; else a name; else what the configuration says, and for a GPU the most usual one.
    """
    profile, dtype = read_profiles(profiles), config.island.dtype
    if profile.flops is not None and accelerator:
        raise ConfigError("--accelerator and a --profile of bench speed say the same thing twice: leave one out")
    name = profile.device or accelerator or (CPU if config.island.device == "cpu" else USUAL)
    if dtype == "auto":
        dtype = "fp32" if name.lower().startswith(CPU) else "bf16"
    return Machine(name, dtype, profile, called(name) if profile.device else accelerator_named(name))


def answer_as_published(given: Mapping[str, str | None], targets: tuple[float, ...], *, as_json: bool) -> None:
    """Print the Gbit/s for each target by the published model. `given` holds options by name, as text."""
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
        step_s=parse_positive("--step-time", option["--step-time"], units.parse_duration),
        params=parse_whole("--params", option["--params"]),
        every=parse_whole("--every", option["--every"]),
        method=option["--method"],
        bits=bits,
    )
    found = bandwidth_for(training, targets)
    if as_json:
        print(json.dumps({"gbit_per_s": [rate and float(f"{rate:.6g}") for rate in found]}))
        return
    title = f"{training.method}, every {units.counted(training.every, 'step')}"
    table = Table("utilisation", "Gbit/s", title=title, title_justify="left")
    for target, rate in zip(targets, found, strict=True):
        table.add_row(f"{100 * target:.4g} %", f"{rate:.1f}" if rate else "more than 1000")
    console = table_console()
    console.print(table)
    console.print("by the published model, on its grid of 20.7 % steps; with a CONFIG our own trainer is planned for")


def parse_whole(option: str, text: str, *, most: int | None = None) -> int:
    """Parse an option as a whole number from 1, up to `most` if there is such a limit."""
    number = parse_option(option, text, units.parse_count)
    if number < 1 or (most is not None and number > most):
        raise ConfigError(f"{option} {text}: write a whole number from 1" + (f" to {most}" if most else " up"))
    return number


def answer(
    config: Config, machine: Machine, line: LinkModel, islands: int, targets: tuple[float, ...], *, as_json: bool
) -> None:
    """Plan for this configuration, and print a table with advice, or one JSON object."""
    from diloco.plan.workload import workload_of  # loads torch: not before all options are found good

    plan = make_plan(config, workload_of(config), machine, islands=islands, line=line, targets=targets)
    if as_json:
        print(json.dumps(as_object(plan)))
        return
    console = table_console()
    console.print(*_head(plan), sep="\n", soft_wrap=True)
    console.print(_table(plan))
    console.print(_memory(plan), advice(plan), sep="\n", soft_wrap=True)


def as_object(plan: Plan) -> dict[str, Any]:
    """Convert a plan to what --json prints; rates are in Gbit/s, memory is in bytes."""
    situation, work = plan.situation, plan.situation.work
    return {
        "model": {"name": work.name, "parameters": work.parameters, "trained": work.trained, "blocks": work.blocks},
        "machine": plan.machine.name,
        "islands": situation.islands,
        "link": asdict(situation.line) if situation.line != NO_LINE else None,
        "step_s": situation.step_s,
        "targets": list(plan.targets),
        "gbit_per_s": [rate and rate / 1e9 for rate in plan.given.needed_bits_per_s],
        "given": _row_object(plan, plan.given),
        "chosen": plan.chosen and _row_object(plan, plan.chosen),
        "others": [_row_object(plan, row) for row in plan.others],
        "data_parallel": {"utilisation": plan.data_parallel if situation.line != NO_LINE else None},
        "memory_bytes": {
            **asdict(plan.memory),
            "accelerator": plan.memory.accelerator,
            "machine": {"host": plan.need.host, "gpu": plan.need.accelerator},
        },
        "why": advice(plan),
    }


def _row_object(plan: Plan, row: Row) -> dict[str, Any]:
    """Convert one setting; without a link its times and its utilisation are left out."""
    one = row.prediction
    keys = ("every", "codec", "fragments", "delay", "apply")
    told = {
        "kind": kind(one.sync), "sync": {key: getattr(one.sync, key) for key in keys},
        "cost": cost(one.sync, one.steps),
        "needed_gbit_per_s": [rate and rate / 1e9 for rate in row.needed_bits_per_s],
        "bytes_a_phase": sum(part.sent for part in one.rounds),
    }  # fmt: skip
    if plan.situation.line == NO_LINE:
        return told
    return told | {
        "step_s": one.step_s, "round_s": one.round_s, "rounds": [asdict(part) for part in one.rounds],
        "phase_s": one.phase_s, "waited_s": one.waited_s, "utilisation": one.utilisation,
        "sent_bytes_a_day": one.sent_a_day, "received_bytes_a_day": one.received_a_day,
    }  # fmt: skip


def _head(plan: Plan) -> list[str]:
    """Format the first lines: the model, a step and where its time comes from, islands and links."""
    situation, work, machine = plan.situation, plan.situation.work, plan.machine
    if machine.profile.flops is not None:
        basis = "measured"
    else:
        assert machine.accelerator is not None
        share = "" if machine.accelerator.mfu == 1 else f"{percent(machine.accelerator.mfu)} MFU "
        basis = f"{share}assumed; better: --profile with the JSON of `diloco bench speed` there"
    tokens = f"{units.format_count(work.tokens_per_step)} tokens on {machine.name}"
    return [
        f"{work.name}: {units.format_count(work.parameters)} parameters, {work.blocks} blocks; a step is "
        f"{tokens} in {_seconds(situation.step_s)} ({basis})",
        f"{units.counted(situation.islands, 'island')}, {_line(situation.line)}",
    ]


def _line(line: LinkModel) -> str:
    if line == NO_LINE:
        return "no link given: what is needed if nothing is delayed"
    up, down = units.format_rate(line.up_bits_per_s), units.format_rate(line.down_bits_per_s)
    both = f"{up} up and down" if up == down else f"{up} up, {down} down"
    return f"{both}, {1000 * line.delay_s:.3g} ms one way"


def _table(plan: Plan) -> Table:
    """Build the table of settings: the given one, the chosen one, the best others, data parallel."""
    needs = [f"needs for {percent(target)}" for target in plan.targets]
    if plan.situation.line == NO_LINE:
        table = Table("", "setting", "sent a round", *needs)
    else:
        table = Table("", "setting", "round", "trains", "sent a day", *needs)
    table.add_row("yours", *_cells(plan, plan.given))
    if plan.chosen is not None:
        table.add_row("chosen", *_cells(plan, plan.chosen))
    for row in plan.others:
        table.add_row("", *_cells(plan, row))
    if plan.situation.line != NO_LINE:
        table.add_row("", "data parallel, computed", "", percent(plan.data_parallel), "")
    return table


def _cells(plan: Plan, row: Row) -> list[str]:
    one = row.prediction
    needs = ["not reachable" if rate is None else units.format_rate(rate) for rate in row.needed_bits_per_s]
    if plan.situation.line == NO_LINE:
        return [_short(one.sync), units.format_size(max(part.sent for part in one.rounds)), *needs]
    sent = one.sent_a_day / 1e9
    volume = f"{sent / 1000:.3g} TB" if sent >= 1000 else f"{sent:.3g} GB"
    return [_short(one.sync), _seconds(one.round_s), percent(one.utilisation), volume, *needs]


def _short(sync: SyncConfig) -> str:
    """Format a setting for the table, without keys that have their default."""
    parts = [f"every {sync.every}", sync.codec]
    parts += [f"{sync.fragments} fragments"] if sync.fragments > 1 else []
    parts += [f"delay {sync.delay}"] if sync.delay else []
    parts += [sync.apply] if sync.apply != "rebase" else []
    return ", ".join(parts)


def _memory(plan: Plan) -> str:
    """Format the memory in one line, with a remedy where it is more than an accelerator has."""
    memory, accelerator, size = plan.memory, plan.machine.accelerator, units.format_size
    state = memory.accelerator - memory.activations
    parts = f"parameters, gradients, optimizer {size(state)}; activations about {size(memory.activations)}"
    need = plan.need
    if need.accelerator is None:
        return f"memory of each machine, for an island on its CPU, saves included: {size(need.host)} ({parts})"
    text = f"memory of each machine, for an island, saves included: GPU {size(need.accelerator)} ({parts}), "
    text += f"host {size(need.host)}"
    if accelerator is None or need.accelerator <= accelerator.memory_bytes:
        return text
    remedy = "raise island.fsdp or accumulate, or set activation_checkpointing"
    return f"{text}; an accelerator has {size(accelerator.memory_bytes)}: {remedy}"


def _seconds(seconds: float) -> str:
    if not isfinite(seconds):
        return "for ever"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else units.format_duration(seconds)
