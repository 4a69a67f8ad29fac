"""Combine what several islands report: a row for each, a line for what matters, an account at the end.

Pure: nothing here reads files or clocks.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco.report.events import (
    Agreed,
    Amended,
    End,
    Event,
    IslandNews,
    Round,
    Start,
    Validation,
    Waiting,
    WitnessStart,
)
from diloco.report.terminal import names, sentence
from diloco.units import counted

TOLD = (  # of what islands say about each other, and about their disks
    "joined", "left", "lost", "gone", "excluded", "cut off", "went back", "diverged", "refused",
    "waiting", "latched", "evicted", "slow",
    "torn", "damaged", "mended", "not mended", "not durable", "durable again", "snapshot failed",
    "remote failing", "remote again",
)  # fmt: skip
ECHO_S = 10.0  # everybody notices a loss: within this time it is the same one
WAIT_ECHO_S = 50.0
HOLD_S = 5.0  # a round's line waits so long for its validation


@dataclass
class Row:
    """Describe the last known state of one island."""

    name: str
    state: str = "starting"  # then training, or witness; gone: died; left: ended in good order
    restarts: int = 0
    finished: bool = False
    agreed: tuple[int, str, str] | None = None  # round, chain digest, state digest: where it ended


@dataclass
class Board:
    """Collect the islands' events; `hear` takes one and returns the lines that are worth printing."""

    rows: dict[str, Row]
    steps: int = 0  # of the whole run; 0: not known yet
    every: int = 1  # steps of a phase
    rounds: list[Round] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # by step
    paused: bool = False  # asked to, and all islands have saved
    _earlier: int = 0  # of the rounds, those before this start
    _held: Round | None = None  # a committed round whose validation may still come
    _digests: set[str] = field(default_factory=set)
    _amendments: int = 0
    _reported: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> "Board":
        """Make a board of islands that are all about to start."""
        return cls({name: Row(name) for name in names})

    def hear(self, name: str, event: Event) -> list[str]:
        """Take in an event of one island, and return the lines to print: often none.

        Events that several islands report, such as a round or a loss, give one line.
        """
        row = self.rows[name]
        match event:
            case Start():
                row.state, self.steps = "training", event.steps
                self.every = event.every if isinstance(event.every, int) else 1  # a time is no number of steps
            case WitnessStart():
                row.state = "witness"
            case Round():
                return self._round(event)
            case Validation():
                return self._validation(event)
            case IslandNews():
                return self._news(name, event)
            case Amended():
                return self._amended(event)
            case Waiting():
                return self._waiting(name, event)
            case End():
                row.finished = event.finished
            case Agreed():
                row.agreed = (event.round, event.chain, event.state)
        return []

    def remember(self, event: Event) -> None:
        """Take in an event from before this start: the account is one of the whole run."""
        if isinstance(event, Round):
            self._round(event)
            self._held, self._earlier = None, len(self.rounds)
        elif isinstance(event, Validation):
            self._validation(event)

    def tick(self, now: float) -> list[str]:
        """Return the line of a round whose validation has not come within HOLD_S seconds; `now` is Unix time."""
        return self.flush() if self._held is not None and now - self._held.time > HOLD_S else []

    def flush(self) -> list[str]:
        """Return the line of the round that still waits for its validation, if there is one."""
        held, self._held = self._held, None
        return [] if held is None else [self._line(held)]

    def again(self, name: str) -> None:
        """Reset the row of an island that starts once more, and count that."""
        self.rows[name] = Row(name, restarts=self.rows[name].restarts + 1)

    @property
    def step(self) -> int:
        """Return the run's clock after the last committed round; 0 before the first one."""
        return self.rounds[-1].step if self.rounds else 0

    @property
    def finished(self) -> bool:
        """Return whether the run's last step was committed, or an island has reported the end."""
        return 0 < self.steps <= self.step or any(row.finished for row in self.rows.values())

    @property
    def contributions(self) -> Counter[str]:
        """Count the rounds of each contributor, those who joined from elsewhere included."""
        return Counter(name for event in self.rounds for name in event.contributors)

    @property
    def agree(self) -> bool:
        """Return whether islands saw the run's end, and hold the same state where they ended at the same round."""
        endings = {row.agreed for row in self.ended()}
        return bool(endings) and len(endings) == len({ending[0] for ending in endings if ending is not None})

    def ended(self) -> list[Row]:
        """List the islands that saw the run's end and reported their digests."""
        return [row for row in self.rows.values() if row.finished and row.agreed is not None]

    def _round(self, event: Round) -> list[str]:
        """Add a round that no island has reported before, and hold its line back for its validation."""
        if event.digest in self._digests:
            return []
        lines = self.flush()
        self._digests.add(event.digest)
        self.rounds.append(event)
        if event.contributors:  # the others only hand out samples
            self._held = event
        return lines

    def _line(self, event: Round, loss: str = "") -> str:
        """Format a round's line with the pace, in steps of the run's clock per second.

        The pace is taken over a phase at least, since rounds of its fragments may come all at once.
        """
        line = f"round {event.round:>3}  step {event.step:>5}  {names(event.contributors)}{loss}"
        recent = self.rounds[self._earlier :]
        earlier = [one for one in recent if one.contributors and one.step <= event.step - self.every]
        if not earlier or event.time <= earlier[-1].time:
            return line
        return f"{line}  {(event.step - earlier[-1].step) / (event.time - earlier[-1].time):.1f} steps/s"

    def _validation(self, event: Validation) -> list[str]:
        """Complete the line that was held back for this loss, or return one of its own; each step counts once."""
        step, loss = event.step, event.validation_loss
        if step in self.losses or loss is None:
            return []
        self.losses[step] = loss
        if (held := self._held) is not None and held.round == event.round:
            self._held = None
            return [self._line(held, f"  validation loss {loss:.4f}")]
        return [f"round {event.round:>3}  step {step:>5}  validation loss {loss:.4f}"]

    def _amended(self, event: Amended) -> list[str]:
        """Return one line for an amendment by the run's owner, whichever island reports it first."""
        if event.number <= self._amendments:
            return []
        self._amendments, self.steps = event.number, event.steps
        return [str(sentence(event))]

    def _waiting(self, name: str, event: Waiting) -> list[str]:
        """Return a line for a wait that no other island has reported lately: often all wait for the same."""
        what = ",".join(sorted(event.islands)) or event.cause or name
        if event.time - self._reported.get(("waiting", what), -WAIT_ECHO_S) < WAIT_ECHO_S:
            return []
        self._reported["waiting", what] = event.time
        return [f"{name} is {sentence(event)}"]

    def _news(self, name: str, event: IslandNews) -> list[str]:
        """Return a line if the event matters to people and is no echo of what another island has reported."""
        what, island = event.what, event.island
        if what in ("joined", "gone") and island in self.rows and island != name:  # it is watched here
            return []
        echo = event.time - self._reported.get((what, island), -ECHO_S) < ECHO_S
        if what not in TOLD or echo or (what == "left" and self.finished):
            return []
        self._reported[what, island] = event.time
        return [str(sentence(event))]


def account(board: Board) -> list[str]:
    """Report the outcome in a few lines: how it ended, each island's share, whether the digests are equal."""
    losses = [board.losses[step] for step in sorted(board.losses)]
    found = f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    number = max((event.round for event in board.rounds), default=0)
    islands = [*board.rows, *sorted(board.contributions.keys() - board.rows.keys())]
    how = "done" if board.finished else "paused" if board.paused else "stopped"
    start = f"{how}: step {board.step}, round {number}{found}"
    return [start, *(f"  {_share(board, name)}" for name in islands), _agreement(board)]


def _share(board: Board, name: str) -> str:
    """Format how many rounds an island contributed to; rounds that only lease samples do not count."""
    rounds = sum(bool(event.contributors) for event in board.rounds)
    restarts = board.rows[name].restarts if name in board.rows else 0
    again = f", started again {counted(restarts, 'time')}" if restarts else ""
    return f"{name} contributed to {board.contributions[name]} of {counted(rounds, 'round')}{again}"


def _agreement(board: Board) -> str:
    """Explain which islands ended with equal digests, or why there is nothing to compare."""
    ended = board.ended()
    if not ended:
        return "digests: compared when the run has ended"
    if not board.agree:
        places = (f"{row.name} round {row.agreed[0]} state {row.agreed[2][:12]}" for row in ended if row.agreed)
        return f"digests DIFFER: {'; '.join(places)}"
    ending, times = Counter(row.agreed for row in ended).most_common(1)[0]
    assert ending is not None
    seen = f"round {ending[0]}, chain {ending[1][:12]}, state {ending[2][:12]}"
    if len(ended) == 1:
        return f"digests: only {ended[0].name} saw the end, so there is nothing to compare: {seen}"
    if times == 1:
        return "digests: no two islands ended at the same round, so there is nothing to compare"
    return f"digests equal on {names([row.name for row in ended if row.agreed == ending])}: {seen}"
