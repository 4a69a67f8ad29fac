"""What an island did at each moment, from what it told and what was seen of its processes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from diloco.report.events import Event

STATES = ("joining", "computing", "waiting", "stopped", "dead")
BUSY_SHARE = 0.05  # of an uplink's rate: more is sending, less is heartbeats


@dataclass(frozen=True)
class Span:
    begin_s: float
    end_s: float
    state: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def timeline(
    lives: Sequence[Sequence[float]], stops: Sequence[Sequence[float]], events: Sequence[Event], end: float
) -> list[Span]:
    """Up to the run's `end`, or to its own in good order. Of two that hold at a moment, the later one below counts."""
    found: list[Span] = []
    for number, (begin, over) in enumerate(lives):
        mine = [event for event in events if begin <= event["time"] <= over]
        trains = next((event["time"] for event in mine if event["event"] == "start"), over)
        ends = next((event["time"] for event in mine if event["event"] == "end"), None)
        until = min(ends if ends is not None else over, end)
        found += [Span(begin, trains, "joining"), Span(trains, until, "computing")]
        found += [Span(e["time"] - e["seconds"], e["time"], "waiting") for e in mine if e["event"] == "wait"]
        again = lives[number + 1][0] if number + 1 < len(lives) else end
        if ends is None:
            found += [*untold_wait(mine, until), Span(over, again, "dead")]
    found += [Span(begin, over, "stopped") for begin, over in stops]
    return flat(found)


def untold_wait(events: Sequence[Event], until: float) -> list[Span]:
    """Waits are told when they end, so who is killed in one tells none: it was silent for longer than its steps ever
    took until it told of them."""
    told = [event for event in events if event["event"] in ("start", "step", "wait")]
    trained = [after["time"] - before["time"] for before, after in pairwise(told) if after["event"] == "step"]
    begin = told[-1]["time"] + max(trained) if trained else until
    return [Span(begin, until, "waiting")] if begin < until else []


def flat(spans: Sequence[Span]) -> list[Span]:
    """Without overlaps, in order: the later of two in the list covers the earlier; neighbours alike become one."""
    made: list[Span] = []
    for begin, end in pairwise(sorted({moment for span in spans for moment in (span.begin_s, span.end_s)})):
        covering = [span.state for span in spans if span.begin_s <= begin and end <= span.end_s]
        if not covering:
            continue
        if made and made[-1].end_s == begin and made[-1].state == covering[-1]:
            made[-1] = Span(made[-1].begin_s, end, covering[-1])
        else:
            made.append(Span(begin, end, covering[-1]))
    return made


@dataclass(frozen=True)
class Flow:
    """Between two looks at a link."""

    begin_s: float
    end_s: float
    sent: int
    received: int

    @property
    def up_bits_per_s(self) -> float:
        return 8 * self.sent / (self.end_s - self.begin_s)

    @property
    def down_bits_per_s(self) -> float:
        return 8 * self.received / (self.end_s - self.begin_s)


def flows(samples: Sequence[dict[str, Any]]) -> list[Flow]:
    """Counters of a process that starts again begin at nothing."""
    made: list[Flow] = []
    for before, after in pairwise(samples):
        again = after["sent"] < before["sent"] or after["received"] < before["received"]
        sent, received = (after[way] - (0 if again else before[way]) for way in ("sent", "received"))
        if after["time"] > before["time"]:
            made.append(Flow(before["time"], after["time"], sent, received))
    return made


def sending(seen: Sequence[Flow], up_bits_per_s: float) -> list[tuple[float, float]]:
    busy: list[tuple[float, float]] = []
    for flow in (flow for flow in seen if flow.up_bits_per_s > BUSY_SHARE * up_bits_per_s):
        begin = busy.pop()[0] if busy and busy[-1][1] == flow.begin_s else flow.begin_s
        busy.append((begin, flow.end_s))
    return busy
