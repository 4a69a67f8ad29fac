"""The run's settings as the protocol needs them. All times follow from `silence_s`."""

from collections.abc import Callable
from dataclasses import dataclass

from diloco.elastic.protocol.record import Amendment, Contribution, Head, Latch, Settings
from diloco.elastic.protocol.state import RunState

# the state, the fragment, its contributions -> the round's settings, and the run's clock after it
Decide = Callable[[RunState, int, tuple[Contribution, ...]], tuple[Settings, int]]


@dataclass(frozen=True)
class Options:
    """Hold the run's settings that the protocol depends on; an amendment of the run replaces them."""

    decide: Decide
    silence_s: float = 5.0
    straggler: float = 1.5
    min_islands: int = 1
    partition: str = "merge"  # or quorum; auto: merge until the run's owner has signed a latch
    start_islands: int = 1  # with which the first round begins
    start_s: float = 0.0  # after which it begins with those who are there
    min_voters: int = 3  # below which silence alone makes the roster no smaller
    witness: bool = False  # it stores and votes, and contributes nothing
    admission: str = ""  # by which the run's owner lets this island in, in hex
    sign_latch: Callable[[Head], Latch] | None = None  # by the owner's key, where this process has it
    rejoin_s: float = 60.0  # for which one that returns looks for its roster, under `merge`
    slowest: float = 2.0  # times a usual round: whose exchange takes longer takes part now and then only
    fragments: int = 1
    want: int = 0  # samples to hold
    flat_up_to: int = 64  # so many islands all tell each other that they live; of more, only the first of the roster do
    steps: int | None = None  # where the run's clock ends
    amended: Callable[["Options", RunState], "Options"] = lambda options, state: options  # as its amendments want them
    objection: Callable[[RunState, Amendment], str] = lambda state, amendment: ""  # why this island could not follow it

    @property
    def heartbeat_s(self) -> float:
        """Return the seconds between two heartbeats: five of them fit into `silence_s`."""
        return self.silence_s / 5

    @property
    def answer_s(self) -> float:
        """Return for how many seconds an island may live but not answer, before it is left out."""
        return 2 * self.silence_s
