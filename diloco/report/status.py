"""What a run and its islands do right now: data for `diloco status`, `diloco why` and whoever watches from elsewhere.

A running island refreshes `status.json` in its folder every second and answers with the same over the network. It
comes from other machines too, so that reading it checks every field; control characters in its texts are replaced. Its
fields only ever grow; a reader ignores those that it does not know.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from diloco.report.tables import harmless

STATUS = "status.json"  # in an island's folder
ASKED = "status.asked"  # beside it: touched by whoever wants to know what other islands say of themselves
REFRESH_S = 1.0
STALE_S = 5.0  # a status that is older says what was, not what is
MAX_TEXT, MAX_ISLANDS = 1000, 4096
MAX_COUNT, MAX_NUMBER = 2**63, 1e15  # what is larger counts nothing, and is no time or rate

STATES = {
    "starting": "it has not got the run's state yet",
    "training": "it does inner steps",
    "sending": "it takes part in an exchange, and waits for its end",
    "waiting": "it has done its part, and waits for the round or for others",
    "witnessing": "it stores and votes, and trains nothing",
    "catching up": "it fetches what it has missed",
    "leaving": "it has been asked to stop",
    "left": "it said goodbye",
    "lost": "nothing was heard of it for longer than `elastic.silence_s`, its connection broke, or no island here runs",
    "excluded": "its messages are ignored for a while",
    "evicted": "the run's owner has taken it out",
    "silent": "its process is there, and does not say what it does",
    "ended": "its process is gone",
}
CAUSES = {  # why an island waits, as far as it knows
    "round": "for a round, or for those who have not come to it",
    "quorum": "too few members are heard to decide a round",
    "returning": "it has come back, and looks for its last roster for `elastic.rejoin_s` before it goes on alone",
    "min_islands": "fewer islands are there than `elastic.min_islands`",
    "start_islands": "the first round waits for `elastic.start_islands`",
    "samples": "none are leased to it",
    "joining": "it is not in the roster yet",
}


@dataclass(frozen=True)
class IslandStatus:
    """Describe one island: as it says itself, or as another one sees it."""

    island: Annotated[str, "Its peer id."]
    name: Annotated[str, "What it is called."] = ""
    state: Annotated[str, "One of the states below."] = "starting"
    since: Annotated[
        float, "Since when, in seconds since 1970; of one that is lost, when it was heard last; 0: not known."
    ] = 0.0
    told_by: Annotated[str, "The name of who says so; its own: it says so itself."] = ""
    waiting_for: Annotated[tuple[str, ...], "The islands that it, or the round that it leads, waits for, by name."] = ()
    cause: Annotated[str, "Why it waits: one of the causes below; empty if for nothing."] = ""
    text: Annotated[str, "More about its state, for people."] = ""
    member: Annotated[bool, "It is in the roster."] = False
    leads: Annotated[bool, "It leads the present round."] = False
    round: Annotated[int, "The last round that it has."] = 0
    step: Annotated[int, "The run's clock there."] = 0
    loss: Annotated[float | None, "Its mean training loss, of its last steps or of its last contribution."] = None
    tokens_per_s: Annotated[float | None, "Its speed without waits, if it says so itself; else over its rounds."] = None
    share: Annotated[float | None, "Its share of the weights in the last round, from 0 to 1."] = None
    contributed: Annotated[int, "How many of the last `rounds` rounds contain its work."] = 0
    bytes_sent: Annotated[int | None, "Bytes that it has sent for rounds since it started."] = None
    bytes_received: Annotated[int | None, "Bytes that it has received for rounds."] = None
    write_s: Annotated[float, "What a write to its disk takes, in seconds."] = 0.0
    link_bytes_per_s: Annotated[float | None, "At which rate its last exchange ran."] = None
    link_limit_bytes_per_s: Annotated[float | None, "The rate that it was told not to exceed."] = None
    reaches_me: Annotated[bool, "It and the teller hear each other."] = True
    heard_by: Annotated[tuple[str, ...], "Of one that the teller has lost: who hears it nevertheless, by name."] = ()
    device: Annotated[str, "Its accelerator."] = ""
    disk: Annotated[str, "Why nothing is durable there at present; empty: it is."] = ""
    clock_off_s: Annotated[float, "By how much its machine's clock is behind the run's."] = 0.0


@dataclass(frozen=True)
class RunStatus:
    """Describe a run as one of its islands sees it."""

    run: Annotated[str, "The run's name."]
    me: Annotated[str, "The peer id of the island that tells."]
    at: Annotated[float, "When it told, in seconds since 1970."]
    round: Annotated[int, "The last committed round."] = 0
    step: Annotated[int, "The run's clock."] = 0
    steps: Annotated[int, "Where it ends; 0: not known."] = 0
    phase: Annotated[str, "Of the round that comes next: collecting, exchanging or storing."] = "collecting"
    phase_since: Annotated[float, "Since when, in seconds since 1970."] = 0.0
    round_s: Annotated[float | None, "What a round usually takes."] = None
    exchange_s: Annotated[float, "What an exchange usually takes."] = 0.0
    eta_s: Annotated[float | None, "Seconds until the last step, at the pace of the last rounds."] = None
    rounds: Annotated[int, "The last rounds with contributions that shares are counted over."] = 0
    loss: Annotated[float | None, "Mean training loss behind the last round, by weight."] = None
    validation_loss: Annotated[float | None, "The last one, on the island that validates."] = None
    min_islands: Annotated[int, "`elastic.min_islands`."] = 1
    silence_s: Annotated[float, "`elastic.silence_s`."] = 5.0
    quorum: Annotated[bool, "Every round needs a quorum."] = False
    pid: Annotated[int, "The island's process."] = 0
    pid_started: Annotated[int, "When that was started, by the kernel's count; 0: not known."] = 0
    host: Annotated[str, "The machine's name."] = ""
    folder: Annotated[str, "The island's folder."] = ""
    diloco: Annotated[str, "Its version."] = ""
    command: Annotated[str, "In the island's folder only: what starts it again, so that it continues."] = ""
    ended: Annotated[bool, "The process has left in good order."] = False
    failed: Annotated[bool, "The process has left by an error, or by a signal while it joined."] = False
    finished: Annotated[bool, "The run is over."] = False
    islands: Annotated[tuple[IslandStatus, ...], "The teller first, then all that it knows."] = field(default=())

    @property
    def own(self) -> IslandStatus:
        """Return the status of the island that tells."""
        return next((each for each in self.islands if each.island == self.me), IslandStatus(self.me))

    def island(self, name: str) -> IslandStatus | None:
        """Return the island of this name, or whose id ends so; None if there is none."""
        named = [each for each in self.islands if each.name == name]
        by_key = [each for each in self.islands if len(name) >= 8 and each.island.endswith(name)]
        return next(iter(named or by_key), None)

    def encode(self) -> bytes:
        """Return it as JSON."""
        plain = {**vars(self), "islands": [vars(each) for each in self.islands]}  # asdict would copy all of it
        try:
            return json.dumps(plain, allow_nan=False).encode()
        except ValueError:  # a loss that is no number
            return json.dumps(_finite(plain)).encode()

    @property
    def is_over(self) -> bool:
        """Tell whether the process has said that it takes part no longer."""
        return self.ended or self.failed

    def is_stale(self, now: float) -> bool:
        """Tell whether it says what was, not what is."""
        return now - self.at > STALE_S


def decode_status(raw: bytes) -> RunStatus | None:
    """Return the status in these bytes; None for what is none, such as what a peer of ill will sends."""
    try:
        plain = json.loads(raw)
        listed = plain["islands"][:MAX_ISLANDS]
        islands = tuple(_checked(IslandStatus, each) for each in listed)
        return _checked(RunStatus, {**plain, "islands": islands})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError):
        return None


def read_status(folder: Path) -> RunStatus | None:
    """Return the last status that the island in this folder has written; None if there is none."""
    try:
        return decode_status((folder / STATUS).read_bytes())
    except OSError:
        return None


def ask_for_others(folder: Path) -> bool:
    """Have the island in this folder ask others what they do, for the next seconds; return False if that is refused."""
    try:
        (folder / ASKED).touch()
    except OSError:
        return False
    return True


def redated(status: RunStatus, at: float) -> RunStatus:
    """Return a status of another machine with its times by this one's clock, by which it was told at this time."""
    ahead = status.at - at
    islands = [replace(each, since=each.since - ahead) if each.since else each for each in status.islands]
    return replace(status, at=at, phase_since=status.phase_since - ahead, islands=tuple(islands))


def merged(view: RunStatus, reports: Iterable[RunStatus]) -> RunStatus:
    """Return what one island sees, with what others say of themselves in place of that."""
    fresh = [report for report in reports if not report.is_stale(view.at) and report.me != view.me]
    said = {report.me: report.own for report in fresh}
    seen = [_believed(each, said.get(each.island), view.own.name) for each in view.islands]
    seen = [replace(each, heard_by=_hearing(each, fresh)) if each.state == "lost" else each for each in seen]
    leader = next((each for each in seen if each.leads and each.waiting_for), None)
    if leader is not None:  # others only know that they wait: the coordinator knows for whom
        seen = [_informed(each, leader) for each in seen]
    return replace(view, islands=tuple(seen))


def _believed(seen: IslandStatus, said: IslandStatus | None, teller: str) -> IslandStatus:
    if said is None or seen.state in ("lost", "left", "evicted"):
        return seen
    # what a round shows, and what is known of the way there, is not for the island itself to say
    said = replace(
        said, name=seen.name, share=seen.share, contributed=seen.contributed, member=seen.member,
        reaches_me=seen.reaches_me,
    )  # fmt: skip
    return replace(said, state=seen.state, text=seen.text, told_by=teller) if seen.state == "excluded" else said


def _hearing(lost: IslandStatus, reports: Iterable[RunStatus]) -> tuple[str, ...]:
    """Return the names of those who hear an island that somebody else has lost."""
    away = ("lost", "left", "evicted", "ended", "excluded")
    hearing = [
        report.own.name for report in reports
        if any(each.island == lost.island and each.state not in away and each.reaches_me for each in report.islands)
    ]  # fmt: skip
    return tuple(sorted(set(hearing) - {lost.name}))


def _informed(each: IslandStatus, leader: IslandStatus) -> IslandStatus:
    if each.state != "waiting" or each.cause != "round" or each.waiting_for not in ((), (leader.name,)):
        return each
    return replace(each, waiting_for=tuple(name for name in leader.waiting_for if name != each.name))


Kind = TypeVar("Kind", IslandStatus, RunStatus)
HINTS = {kind.__name__: get_type_hints(kind) for kind in (IslandStatus, RunStatus)}  # once: it takes long


def _checked(kind: type[Kind], plain: Mapping[str, Any]) -> Kind:
    """Make a status of what was read: fields that are not known are ignored, others must have their type."""
    hints = HINTS[kind.__name__]
    given = {each.name: plain[each.name] for each in fields(kind) if each.name in plain}
    return kind(**{name: _fitting(value, hints[name]) for name, value in given.items()})


def _fitting(value: Any, hint: Any) -> Any:
    if value is None and type(None) in get_args(hint):
        return None
    if hint is str:
        return _text(value)
    if hint is bool:
        return _of_type(value, bool)
    if hint is int or int in get_args(hint):
        return _count(value)
    if hint is float or float in get_args(hint):
        number = _of_type(value, (int, float))
        return float(number) if -MAX_NUMBER < number < MAX_NUMBER else 0.0
    items = _of_type(value, (list, tuple))
    return tuple(each if isinstance(each, IslandStatus) else _text(each) for each in items[:MAX_ISLANDS])


def _text(value: Any) -> str:
    return harmless(_of_type(value, str)[:MAX_TEXT])


def _count(value: Any) -> int:
    if not 0 <= _of_type(value, int) < MAX_COUNT:
        raise ValueError("no number of anything")
    return int(value)


def _of_type(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is not of type {kind}")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
