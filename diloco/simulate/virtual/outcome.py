"""What came of a run in virtual time: the last invariants, and figures."""

import time
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from diloco.elastic.protocol.liveness import FRONT
from diloco.elastic.protocol.peers import MINORITY_PATIENCE
from diloco.simulate.virtual.check import Violation
from diloco.simulate.virtual.churn import Churn
from diloco.simulate.virtual.network import BYTE_S, MESSAGE_S
from diloco.simulate.virtual.setting import Setting

CONTROL_S = 30.0  # of a round, for messages; more islands than that suffices for are told about by their figures


@dataclass(frozen=True)
class Outcome:
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


def simulate(setting: Setting) -> Outcome:
    """Raises Violation, of I1, I2, I3 and I5."""
    began = time.perf_counter()
    run = Churn(setting)
    run.run()
    _check_no_loss(run)
    return _figures(run, time.perf_counter() - began)


def _standstill(run: Churn) -> str:
    """I4: a round within detection, takeover, the straggler deadline, and an all-reduce for each that was lost."""
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
    """I3: of an island that stayed alive, nothing but the newest progress is not contained."""
    newest = max((disk.states[-1] for disk in run.world.disks.values()), key=lambda state: state.head)
    for name in sorted(run.world.steady):
        life = run.world.lives[name]
        owed = life.trainer.made[0] - newest.mark(name, life.node.incarnation, 0)
        missed = len(run.commits) - life.trainer.made[0]
        if owed > 2 + max(0, missed):
            raise Violation(f"I3: {owed} phases of {int(name)}, alive all the time, are not contained")


def _connections(run: Churn) -> int:
    """Of an ordinary island: bulk streams, and control streams to and from those it speaks with."""
    setting = run.setting
    few = setting.islands <= setting.flat_up_to
    streams = [run.costs.allreduce(len(each.begin.members)).connections for each in run.reduced]
    return max(streams, default=0) + 2 * (setting.islands - 1 if few else FRONT)


def _bytes_sent(run: Churn) -> int:
    """Of all islands, in all-reduces."""
    total = 0
    for each in run.world.reductions.all.values():
        if each.ended < inf:
            whole_s = run.costs.allreduce_s(each.begin, each.ended)
            part = min(1.0, each.seconds / whole_s) if each.failed else 1.0
            members = len(each.begin.members)
            total += int(part * members * run.costs.allreduce(members).sent)
    return total


def _figures(run: Churn, wall_s: float) -> Outcome:
    setting, world, traffic = run.setting, run.world, run.links.traffic.values()
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
        heartbeats_s=run.links.heartbeats / setting.seconds, connections=_connections(run),
        longest_wait_s=max(after - before for before, after in run.waits),
        seconds=setting.seconds, wall_s=wall_s, standstill=_standstill(run),
    )  # fmt: skip
