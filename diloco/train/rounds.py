"""The rounds of a run, as a trainer sees them: where the outer state is, what to train on, when a round is over."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from diloco.comm.codec.registry import result_codec_for
from diloco.config.schema import Config
from diloco.elastic.protocol.record import Contribution, Record, Settings
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver
from diloco.elastic.runtime.session import Session
from diloco.report.events import Agreed, IslandNews, Round
from diloco.train.amend import AmendedConfig
from diloco.train.outer import outer_settings, preview
from diloco.train.policy import View
from diloco.train.schedule import schedule_of, usual_steps

SPILLED = "spilled"  # in an island's folder: progress that another branch may lack, beyond what the memory should hold


def decider(config: Config) -> Callable[[RunState, int, tuple[Contribution, ...]], tuple[Settings, int]]:
    """Build the function by which a coordinator decides at *begin*.

    It fixes the outer settings for so many islands, and the run's clock after the round.
    """
    schedule = schedule_of(config.sync, config.inner)

    def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
        if not contributions:
            return Settings(), state.step
        settings = outer_settings(config, len(contributions), state.updates // config.sync.fragments + 1)
        codec = config.sync.codec
        result = result_codec_for(codec, len(contributions))
        step = max(state.step, schedule.next(state.step, usual_steps(contributions)))
        return replace(settings, codec=codec, result=result), step

    return decide


class Rounds:
    """Serve one trainer thread with the rounds of its run.

    An island alone is a run of one and has rounds like any other.
    """

    def __init__(self, driver: Driver, config: Config, names: Callable[[str], str]) -> None:
        self.fragments = driver.run.fragments
        feedback = config.sync.feedback_decay if config.sync.feeds_back else None
        spill = Path(config.dir) / SPILLED if driver.store.keeps else None
        self.driver = driver
        self.session = Session(driver, self.fragments, config.sync.codec, feedback=feedback, spill=spill)
        self.name_of = names  # of islands, for people
        self._config = AmendedConfig(config)
        for fragment in range(len(self.fragments)):
            self.session.apply_result(fragment)
        self._reported, self._roster = self.session.state.head.round, self.session.state.roster
        self.contributors: tuple[str, ...] = ()  # by name, to the last reported round that had any

    @property
    def first(self) -> bool:
        """Tell whether this island is the first of the roster: it acts for all where one is enough."""
        return self.session.state.roster[:1] == (self.driver.node.me,)

    @property
    def islands(self) -> int:
        """Return how many islands the roster has."""
        return len(self.session.state.roster)

    def refresh(self) -> View:
        """Return what the island sees of the run, all of it at one moment."""
        with self.driver.changed:
            self.session.refresh()
            state, session, each = self.session.state, self.session, range(len(self.fragments))
            over, changed, owes = (tuple(map(of, each)) for of in (session.over, session.has_changed, session.owes))
            return View(state.head, state.step, state.updates, over, changed, owes)

    def previewing(self) -> Callable[[int, Tensor], Tensor]:
        """Return a function of progress, and of where that begins in the flat vectors: where the outer parameters would
        be there if the round had nothing but this island's share of it."""
        share, islands = self._share()
        config = self._config.at(self.session.state.amendments)
        settings = outer_settings(config, islands, self.session.state.updates // len(self.fragments) + 1)

        def previewed(at: int, progress: Tensor) -> Tensor:
            with self.driver.replica.reading() as vectors:
                return preview(vectors, progress * share, settings, at)

        return previewed

    def _share(self) -> tuple[float, int]:
        """Return this island's share of the weights in the last round, and how many were in it. If it was not in it,
        all of the roster count alike."""
        last, me = self.session.last_round(), self.driver.node.me
        weights = {contribution.island: contribution.weight for contribution in last}
        if me in weights:
            return weights[me] / sum(weights.values()), len(weights)
        islands = max(1, self.islands)
        return 1 / islands, islands

    def round_events(self) -> list[Round]:
        """Describe, for people, the rounds that are over since the last call."""
        seen, before = self.session.state.head.round, self._reported
        self._reported = max(self._reported, seen)
        events = round_events(self.driver, range(before + 1, seen + 1), self.name_of)
        self.contributors = next((e.contributors for e in reversed(events) if e.contributors), self.contributors)
        return events

    def roster_events(self) -> list[IslandNews]:
        """Describe, for people, how the roster has changed since the last call."""
        before, self._roster = self._roster, self.session.state.roster
        return roster_events(self.driver, before, self._roster, self.name_of)

    def since_last_s(self) -> float:
        """Return the seconds since the last round that changed parameters, by the log's clock; inf if none is known."""
        ends = [header.time_ms for header in list(self.driver.applier.headers) if header.contributions]
        return time.time() - ends[-1] / 1000 if ends else math.inf

    def exhausted(self) -> bool:
        """Tell whether the run is out of samples: none are left to lease, and no island holds enough for a batch."""
        return self.session.state.ledger.exhausted(self._config.now.island.batch)

    def outer(self) -> dict[str, Tensor]:
        """Return copies of the outer state's vectors as they are now."""
        with self.driver.replica.reading() as vectors:
            return {name: vector.clone() for name, vector in vectors.items()}

    def agreement(self) -> Agreed:
        """Return what this island holds at the end, with digests of log and state, to be compared with others."""
        return agreement(self.driver, self.session.state)

    def leave(self) -> None:
        """Wait until the others have what this island has, leave the run, and close the session."""
        self.driver.leave()
        self.session.close()


def round_events(driver: Driver, rounds: range, names: Callable[[str], str]) -> list[Round]:
    """Describe, for people, those of a run's last rounds whose numbers are in `rounds`."""
    records = [record for record in list(driver.records) if record.proposal.key.round in rounds]
    return [_round_event(driver, record, names) for record in records]


def roster_events(
    driver: Driver, before: Sequence[str], after: Sequence[str], names: Callable[[str], str]
) -> list[IslandNews]:
    """Describe who else has entered the roster, and who is gone from it without a note of it here: the coordinator
    alone notes who is lost."""
    views, me = driver.node.peers.views, driver.node.me
    came = [("joined", peer) for peer in after if peer not in before and peer != me]
    gone = [("gone", peer) for peer in before if peer not in after and peer in views and not views[peer].left]
    text = f"{len(after)} in the roster"
    return [IslandNews(what=what, island=names(peer), text=text) for what, peer in (*came, *gone)]


def _round_event(driver: Driver, record: Record, names: Callable[[str], str]) -> Round:
    proposal = record.proposal
    return Round(
        round=proposal.key.round,
        fragment=proposal.fragment,
        contributors=tuple(names(island) for island in proposal.islands),
        islands=len(proposal.roster),
        tokens=proposal.tokens,
        outer_lr=proposal.settings.lr,
        step=proposal.step,
        digest=record.digest,
        applied_at=driver.applier.applied_at.get(proposal.key.round),
        late=sum(contribution.offer.late for contribution in proposal.contributions),
        samples=tuple(contribution.offer.samples for contribution in proposal.contributions),
        pseudo_gradient_norm=next(
            (each.offer.norm for each in proposal.contributions if each.island == driver.node.me), None
        ),
    )


def agreement(driver: Driver, state: RunState) -> Agreed:
    """Return what an island holds at a state, with digests of log and vectors, to be compared with others."""
    return Agreed(
        round=state.head.round, chain=state.head.digest, state=driver.replica.digest(), tokens=state.head.tokens,
        bytes_sent=driver.bytes_sent,
    )  # fmt: skip
