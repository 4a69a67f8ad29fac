"""What a run and its islands do right now: data for `diloco status`, `diloco why` and whoever watches from elsewhere.

A running island refreshes `status.json` in its folder every second and answers with the same over the network. It
comes from other machines too, so that reading it checks every field, and texts in it are nothing but text. Its fields
only ever grow; a reader ignores those that it does not know.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

STATUS = "status.json"  # in an island's folder
ASKED = "status.asked"  # beside it: touched by whoever wants to know what other islands say of themselves
REFRESH_S = 1.0
STALE_S = 5.0  # a status that is older says what was, not what is
MAX_TEXT, MAX_ISLANDS = 1000, 4096

STATES = {
    "starting": "it has not got the run's state yet",
    "training": "it does inner steps",
    "sending": "it takes part in an exchange, and waits for its end",
    "waiting": "it has done its part, and waits for the round or for others",
    "witnessing": "it stores and votes, and trains nothing",
    "catching up": "it fetches what it has missed",
    "leaving": "it has been asked to stop",
    "left": "it said goodbye",
    "lost": "nothing was heard of it for longer than `elastic.silence_s`, or its connection broke",
    "excluded": "its messages are ignored for a while",
    "evicted": "the run's owner has taken it out",
    "silent": "its process is there, and does not say what it does",
    "ended": "its process is gone",
}
# why an island does not train or contribute, as far as it knows
CAUSES = ("round", "quorum", "min_islands", "start_islands", "rejoin", "samples", "joining")


@dataclass(frozen=True)
class IslandStatus:
    """Describe one island: as it says itself, or as another one sees it."""

    island: str  # its peer id
    name: str = ""
    state: str = "starting"
    since: float = 0.0  # Unix time; 0: not known
    told_by: str = ""  # the name of who says so; its own: it says so itself
    waiting_for: tuple[str, ...] = ()  # islands, by name
    cause: str = ""  # one of CAUSES, where it waits
    text: str = ""  # more about it, for people
    member: bool = False  # it is in the roster
    leads: bool = False  # the present round
    round: int = 0
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None  # of inner steps, waits not counted, if it says so itself; else over its rounds
    share: float | None = None  # of the weights in the last round
    contributed: int = 0  # of the last `RunStatus.rounds` rounds, those that contain its work
    bytes_sent: int | None = None  # for rounds
    bytes_received: int | None = None
    write_s: float = 0.0  # what a write to its disk takes, as it says
    link_bytes_per_s: float | None = None  # in its last exchange
    link_limit_bytes_per_s: float | None = None  # as it was told to heed
    reaches_me: bool = True  # it hears the teller, and the teller hears it
    heard_by: tuple[str, ...] = ()  # of one that the teller has lost: who hears it nevertheless, by name
    device: str = ""
    disk: str = ""  # why nothing is durable at present; "": it is
    clock_off_s: float = 0.0  # of its machine's clock from the run's


@dataclass(frozen=True)
class RunStatus:
    """Describe a run as one of its islands sees it."""

    run: str
    me: str  # the peer id of the island that tells
    at: float  # Unix time
    round: int = 0
    step: int = 0
    steps: int = 0  # where it ends
    phase: str = "collecting"  # of the round: collecting, exchanging or storing
    phase_since: float = 0.0
    round_s: float | None = None  # what a round usually takes
    exchange_s: float = 0.0  # of it, the exchange
    eta_s: float | None = None
    rounds: int = 0  # the last rounds that shares are counted over
    loss: float | None = None  # mean training loss of the last round
    validation_loss: float | None = None
    min_islands: int = 1
    silence_s: float = 5.0
    quorum: bool = False  # every round needs one
    pid: int = 0
    pid_started: int = 0  # by the kernel's count, so that another process of that number is not taken for it
    supervisor: int = 0  # the process that started the island and restarts it; 0: none
    host: str = ""
    folder: str = ""
    diloco: str = ""  # its version
    ended: bool = False  # its process has left in good order
    finished: bool = False  # the run is over
    islands: tuple[IslandStatus, ...] = field(default=())

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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_status(folder: Path) -> RunStatus | None:
    """Return the last status that the island in this folder has written; None if there is none."""
    try:
        return decode_status((folder / STATUS).read_bytes())
    except OSError:
        return None


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


def _checked(kind: type[Kind], plain: Mapping[str, Any]) -> Kind:
    """Make a status of what was read: fields that are not known are ignored, others must have their type."""
    hints = get_type_hints(kind)
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
        return _of_type(value, int)
    if hint is float or float in get_args(hint):
        number = float(_of_type(value, (int, float)))
        return number if math.isfinite(number) else 0.0
    items = _of_type(value, (list, tuple))
    return tuple(each if isinstance(each, IslandStatus) else _text(each) for each in items[:MAX_ISLANDS])


def _text(value: Any) -> str:
    return str(_of_type(value, str))[:MAX_TEXT]


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
