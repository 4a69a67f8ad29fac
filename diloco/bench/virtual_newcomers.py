"""Let newcomers join in virtual time: every size of model on every link, and one whose link alone is slow.

As in `newcomers.py`, which has three of these cells on real islands. Links, all-reduces and downloads are modelled. Not
modelled is that a download and a round share a donor's uplink.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from statistics import mean
from typing import Any

from diloco.bench.newcomers import AFTER, BEFORE, BESIDE, CELLS, DELAY_S, SLOW_ALONE, Cell
from diloco.bench.report import Check, Report
from diloco.comm.codec.registry import codec_named, result_codec_for
from diloco.comm.reduce.spans import spans_by_bandwidth
from diloco.elastic.protocol.messages import Append, Begin, Effect
from diloco.elastic.protocol.node import Options
from diloco.plan.predict import Host, LinkModel
from diloco.simulate.virtual.disk import Disk
from diloco.simulate.virtual.modelled import STATE_BYTES, Modelled, VirtualConfig
from diloco.simulate.virtual.trainer import USUAL
from diloco.simulate.virtual.world import KEEP_RECORDS, World, decide

FOUNDERS = 4
LONGEST_S = 20_000.0  # until something must have happened
LOOK_S = 0.25  # between two looks whether it has
SIZES, RATES = [cell.values for cell in CELLS], [cell.bits_per_s for cell in CELLS]
KILLS = ("nobody is killed", "it was killed before", "another is killed")


class Links(Modelled):
    """Model links of which each has its own rate; who catches up gets what the donor had when it asked."""

    def __init__(self, setting: VirtualConfig) -> None:
        super().__init__(setting)
        self.lines = dict.fromkeys(setting.names, setting.line)

    def given(self, disk: Disk) -> Disk:
        kept = Disk()
        kept.copy(disk)
        return kept

    def catch_up_s(self, name: str, missed: int) -> float:
        size = STATE_BYTES * self.setting.values if missed > KEEP_RECORDS else missed * self.result_bytes
        return self.download_s(name, size)

    def download_s(self, name: str, size: int) -> float:
        """Return the seconds to download so many bytes at the rate of an island's link, with two round trips."""
        return 8 * size / self.lines[name].down_bits_per_s + 4 * self.lines[name].delay_s

    def allreduce_s(self, begin: Begin, now: float) -> float:
        """Return the seconds of an all-reduce with spans by the members' rates: all wait for the slowest."""
        lines = [self.lines[member] for member in begin.members]
        setting, others = self.setting, len(lines) - 1
        spans = spans_by_bandwidth(setting.values, [line.up_bits_per_s for line in lines])
        result = codec_named(result_codec_for(setting.codec, len(lines)))
        given, meant = (
            [codec.size(span.hi - span.lo) for span in spans] for codec in (codec_named(setting.codec), result)
        )
        return max(
            line.reduce_s(sum(given) - own + others * made, others * own + sum(meant) - made)
            for line, own, made in zip(lines, given, meant, strict=True)
        )


class Joining:
    """Run four islands in virtual time that a fifth one joins, and record the rounds."""

    def __init__(self, cell: Cell, pace_s: float, seed: int = 0) -> None:
        line = LinkModel(cell.bits_per_s, cell.bits_per_s, DELAY_S)
        setting = VirtualConfig(
            FOUNDERS + 1, line, cell.values, phase_s=pace_s, silence_s=3.0, seed=seed, host=Host(), spread=0.0
        )
        options = Options(decide, silence_s=setting.silence_s, want=USUAL.want, partition="quorum")
        self.costs = Links(setting)
        self.world = World(setting.names, options, self.costs)
        self.world.observers.append(self._see)
        *self.founders, self.newcomer = setting.names
        self.rounds: dict[int, tuple[float, tuple[str, ...]]] = {}  # those with contributions: when, and of whom
        self.world.found(tuple(self.founders))
        for name in self.founders:
            self._declare(name)

    def _see(self, name: str, effect: Effect) -> None:
        if isinstance(effect, Append) and effect.record.proposal.islands:
            proposal = effect.record.proposal
            self.rounds.setdefault(proposal.key.round, (self.world.now, proposal.islands))

    def _declare(self, name: str) -> None:
        """Let an island say what its link carries, as real ones do."""
        self.world.lives[name].node.own.bytes_per_s = int(self.costs.lines[name].up_bits_per_s / 8)

    def until(self, come: Callable[[], bool]) -> bool:
        """Let time pass until something has come; return False if it does not within LONGEST_S."""
        end = self.world.now + LONGEST_S
        while not come() and self.world.now < end:
            self.world.timeline.run(self.world.now + LOOK_S)
        return come()

    def more(self, count: int) -> None:
        """Let so many more rounds pass."""
        goal = len(self.rounds) + count
        self.until(lambda: len(self.rounds) >= goal)

    def since(self, then: float) -> list[tuple[float, tuple[str, ...]]]:
        """Return the rounds that were committed since then, in order."""
        return [each for _, each in sorted(self.rounds.items()) if each[0] >= then]

    def admit(self) -> None:
        """Let the newcomer download the state of now, with an empty disk, and start with it."""
        world, name = self.world, self.newcomer
        lives = world.disks[name].lives if name in world.disks else 0
        world.disks[name] = replace(self.costs.given(world.disks[self.founders[0]]), lives=lives, based=True)
        world.disks[name].settle()
        world.timeline.run(world.now + self.costs.download_s(name, STATE_BYTES * self.costs.setting.values))
        world.start(name)
        self._declare(name)

    def join(self) -> dict[str, Any]:
        """Let the newcomer join; return when it came in and how steadily it stayed."""
        began, usual_s = self.world.now, mean(_lengths(self, 0.0)[-BEFORE:])
        self.admit()
        fetched, result_s = self.world.now, self.costs.catch_up_s(self.newcomer, 1)
        self.until(lambda: any(self.newcomer in islands for _, islands in self.since(fetched)))
        self.more(AFTER)
        there = [self.newcomer in islands for _, islands in self.since(fetched)]
        first = there.index(True) if any(there) else len(there)
        missed = (fetched - began) / usual_s
        # while it downloads the results of missed rounds, more are made: a geometric series
        downloading = missed * result_s / (usual_s - result_s) if result_s < usual_s else inf
        return {
            "rounds_until_in": first + 1, "rounds_downloading": downloading,
            "share_after": mean(there[first + 1 :][:AFTER] or [False]),
            "fetch_s": fetched - began, "round_s": usual_s,
        }  # fmt: skip


def measure(pace_s: float = 1.0) -> Report:
    """Let a newcomer join in every cell, with and without a kill, and one whose link alone is slow.

    Its download is the state, and the results of the rounds that are made meanwhile: rounds are counted from when its
    link could have brought both. Where a result takes longer than a round to download, nobody can follow the run.
    """
    cells = [Cell(*cell) for cell in product(SIZES, RATES)]
    rows = {_name(cell): {kill: joined(cell, pace_s, kill) for kill in KILLS} for cell in cells}
    alone = {_name(cell): slow_alone(cell, pace_s) for cell in cells}
    joins = [join for row in rows.values() for join in row.values()]
    after_download = max(join["rounds_until_in"] - join["rounds_downloading"] for join in joins)
    can_follow = [row["rounds_with_it"] for row in alone.values() if row["rounds_a_result"] < 1]
    return Report(
        [
            Check("join.virtual_rounds_until_in", after_download, 3, "lower"),
            Check("join.virtual_slow_rounds", min(can_follow), 1, "higher"),
            Check("join.virtual_share_after", min(join["share_after"] for join in joins), 0.8, "higher"),
            Check("join.virtual_others_ratio", max(row["ratio"] for row in alone.values()), 1.1, "lower"),
        ],
        {
            "virtual rounds from the state to the first with it": max(join["rounds_until_in"] for join in joins),
            "virtual cells": rows,
            "virtual slow alone": alone,
        },
    )


def _name(cell: Cell) -> str:
    return f"{cell.values} values at {cell.bits_per_s:.0f} bit/s"


def joined(cell: Cell, pace_s: float, kill: str) -> dict[str, Any]:
    """Let a newcomer join the islands of a cell, with this kill; return when it is in, and how steadily it stays."""
    run = Joining(cell, pace_s)
    run.more(BEFORE)
    if kill == KILLS[1]:
        run.join()
        run.world.crash(run.newcomer)
        run.more(2)
    elif kill == KILLS[2]:
        run.world.timeline.after(pace_s, lambda: run.world.crash(run.founders[-1]))
    return run.join()


def slow_alone(cell: Cell, pace_s: float) -> dict[str, Any]:
    """Let a newcomer join whose link alone is slow, and return how long the others' rounds take before and after."""
    run = Joining(cell, pace_s)
    rate = cell.bits_per_s / SLOW_ALONE
    run.costs.lines[run.newcomer] = LinkModel(rate, rate, DELAY_S)
    run.more(BEFORE + AFTER)
    usual = _lengths(run, 0.0)[BEFORE:]
    run.admit()
    since = run.world.now
    run.more(BESIDE)
    rounds, lengths = run.since(since), _lengths(run, since)
    return {
        "rounds_a_result": run.costs.catch_up_s(run.newcomer, 1) / mean(usual),
        "usual_round_s": mean(usual), "ratio": mean(lengths) / mean(usual), "rounds": len(rounds),
        "rounds_with_it": sum(run.newcomer in islands for _, islands in rounds),
    }  # fmt: skip


def _lengths(run: Joining, since: float) -> list[float]:
    return [later - earlier for (earlier, _), (later, _) in pairwise(run.since(since))]
