"""Run islands in virtual time that fail and come back, and compute the outcome: the last invariants, and figures.

`rows` shows where a flat run stops to scale: what a round costs so many islands, computed by their plans and messages.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median

from diloco.comm.reduce.spans import MAX_MEMBERS
from diloco.elastic.protocol.liveness import FRONT
from diloco.elastic.protocol.messages import Append, Effect, Note
from diloco.elastic.protocol.node import Options
from diloco.elastic.protocol.peers import MINORITY_PATIENCE
from diloco.simulate.virtual.allreduce import Cost, flat, two_level
from diloco.simulate.virtual.check import Violation
from diloco.simulate.virtual.modelled import BYTE_S, MESSAGE_S, PACKED, Modelled, VirtualConfig
from diloco.simulate.virtual.reductions import Reduction
from diloco.simulate.virtual.trainer import USUAL
from diloco.simulate.virtual.world import World, decide

COUNTS = (10, 30, 100, 300, 1000, 3000, 10_000)
BEGIN_BYTES = 350  # of each island, in a *begin*; a commit has as much
HEARTBEATS = 5  # within silence_s
CONTROL_S = 30.0  # of a round, for messages; more islands than that suffices for are told about by their figures


class Churn:
    """Run a world in which islands fail at random and come back, and record its commits."""

    def __init__(self, setting: VirtualConfig) -> None:
        self.setting, self.costs = setting, Modelled(setting)
        options = Options(
            decide, silence_s=setting.silence_s, straggler=setting.straggler, want=USUAL.want,
            partition="quorum" if setting.islands > 2 else "merge", flat_up_to=setting.flat_up_to,
        )  # fmt: skip
        self.world = World(setting.names, options, self.costs)
        self.world.observers.append(self._see)
        self.timeline = self.world.timeline
        self.commits: list[float] = []  # when rounds with contributions were first committed
        self.contributors: list[int] = []  # in them
        self.leader = ""  # of the last one
        self.wrongly_lost = 0  # islands that were thought dead, and were not
        self._seen: set[str] = set()  # records

    @property
    def waits(self) -> list[tuple[float, float]]:
        """Return the intervals from commit to commit, each as two times; the run's beginning and end count, too."""
        return list(pairwise([0.0, *self.commits, self.setting.seconds]))

    @property
    def reduced(self) -> list[Reduction]:
        """List the all-reduces that succeeded."""
        return [each for each in self.world.reductions.all.values() if each.over and not each.failed]

    def run(self) -> None:
        """Found the run with all islands, and let virtual time pass until its end."""
        self.world.found(self.setting.names)
        if self.setting.mtbf_s is not None:
            self._fail_later(self.setting.mtbf_s)
        self.timeline.run(self.setting.seconds)

    def _fail_later(self, mtbf_s: float) -> None:
        """Schedule the next failure, at an exponentially distributed time."""
        wait_s = self.timeline.stream("failures").expovariate(1 / mtbf_s)
        self.timeline.after(wait_s, partial(self._fail_one, mtbf_s))

    def _fail_one(self, mtbf_s: float) -> None:
        """Crash an island at random, schedule its return, and schedule the next failure."""
        chance = self.timeline.stream("failures")
        if self.world.lives:
            name = chance.choice(list(self.world.lives))
            self.world.crash(name, silent=chance.random() < self.setting.silent)
            self.timeline.after(chance.expovariate(1 / self.setting.back_s), partial(self.world.start, name))
        self._fail_later(mtbf_s)

    def _see(self, name: str, effect: Effect) -> None:
        """Record rounds with contributions, and islands that were thought lost but were alive."""
        match effect:
            case Append(record) if record.digest not in self._seen:
                self._seen.add(record.digest)
                if record.proposal.contributions:
                    self.commits.append(self.timeline.now)
                    self.contributors.append(len(record.proposal.contributions))
                    self.leader = name
            case Note("lost", peer) if self._was_there(peer):
                self.wrongly_lost += 1
                self.world.calm = False

    def _was_there(self, name: str) -> bool:
        """Return whether an island was alive; one that failed, and is just back, was lost for good reason."""
        life, patience_s = self.world.lives.get(name), MINORITY_PATIENCE * self.setting.silence_s
        return life is not None and self.timeline.now - life.since > patience_s


@dataclass(frozen=True)
class Outcome:
    """Hold the figures of a run in virtual time."""

    islands: int
    rounds: int
    failures: int
    period_s: float  # from commit to commit
    reduce_s: float
    failed_attempts: int
    utilisation: float  # of the time that islands were alive, they computed
    contributors: float  # of those alive, in a round
    at_newest_head: float  # of those alive, at the end
    furthest_behind: int  # rounds, of those alive
    branches: int  # with one round more than once: a fork
    wrongly_lost: int  # thought dead while they were alive
    bytes_a_round: float  # sent by an island
    control_bytes_s: float  # sent by the busiest island
    messages_s: float  # that reach the busiest island
    coordinator_busy: float  # of its time, the busiest island takes messages in
    heartbeats_s: float  # of all islands
    connections: int  # of an island
    longest_wait_s: float  # without any commit
    seconds: float  # that were simulated
    wall_s: float
    standstill: str  # I4: where no round came in time; "" if all did


def simulate(setting: VirtualConfig) -> Outcome:
    """Simulate a run and check it; raises Violation of I1, I2, I3 and I5. I4 is reported as `standstill`."""
    began = time.perf_counter()
    run = Churn(setting)
    run.run()
    _check_no_loss(run)
    return _figures(run, time.perf_counter() - began)


def _standstill(run: Churn) -> str:
    """Check I4, and return where it does not hold; empty: everywhere.

    A round must come within detection, takeover, the straggler deadline, and an all-reduce for each island that was
    lost.
    """
    setting = run.setting
    slowest_s = setting.straggler * setting.phase_s * (1 + setting.spread + setting.jitter)
    detection_s = (MINORITY_PATIENCE + 2) * setting.silence_s
    again_s = run.costs.allreduce(setting.islands).seconds(setting.line, 1 - setting.diurnal) + detection_s
    for before, after in run.waits:
        lost = sum(before <= past.ended <= after for past in run.world.past if past.setback)
        if after - before > slowest_s + 2 * CONTROL_S + (2 + lost) * again_s:
            return f"no round from {before:.0f} s to {after:.0f} s, with {lost} failures that ended an attempt"
    return ""


def _check_no_loss(run: Churn) -> None:
    """Check I3: of an island that stayed alive, all but the newest progress is contained."""
    newest = max((disk.states[-1] for disk in run.world.disks.values()), key=lambda state: state.head)
    for name in sorted(run.world.steady):
        life = run.world.lives[name]
        owed = life.trainer.made[0] - newest.mark(name, life.node.incarnation, 0)
        missed = len(run.commits) - life.trainer.made[0]
        if owed > 2 + max(0, missed):
            raise Violation(f"I3: {owed} phases of {int(name)}, alive all the time, are not contained")


def _connections(run: Churn) -> int:
    """Count an ordinary island's streams: those of all-reduces, and control streams to and from its contacts."""
    setting = run.setting
    few = setting.islands <= setting.flat_up_to
    streams = [run.costs.allreduce(len(each.begin.members)).connections for each in run.reduced]
    return max(streams, default=0) + 2 * (setting.islands - 1 if few else FRONT)


def _bytes_sent(run: Churn) -> int:
    """Return the bytes that all islands sent in all-reduces; failed ones count in part."""
    total = 0
    for each in run.world.reductions.all.values():
        if each.ended < inf:
            whole_s = run.costs.allreduce_s(each.begin, each.ended)
            part = min(1.0, each.seconds / whole_s) if each.failed else 1.0
            members = len(each.begin.members)
            total += int(part * members * run.costs.allreduce(members).sent)
    return total


def _figures(run: Churn, wall_s: float) -> Outcome:
    """Compute all figures of a run that is over."""
    setting, world, traffic = run.setting, run.world, run.costs.traffic.values()
    lives = world.lives.values()
    alive_s = sum(past.alive_s for past in world.past) + sum(world.now - life.since for life in lives)
    computed_s = sum(past.computed_s for past in world.past) + sum(life.trainer.computed_s for life in lives)
    busiest = max(traffic, key=lambda each: each.received)
    newest = max(disk.states[-1].head for disk in world.disks.values())
    periods = [after - before for before, after in pairwise(run.commits)] or [0.0]
    rounds = max(1, len(run.commits))
    return Outcome(
        islands=setting.islands, rounds=len(run.commits), failures=len(world.past), period_s=median(periods),
        reduce_s=median([each.seconds for each in run.reduced] or [0.0]),
        failed_attempts=sum(each.failed for each in world.reductions.all.values()),
        utilisation=computed_s / alive_s,
        contributors=sum(run.contributors) / rounds / (alive_s / setting.seconds),
        at_newest_head=sum(life.node.state.head == newest for life in lives) / max(1, len(lives)),
        furthest_behind=max((newest.round - life.node.state.head.round for life in lives), default=0),
        branches=sum(len(rivals) > 1 for rivals in world.checker.rivals.values()), wrongly_lost=run.wrongly_lost,
        bytes_a_round=_bytes_sent(run) / rounds / setting.islands,
        control_bytes_s=max(each.bytes_sent for each in traffic) / setting.seconds,
        messages_s=busiest.received / setting.seconds,
        coordinator_busy=(busiest.received * MESSAGE_S + busiest.bytes_received * BYTE_S) / setting.seconds,
        heartbeats_s=run.costs.heartbeats / setting.seconds, connections=_connections(run),
        longest_wait_s=max(after - before for before, after in run.waits),
        seconds=setting.seconds, wall_s=wall_s, standstill=_standstill(run),
    )  # fmt: skip


@dataclass(frozen=True)
class ScalingRow:
    """Hold what a round costs so many islands, reduced flat and in two levels."""

    islands: int
    flat: Cost | None  # None: a plan has at most so many members
    two_level: Cost
    flat_s: float
    two_level_s: float
    begin_s: float  # until the coordinator's uplink has sent a *begin* to everybody
    heartbeats_s: float  # of all islands, if everybody tells everybody
    front_heartbeats_s: float


def rows(setting: VirtualConfig, counts: Iterable[int] = COUNTS) -> list[ScalingRow]:
    """Compute a row for each number of islands; nothing is simulated."""
    return [_row(replace(setting, islands=count)) for count in counts]


def _row(setting: VirtualConfig) -> ScalingRow:
    n, line = setting.islands, setting.line
    whole, parts = flat(n, setting.values, setting.codec), two_level(n, setting.values, setting.codec)
    beats_s = n * HEARTBEATS / setting.silence_s
    return ScalingRow(
        n, whole if n <= MAX_MEMBERS else None, parts, whole.seconds(line, 1.0), parts.seconds(line, 1.0),
        begin_s=8 * PACKED * BEGIN_BYTES * n * n / line.up_bits_per_s,
        heartbeats_s=n * beats_s, front_heartbeats_s=2 * FRONT * beats_s,
    )  # fmt: skip
