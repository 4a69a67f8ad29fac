"""Situations of simulated islands, and what one of them would know: its status, rounds and events."""

from dataclasses import dataclass, field

from diloco.checkpoint.log.history import RoundHeader
from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.record import LoggedRecord
from diloco.elastic.runtime.headers import header_of
from diloco.report.events import IslandNews
from diloco.report.status import merged
from diloco.report.why import Facts
from diloco.run.seeing import view_of
from diloco.simulate.virtual.scenario import obey, parse, world_of

BEGAN = 1_000_000.0  # Unix time of the world's beginning


@dataclass
class Situation:
    """Play a script, and see it with the eyes of each island."""

    script: str
    headers: dict[str, list[RoundHeader]] = field(default_factory=dict)
    news: dict[str, list[IslandNews]] = field(default_factory=dict)
    rosters: dict[str, tuple[str, ...]] = field(default_factory=dict)  # as each has last committed it

    def __post_init__(self) -> None:
        scenario = parse(self.script)
        self.world = world_of(scenario)
        self.world.observers.append(self._see)
        self.world.found(scenario.founders, scenario.samples)
        for command in scenario.commands:
            obey(self.world, command)

    def _see(self, name: str, effect: msg.Effect) -> None:
        at = BEGAN + self.world.now
        match effect:
            case msg.Append(record, stored_by, phases):
                state = self.world.lives[name].node.state
                logged = LoggedRecord(record, stored_by, int(1000 * at), phases)
                before = self.rosters.get(name, ())
                self.headers.setdefault(name, []).append(header_of(logged, before, state.head.tokens, 1000))
                self.rosters[name] = record.proposal.roster
            case msg.Note(kind, peer, text):
                self.news.setdefault(name, []).append(IslandNews(time=at, what=kind, island=peer, text=text))

    def facts(self, teller: str) -> Facts:
        """What an island knows, with what those say of themselves whom it can ask."""
        world = self.world
        answering = [
            other for other in world.lives if other not in world.stopped and world.reaches(teller, other)
        ]  # fmt: skip
        views = {name: self._view(name) for name in {teller, *answering}}
        status = merged(views[teller], [view for name, view in views.items() if name != teller])
        news = self.news.get(teller, [])
        return Facts(status, self.headers.get(teller, []), news, str, status.at)

    def _view(self, name: str):
        clock, at = self.world.costs.clock(name), BEGAN + self.world.now
        return view_of(self.world.lives[name].node, self.headers.get(name, []), str, now=clock, at=at)
