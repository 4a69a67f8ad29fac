"""All-reduces in virtual time: who has joined, how long it takes, and what members hear when one of them is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from diloco.comm.codec.registry import codec_named, result_codec_for
from diloco.comm.reduce.spans import CHUNKS
from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.record import Ballot
from diloco.elastic.runtime.reducing import CONNECT_S, SLACK
from diloco.simulate.protocol.reductions import payload_of
from diloco.simulate.virtual.costs import Cost, flat, two_level

if TYPE_CHECKING:
    from diloco.simulate.virtual.world import World


@dataclass
class Reduction:
    begin: Begin
    waiting: set[str] = field(default_factory=set)  # joined, and have not heard how it ended
    joined: int = 0
    failed: bool = False
    began: float = 0.0


class Reductions:
    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[Ballot, Reduction] = {}
        self.succeeded: list[float] = []  # seconds of each
        self.failures = 0
        self.bytes_sent = 0  # of all islands
        self.connections = 0  # of an island, in the largest

    @property
    def result_bytes(self) -> int:
        codec = self._world.setting.codec
        return codec_named(result_codec_for(codec, 2)).size(self._world.setting.values)

    def cost(self, members: int) -> Cost:
        setting = self._world.setting
        cost = two_level if setting.reduces_in_two_levels(members) else flat
        return cost(members, setting.values, setting.codec)

    def seconds(self, begin: Begin) -> float:
        """All wait for the slowest link."""
        setting, now = self._world.setting, self._world.timeline.now
        share = min(setting.rate(int(member), now) for member in begin.members) if setting.diurnal else 1.0
        digest_s = 1e-9 * setting.host.digest_ns * setting.values
        return self.cost(len(begin.members)).seconds(setting.line, share) + digest_s

    def join(self, name: str, begin: Begin) -> None:
        reduction = self._under_way.get(begin.ballot)
        if reduction is None:
            reduction = self._under_way[begin.ballot] = Reduction(begin)
            self._world.timeline.after(CONNECT_S, partial(self._give_up, reduction))
        reduction.waiting.add(name)
        reduction.joined += 1
        if reduction.failed:
            self._report(name, reduction, "", "it is over")
        elif reduction.joined == len(begin.members):
            reduction.began = self._world.timeline.now
            self._world.timeline.after(self.seconds(begin), partial(self._finish, reduction))

    def _give_up(self, reduction: Reduction) -> None:
        if not reduction.failed and not reduction.began:
            missing = set(reduction.begin.members) - reduction.waiting
            self._fail(reduction, min(missing), "no stream came")

    def _finish(self, reduction: Reduction) -> None:
        if reduction.failed:
            return
        del self._under_way[reduction.begin.ballot]
        cost = self.cost(len(reduction.begin.members))
        self.succeeded.append(self._world.timeline.now - reduction.began)
        self.connections = max(self.connections, cost.connections)
        self._count(reduction, 1.0)
        ballot, payload = reduction.begin.ballot, payload_of(reduction.begin.proposal)
        for member in sorted(reduction.waiting):
            self._world.enter(member, lambda node, now: node.reduced(ballot, payload, now))

    def _count(self, reduction: Reduction, part: float) -> None:
        members = len(reduction.begin.members)
        self.bytes_sent += int(part * members * self.cost(members).sent)

    def cancel(self, name: str, ballot: Ballot) -> None:
        reduction = self._under_way.get(ballot)
        if reduction is not None and name in reduction.waiting:
            reduction.waiting.discard(name)
            self._fail(reduction, name, "hung up")

    def lost(self, name: str, *, noticed: bool) -> bool:
        """Where its connections do not close, its chunks are missed. Whether an all-reduce had counted on it."""
        needed = [reduction for reduction in self._under_way.values() if name in reduction.begin.members]
        for reduction in needed:
            if name in reduction.waiting:
                reduction.waiting.discard(name)
                setting = self._world.setting
                stall_s = setting.silence_s + SLACK * self.seconds(reduction.begin) / CHUNKS
                wait_s = setting.line.delay_s if noticed else stall_s
                self._world.timeline.after(wait_s, partial(self._fail, reduction, name, "its chunks do not come"))
        return bool(needed)

    def _fail(self, reduction: Reduction, blamed: str, reason: str) -> None:
        if reduction.failed or reduction.begin.ballot not in self._under_way:
            return
        reduction.failed = True
        self.failures += 1
        if reduction.began:
            took = self._world.timeline.now - reduction.began
            self._count(reduction, min(1.0, took / self.seconds(reduction.begin)))
        for member in sorted(reduction.waiting):
            self._report(member, reduction, blamed, reason)

    def _report(self, member: str, reduction: Reduction, blamed: str, reason: str) -> None:
        ballot = reduction.begin.ballot
        self._world.timeline.after(
            self._world.setting.line.delay_s,
            lambda: self._world.enter(member, lambda node, now: node.reduce_failed(ballot, blamed, reason, now)),
        )
