"""A plan for people and for programs."""

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco.config.schema import SyncConfig
from diloco.plan.plan import NO_LINE, Plan, Row, advice, percent
from diloco.plan.predict import Line
from diloco.plan.search import cost, kind
from diloco.units import format_count, format_duration, format_rate, format_size


def show(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(as_object(plan)))
        return
    console = Console(highlight=False)
    console.print(*_head(plan), sep="\n", soft_wrap=True)
    console.print(_table(plan))
    console.print(_memory(plan), advice(plan), sep="\n", soft_wrap=True)


def as_object(plan: Plan) -> dict[str, Any]:
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
        "memory_bytes": {**asdict(plan.memory), "accelerator": plan.memory.accelerator},
        "why": advice(plan),
    }


def _row_object(plan: Plan, row: Row) -> dict[str, Any]:
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
    situation, work, machine = plan.situation, plan.situation.work, plan.machine
    if machine.profile.flops is not None:
        basis = "measured"
    else:
        assert machine.accelerator is not None
        share = "" if machine.accelerator.mfu == 1 else f"{percent(machine.accelerator.mfu)} MFU "
        basis = f"{share}assumed; better: --profile with the JSON of `diloco bench speed` there"
    return [
        f"{work.name}: {format_count(work.parameters)} parameters, {work.blocks} blocks; a step is "
        f"{format_count(work.tokens_per_step)} tokens on {machine.name} in {_seconds(situation.step_s)} ({basis})",
        f"{situation.islands} islands, {_line(situation.line)}",
    ]


def _line(line: Line) -> str:
    if line == NO_LINE:
        return "no link given: what is needed if nothing is delayed"
    up, down = format_rate(line.up_bits_per_s), format_rate(line.down_bits_per_s)
    both = f"{up} up and down" if up == down else f"{up} up, {down} down"
    return f"{both}, {1000 * line.delay_s:.3g} ms one way"


def _table(plan: Plan) -> Table:
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
    needs = ["no rate" if rate is None else format_rate(rate) for rate in row.needed_bits_per_s]
    if plan.situation.line == NO_LINE:
        return [_short(one.sync), format_size(max(part.sent for part in one.rounds)), *needs]
    figures = [_seconds(one.round_s), percent(one.utilisation), _decimal(one.sent_a_day)]
    return [_short(one.sync), *figures, *needs]


def _short(sync: SyncConfig) -> str:
    parts = [f"every {sync.every}", sync.codec]
    parts += [f"{sync.fragments} fragments"] if sync.fragments > 1 else []
    parts += [f"delay {sync.delay}"] if sync.delay else []
    parts += [sync.apply] if sync.apply != "rebase" else []
    return ", ".join(parts)


def _memory(plan: Plan) -> str:
    memory, accelerator = plan.memory, plan.machine.accelerator
    state = memory.accelerator - memory.activations
    parts = (
        f"parameters, gradients, optimizer {format_size(state)}; activations about {format_size(memory.activations)}"
    )
    text = f"memory: accelerator {format_size(memory.accelerator)} ({parts}), host {format_size(memory.host)}"
    if accelerator is None or memory.accelerator <= accelerator.memory_bytes:
        return text
    has = format_size(accelerator.memory_bytes)
    return f"{text}; an accelerator has {has}: raise island.fsdp or accumulate, or set activation_checkpointing"


def _decimal(size: float) -> str:
    return f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.3g} GB"


def _seconds(seconds: float) -> str:
    if not isfinite(seconds):
        return "for ever"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)
