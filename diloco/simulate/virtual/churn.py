"""Islands in virtual time that fail and come back, and what has happened to them so far."""

from functools import partial
from itertools import pairwise

from diloco.elastic.protocol.messages import Append, Effect, Note
from diloco.elastic.protocol.node import Options
from diloco.elastic.protocol.peers import MINORITY_PATIENCE
from diloco.simulate.virtual.modelled import Modelled
from diloco.simulate.virtual.network import ModelledLinks
from diloco.simulate.virtual.reductions import Reduction
from diloco.simulate.virtual.setting import Setting
from diloco.simulate.virtual.trainer import USUAL
from diloco.simulate.virtual.world import World, decide


class Churn:
    def __init__(self, setting: Setting) -> None:
        self.setting, self.costs = setting, Modelled(setting)
        options = Options(
            decide, silence_s=setting.silence_s, straggler=setting.straggler, want=USUAL.want,
            flat_up_to=setting.flat_up_to,
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
    def links(self) -> ModelledLinks:
        assert isinstance(self.world.network, ModelledLinks)
        return self.world.network

    @property
    def waits(self) -> list[tuple[float, float]]:
        """From commit to commit."""
        return list(pairwise([0.0, *self.commits, self.setting.seconds]))

    @property
    def reduced(self) -> list[Reduction]:
        return [each for each in self.world.reductions.all.values() if each.over and not each.failed]

    def run(self) -> None:
        self.world.found(self.setting.names)
        if self.setting.mtbf_s is not None:
            self._fail_later(self.setting.mtbf_s)
        self.timeline.run(self.setting.seconds)

    def _fail_later(self, mtbf_s: float) -> None:
        wait_s = self.timeline.stream("failures").expovariate(1 / mtbf_s)
        self.timeline.after(wait_s, partial(self._fail_one, mtbf_s))

    def _fail_one(self, mtbf_s: float) -> None:
        chance = self.timeline.stream("failures")
        if self.world.lives:
            name = chance.choice(list(self.world.lives))
            self.world.crash(name, silent=chance.random() < self.setting.silent)
            self.timeline.after(chance.expovariate(1 / self.setting.back_s), partial(self.world.start, name))
        self._fail_later(mtbf_s)

    def _see(self, name: str, effect: Effect) -> None:
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
        """One that failed, and is just back, was lost for good reason."""
        life, patience_s = self.world.lives.get(name), MINORITY_PATIENCE * self.setting.silence_s
        return life is not None and self.timeline.now - life.since > patience_s
