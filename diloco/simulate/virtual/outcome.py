"""What came of a run in virtual time: the last invariants, and figures."""

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from diloco.elastic.protocol.peers import MINORITY_PATIENCE
from diloco.simulate.protocol.check import Violation
from diloco.simulate.virtual.network import BYTE_S, MESSAGE_S
from diloco.simulate.virtual.setting import Setting
from diloco.simulate.virtual.world import World

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
    world = World(setting)
    world.run()
    _check_no_loss(world)
    return _figures(world, time.perf_counter() - began)


def _standstill(world: World) -> str:
    """I4: a round within detection, takeover, the straggler deadline, and an all-reduce for each that was lost."""
    setting, tally = world.setting, world.tally
    slowest_s = setting.straggler * setting.phase_s * (1 + setting.spread + setting.jitter)
    detection_s = (MINORITY_PATIENCE + 2) * setting.silence_s
    again_s = world.reductions.cost(setting.islands).seconds(setting.line, 1 - setting.diurnal) + detection_s
    for before, after in pairwise([0.0, *tally.commits, setting.seconds]):
        lost = sum(before <= at <= after for at in tally.setbacks)
        if after - before > slowest_s + 2 * CONTROL_S + (2 + lost) * again_s:
            return f"no round from {before:.0f} s to {after:.0f} s, with {lost} failures that ended an attempt"
    return ""


def _check_no_loss(world: World) -> None:
    """I3: of an island that stayed alive, nothing but the newest progress is not contained."""
    newest = max((disk.state for disk in world.disks.values()), key=lambda state: state.head)
    for name in sorted(world.steady):
        life = world.lives[name]
        owed = life.trainer.made[0] - newest.mark(name, life.node.incarnation, 0)
        missed = len(world.tally.commits) - life.trainer.made[0]
        if owed > 2 + max(0, missed):
            raise Violation(f"I3: {owed} phases of {int(name)}, alive all the time, are not contained")


def _figures(world: World, wall_s: float) -> Outcome:
    setting, tally, lives = world.setting, world.tally, world.lives.values()
    alive_s = tally.alive_s + sum(setting.seconds - life.since for life in lives)
    computed_s = tally.computed_s + sum(life.trainer.computed_s - life.trainer.unfinished_s() for life in lives)
    busiest = max(world.network.traffic.values(), key=lambda traffic: traffic.received)
    newest = max(disk.state.head for disk in world.disks.values())
    periods = [after - before for before, after in pairwise(tally.commits)] or [0.0]
    rounds = max(1, len(tally.commits))
    return Outcome(
        islands=setting.islands, rounds=len(tally.commits), failures=tally.failures, period_s=median(periods),
        reduce_s=median(world.reductions.succeeded or [0.0]), failed_attempts=world.reductions.failures,
        utilisation=computed_s / alive_s,
        contributors=sum(tally.contributors) / rounds / (alive_s / setting.seconds),
        at_newest_head=sum(life.node.state.head == newest for life in lives) / max(1, len(lives)),
        furthest_behind=max((newest.round - life.node.state.head.round for life in lives), default=0),
        branches=sum(len(rivals) > 1 for rivals in world.checker.rivals.values()), wrongly_lost=tally.wrongly_lost,
        bytes_a_round=world.reductions.bytes_sent / rounds / setting.islands,
        control_bytes_s=max(t.bytes_sent for t in world.network.traffic.values()) / setting.seconds,
        messages_s=busiest.received / setting.seconds,
        coordinator_busy=(busiest.received * MESSAGE_S + busiest.bytes_received * BYTE_S) / setting.seconds,
        heartbeats_s=world.network.heartbeats / setting.seconds, connections=world.connections,
        longest_wait_s=max(after - before for before, after in pairwise([0.0, *tally.commits, setting.seconds])),
        seconds=setting.seconds, wall_s=wall_s, standstill=_standstill(world),
    )  # fmt: skip
