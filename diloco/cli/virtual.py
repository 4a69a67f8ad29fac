"""Run `diloco simulate virtual`: thousands of islands as times and messages."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from rich.table import Table

from diloco.cli.shared import say
from diloco.comm.codec.registry import CODECS
from diloco.comm.reduce.spans import MAX_MEMBERS
from diloco.errors import ConfigError
from diloco.plan.plan import percent
from diloco.report.console import table_console
from diloco.simulate.virtual.check import Violation
from diloco.simulate.virtual.modelled import VirtualConfig
from diloco.simulate.virtual.outcome import Outcome, ScalingRow, rows, simulate
from diloco.units import counted, format_duration, format_rate, format_size

MAX_ISLANDS = 10_000


def simulate_virtual(setting: VirtualConfig, *, as_json: bool) -> None:
    """Simulate and print the outcome; exit with 0 if every invariant held and rounds did not stop."""
    if not 2 <= setting.islands <= MAX_ISLANDS:
        raise ConfigError(f"--islands {setting.islands}: in virtual time 2 to {MAX_ISLANDS}")
    if setting.two_level is False and setting.islands > MAX_MEMBERS:
        raise ConfigError(f"--one-level --islands {setting.islands}: one butterfly has at most {MAX_MEMBERS} members")
    if setting.codec not in CODECS:
        raise ConfigError(f"--codec {setting.codec}: choose one of {', '.join(CODECS)}")
    try:
        outcome = simulate(setting)
    except Violation as violation:
        print(f"violated: {violation}", file=sys.stderr)
        sys.exit(1)
    table = rows(setting)
    if as_json:
        print(json.dumps({**asdict(outcome), "computed": [_plain(row) for row in table]}))
    else:
        say(*told(setting, outcome))
        table_console().print(_table(table))
    if outcome.standstill:
        sys.exit(1)


def told(setting: VirtualConfig, outcome: Outcome) -> Iterator[str]:
    """Describe an outcome in lines, with a warning where `--silence` is too short for so many islands."""
    line, way = setting.line, "two levels" if setting.reduces_in_two_levels(setting.islands) else "one butterfly"
    yield (
        f"{counted(outcome.islands, 'island')} at {format_rate(line.up_bits_per_s)}, {1000 * line.delay_s:g} ms, "
        f"{setting.values / 1e6:g}M values as {setting.codec} in {way}; {format_duration(outcome.seconds)} of virtual "
        f"time in {format_duration(outcome.wall_s)}"
    )
    if outcome.standstill:
        yield f"  I4 does not hold: {outcome.standstill}"
    yield (
        f"  {counted(outcome.rounds, 'round')}, one every {format_duration(outcome.period_s)}, "
        f"of which the all-reduce takes {format_duration(outcome.reduce_s)}; {outcome.failures} failures ended "
        f"{outcome.failed_attempts} attempts"
    )
    yield (
        f"  islands computed {percent(outcome.utilisation)} of the time; {percent(outcome.contributors)} of them were "
        f"in a round; the longest wait for one was {format_duration(outcome.longest_wait_s)}"
    )
    holding = "the other invariants" if outcome.standstill else "invariants"
    yield (
        f"  {holding} hold, {outcome.branches} forks; {percent(outcome.at_newest_head)} are at the newest head now, "
        f"the last is {outcome.furthest_behind} behind; {outcome.wrongly_lost} were thought lost and were not"
    )
    (here,) = rows(setting, [setting.islands])
    if 2 * here.begin_s > setting.silence_s:
        yield (
            f"  telling all islands of a round takes the coordinator {format_duration(here.begin_s)}: "
            f"--silence {setting.silence_s:g}s is too short, or --link too slow"
        )
    yield (
        f"  each sent {format_size(outcome.bytes_a_round)} a round over {outcome.connections} connections; the busiest "
        f"sent {format_rate(8 * outcome.control_bytes_s)} of messages, and took in {outcome.messages_s:.0f} a second "
        f"({percent(outcome.coordinator_busy)} of a core)"
    )


def _plain(row: ScalingRow) -> dict[str, object]:
    """Convert a row to what --json prints."""
    return {
        "islands": row.islands, "flat_connections": row.flat and row.flat.connections,
        "flat_reduce_s": row.flat and row.flat_s, "two_level_connections": row.two_level.connections,
        "two_level_reduce_s": row.two_level_s, "begin_s": row.begin_s, "heartbeats_s": row.heartbeats_s,
        "front_heartbeats_s": row.front_heartbeats_s,
    }  # fmt: skip


def _short(count: float) -> str:
    """Format a count, in millions where it is large."""
    return f"{count / 1e6:.3g}M" if count >= 1e6 else f"{count:,.0f}"


def _table(found: list[ScalingRow]) -> Table:
    """Build the table of other numbers of islands, which is computed, not simulated."""
    table = Table(
        "islands", "flat", "streams", "two levels", "streams", "begin", "heartbeats/s", "by a front",
        title="computed: where one butterfly, one coordinator and flat heartbeats stop scaling",
    )  # fmt: skip
    for row in found:
        whole = (format_duration(row.flat_s), str(row.flat.connections)) if row.flat else ("refused", "")
        table.add_row(
            str(row.islands), *whole, format_duration(row.two_level_s), str(row.two_level.connections),
            format_duration(row.begin_s), _short(row.heartbeats_s), _short(row.front_heartbeats_s),
        )  # fmt: skip
    return table
