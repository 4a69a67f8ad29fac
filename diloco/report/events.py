"""The events of a run: one dataclass for each kind, which every producer emits and every reader matches by type.

In `events.jsonl` an event is one JSON object: its kind as `event`, its version as `v`, its `time` and its fields. A
field that is added changes no version, and a reader ignores fields that it does not know. A field that is removed,
renamed or given another meaning raises the version of its kind; a reader passes over events of a higher version than
its own. docs/reference/events.md is written from here.
"""

import math
import time as clock
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, TypeVar

KINDS: dict[str, type["Event"]] = {}  # by the name that a line of the file has

# What an `elastic` event can say of an island. All but the first five are of its own disk, network or settings.
NEWS = {
    "joined": "It is in the roster, or has got the run's state.",
    "left": "It said goodbye.",
    "lost": "It gave no sign of life for `elastic.silence_s`, or its connection broke: rounds go on without it.",
    "gone": "It is no longer in the roster, and nobody here had noted why.",
    "excluded": "Its messages are ignored for a while, for what it said or failed to say.",
    "evicted": "The run's owner has taken it out.",
    "cut off": "It and another member cannot reach each other: one of them is left out of the round, in turn.",
    "refused": "Its contribution, its result or a change of settings was refused.",
    "slow": "An exchange with it takes so long that it takes part in some rounds only.",
    "waiting": "It waits for others: too few members are there to decide a round.",
    "latched": "From here on every round needs a quorum.",
    "went back": "It has undone rounds that had no quorum.",
    "diverged": "Its vectors differ from the others': it fetches theirs.",
    "behind": "It could not fetch what it has missed, and tries again.",
    "caught up": "It has fetched what it had missed.",
    "kept out": "Another island does not let it in.",
    "twin": "Another island takes part with its key: one of them has to stop.",
    "reached": "How others reach it has changed.",
    "relays": "It passes on for an island that nobody can dial, or has stopped to.",
    "torn": "The end of its log was not written whole, and is cut off.",
    "damaged": "Something on its disk is not what was written.",
    "mended": "Peers have given it what was damaged.",
    "not mended": "Nobody could give it what was damaged.",
    "result lost": "The result that it held is gone: others have it.",
    "not durable": "Its disk takes nothing any more: training goes on, and is not safe there.",
    "durable again": "Its disk takes everything again.",
    "snapshot failed": "A snapshot could not be written: the log keeps everything since the one before.",
    "remote failing": "`checkpoint.remote` cannot be written.",
    "remote again": "`checkpoint.remote` has everything again.",
    "restored": "Its folder was brought back from `checkpoint.remote`.",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Event:
    """Describe something that happened to one island; each kind is a subclass."""

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    time: Annotated[float, "When it happened, in seconds since 1970 by the island's own clock."] = field(
        default_factory=clock.time
    )

    def __init_subclass__(cls, *, kind: str, version: int = 1) -> None:
        """Register a kind of event under the name that lines of the file have."""
        cls.kind, cls.version = kind, version
        KINDS[kind] = cls

    def plain(self) -> dict[str, Any]:
        """Return it as its line in the file has it; numbers that JSON lacks (NaN, infinity) are None."""
        values = {each.name: _finite(getattr(self, each.name)) for each in fields(self)}
        return {"event": self.kind, "v": self.version, **values}


@dataclass(frozen=True, kw_only=True)
class Start(Event, kind="start"):
    """Report that the island has the run's state and begins to train."""

    run: Annotated[str, "The run's name."]
    dir: Annotated[str, "The island's folder."]
    model: Annotated[str, "What is trained."]
    parameters: Annotated[int, "All parameters of the model."]
    trained_parameters: Annotated[int, "Those that are trained."]
    data: Annotated[str, "What it is trained on."]
    data_tokens: Annotated[int | None, "How much that is; null for a loop that brings its own."]
    device: Annotated[str, "The accelerator."]
    dtype: Annotated[str, "In which precision is computed."]
    mesh: Annotated[str, "How the island's processes are arranged."]
    steps: Annotated[int, "At which step the run ends."]
    every: Annotated[int | str, "`sync.every`: inner steps of a phase, or a time."]
    tokens_per_step: Annotated[int | None, "Tokens of an inner step; null for a loop that brings its own."]
    accumulate: Annotated[int | None, "Micro-batches of an inner step; null for a loop that brings its own."] = None


@dataclass(frozen=True, kw_only=True)
class WitnessStart(Event, kind="witness"):
    """Report that the island begins to store and vote; it trains nothing."""

    run: Annotated[str, "The run's name."]
    dir: Annotated[str, "The island's folder."]
    trained_parameters: Annotated[int, "Parameters of the outer state that it stores."]
    steps: Annotated[int, "At which step the run ends."]
    round: Annotated[int, "The round that it begins with."]


@dataclass(frozen=True, kw_only=True)
class Step(Event, kind="step"):
    """Report progress: after every `log.every` inner steps."""

    step: Annotated[int, "The run's clock."]
    loss: Annotated[float | None, "Mean training loss since the last such event."]
    tokens_per_s: Annotated[float, "Speed since the last such event, waits not counted."]
    mfu: Annotated[float | None, "Share of the accelerator's peak that was used; null if that peak is not known."] = (
        None
    )
    skipped: Annotated[int, "Steps so far whose gradients were not finite."] = 0
    lr: Annotated[float | None, "Learning rate of the last step; null for a loop that sets its own."] = None
    gradient_norm: Annotated[
        float | None, "Norm of the last step's gradient, before clipping; null if it is not finite, or not known."
    ] = None


@dataclass(frozen=True, kw_only=True)
class Wait(Event, kind="wait"):
    """Report a wait that ends now: for a round, for what is done after it, or for samples."""

    seconds: Annotated[float, "How long the island did not train."]


@dataclass(frozen=True, kw_only=True)
class Waiting(Event, kind="waiting"):
    """Report that the island has not trained for ten seconds, and again every minute while that lasts."""

    state: Annotated[str, "What it does instead: `waiting`, `sending` or `catching up`."]
    since: Annotated[float, "Since when, in seconds since 1970."]
    cause: Annotated[str, "Why it waits: a cause of the status; empty if it does not wait."] = ""
    islands: Annotated[tuple[str, ...], "For whom, by name, as far as it knows."] = ()


@dataclass(frozen=True, kw_only=True)
class Round(Event, kind="round"):
    """Report that a round was committed, with this island's contribution or without."""

    round: Annotated[int, "Its number."]
    fragment: Annotated[int, "Which part of the parameters it changed; -1 for none."] = 0
    contributors: Annotated[tuple[str, ...], "Whose progress it contains, by name; empty: it only leases samples."]
    islands: Annotated[int, "Members of the roster after it."] = 1
    tokens: Annotated[int, "Tokens behind all contributions."] = 0
    outer_lr: Annotated[float, "Learning rate of the outer update."] = 0.0
    step: Annotated[int, "The run's clock after it."]
    digest: Annotated[str, "The chain digest of its record."]
    applied_at: Annotated[float | None, "When its result was in this island's outer state."] = None
    late: Annotated[int, "Contributions of an earlier phase."] = 0
    samples: Annotated[tuple[Any, ...], "The samples behind each contribution, as ranges of positions."] = ()
    round_s: Annotated[float, "Seconds from this island's last launch until it saw the result; 0 for a witness."] = 0.0
    validated: Annotated[bool, "This island validates it: a `validation` follows."] = False
    pseudo_gradient_norm: Annotated[
        float | None, "Norm of this island's contribution as it was sent; null if the round has none of it."
    ] = None


@dataclass(frozen=True, kw_only=True)
class Validation(Event, kind="validation"):
    """Report the validation loss of the outer parameters."""

    step: Annotated[int, "The run's clock."]
    round: Annotated[int, "The last round that they contain."]
    validation_loss: Annotated[float | None, "Mean loss on `evaluate.samples` samples that nobody trains on."]
    contributed: Annotated[tuple[str, ...], "Who contributed to the last round, by name."] = ()
    islands: Annotated[int, "Members of the roster."] = 1


@dataclass(frozen=True, kw_only=True)
class IslandNews(Event, kind="elastic"):
    """Report what happened to an island: to this one, or to another as this one sees it."""

    what: Annotated[str, "One of the words below."]
    island: Annotated[str, "Whom it happened to, by name."]
    text: Annotated[str, "More about it, for people."] = ""


@dataclass(frozen=True, kw_only=True)
class Amended(Event, kind="amended"):
    """Report that a change by the run's owner is in force."""

    number: Annotated[int, "Its number: 1, 2, …"]
    text: Annotated[str, "What was changed."]
    steps: Annotated[int, "At which step the run ends now."]


@dataclass(frozen=True, kw_only=True)
class Note(Event, kind="note"):
    """Report what a person should know; it means nothing to programs."""

    text: Annotated[str, "One line."]


@dataclass(frozen=True, kw_only=True)
class Resume(Event, kind="resume"):
    """Report that the island goes on from a save of its own."""

    step: Annotated[int, "The run's clock."]
    path: Annotated[str, "The save's folder."]


@dataclass(frozen=True, kw_only=True)
class Saved(Event, kind="save"):
    """Report that a save is on disk."""

    step: Annotated[int, "The run's clock."]
    path: Annotated[str, "Its folder."]
    seconds: Annotated[float, "How long that took."]


@dataclass(frozen=True, kw_only=True)
class TicketReady(Event, kind="ticket"):
    """Report in which file the ticket lies with which others join."""

    file: Annotated[str, "Its path. The ticket itself is a secret, and in no event."]


@dataclass(frozen=True, kw_only=True)
class End(Event, kind="end"):
    """Report that the island has left the run in good order."""

    step: Annotated[int, "The run's clock."]
    finished: Annotated[bool, "The run is over: its last step is done, or its samples are consumed."] = False
    accelerator_bytes: Annotated[
        int | None, "The most memory of its leader's GPU that the island's tensors took at once; null on a CPU."
    ] = None


@dataclass(frozen=True, kw_only=True)
class Agreed(Event, kind="agreed"):
    """Report what the island holds at its end, to be compared with others'."""

    round: Annotated[int, "Its last round."]
    chain: Annotated[str, "The digest of the log."]
    state: Annotated[str, "The digest of the outer state."]
    tokens: Annotated[int, "Tokens behind all rounds."] = 0
    bytes_sent: Annotated[int, "Bytes that this island has sent for rounds."] = 0


@dataclass(frozen=True, kw_only=True)
class EventsLost(Event, kind="lost"):
    """Report that events before this one could not be written: the disk was full."""

    events: Annotated[int, "How many."]


Kind = TypeVar("Kind", bound=Event)


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """Return the events of one kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def read_event(line: object) -> Event | None:
    """Return the event in a parsed line; None for what is none, or of a kind or version that is not known here."""
    if not isinstance(line, dict) or (kind := KINDS.get(str(line.get("event")))) is None:
        return None
    version = line.get("v", 0)  # 0: before versions were written; nothing has been renamed since
    if not isinstance(version, int) or version > kind.version:
        return None
    given: dict[str, Any] = {each.name: line[each.name] for each in fields(kind) if each.name in line}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return kind(**given)
    except TypeError:  # a field is missing
        return None


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
