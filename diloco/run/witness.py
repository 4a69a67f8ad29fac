"""A witness: an island without an accelerator that stores results and the log, and votes. It trains nothing.

Two islands that cannot hear each other are a tie. A witness breaks it, on any machine that has the disk and the memory
for the outer state: neither model nor data are opened there.
"""

from collections.abc import Callable

from diloco.config.schema import Config
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver, check
from diloco.elastic.runtime.fragments import Fragments
from diloco.island.mesh import ProcessMesh
from diloco.report.events import Amended, End, WitnessStart
from diloco.report.sinks import Events
from diloco.train.amend import AmendedConfig, in_words
from diloco.train.rounds import agreement, roster_events, round_events
from diloco.train.schedule import schedule_of
from diloco.train.trainer import Outcome

LOOK_S = 0.1


class Witness:
    """Take part in a run without training: store, vote, lead where it comes first, and report rounds."""

    is_witness, samples = True, None
    driver: Driver

    def __init__(
        self, config: Config, place: ProcessMesh, events: Events, fragments: Fragments, names: Callable[[str], str]
    ) -> None:
        """`names` gives the names of islands, for people. The driver is set once it has met the others."""
        self.config, self.place, self.events, self.fragments, self._names = config, place, events, fragments, names
        self._amended = AmendedConfig(config)

    @property
    def finished(self) -> bool:
        """Tell whether the run has ended: its schedule is complete, or its samples are consumed."""
        state = self.driver.applied
        now = self._amended.at(state.amendments)
        over = schedule_of(now.sync, now.inner).is_over(state.step, state.updates)
        return over or state.ledger.exhausted(now.island.batch)

    def run(self, should_stop: Callable[[], bool], pausing: Callable[[], bool]) -> Outcome:
        """Store and vote until the run ends or a signal comes; then say goodbye, unless that is a pause."""
        config, first = self.config, self.driver.applied
        self.events.emit(
            WitnessStart(
                run=config.run, dir=config.dir, trained_parameters=self.fragments.count,
                steps=self._amended.at(first.amendments).inner.steps, round=first.head.round,
            )
        )  # fmt: skip
        reported = first
        while not should_stop() and not self.finished:
            with self.driver.changed:
                check(self.driver)
                if self.driver.applied is reported:
                    self.driver.changed.wait(LOOK_S)
            reported = self._report(reported)
        paused = pausing() and not self.finished
        if not paused:
            self.driver.leave()
        last = self.driver.applied
        self._report(reported)
        self.events.emit(End(step=last.step, finished=self.finished))
        self.events.emit(agreement(self.driver, last))
        trained = last.head.round > first.head.round
        return Outcome(last.step, last.head.round, self.finished, [], trained, leader=True, paused=paused)

    def _report(self, before: RunState) -> RunState:
        """Report what has been committed since a state, and return the state that this was read from."""
        state = self.driver.applied
        for event in round_events(self.driver, range(before.head.round + 1, state.head.round + 1), self._names):
            self.events.emit(event)
        for change in roster_events(self.driver, before.roster, state.roster, self._names):
            self.events.emit(change)
        for amendment in state.amendments[len(before.amendments) :]:
            steps = self._amended.at(state.amendments).inner.steps
            self.events.emit(Amended(number=amendment.number, text=in_words(amendment, self._names), steps=steps))
        return state
