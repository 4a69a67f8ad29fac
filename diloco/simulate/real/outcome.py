"""Compute what came of a simulation, in numbers: for the summary, the page and report.json.

What an island did at each moment follows from the events it reported and from what was seen of its processes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from diloco.config.schema import Config
from diloco.model.accelerators import CPU
from diloco.plan.plan import describe
from diloco.plan.predict import Host, LinkModel, Situation, data_parallel_utilisation, predict
from diloco.plan.workload import workload_of
from diloco.report.board import Board
from diloco.report.events import End, Event, Round, Start, Step, Validation, Wait, of_kind
from diloco.report.sinks import EVENTS
from diloco.report.watching import LineTail, Tail
from diloco.simulate.real.faults import Fault
from diloco.simulate.real.fleet import SimulatedFleet, World
from diloco.simulate.real.network import TRAFFIC
from diloco.simulate.real.topology import Topology, island_name

STATES = ("joining", "computing", "waiting", "stopped", "dead")
BUSY_SHARE = 0.05  # of an uplink's rate: more is sending, less is heartbeats

Told = Mapping[str, Sequence[Event]]  # by island


@dataclass(frozen=True)
class Span:
    """Describe a stretch of time that an island spent in one of STATES."""

    begin_s: float
    end_s: float
    state: str

    @property
    def seconds(self) -> float:
        """Return how long it lasted."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Flow:
    """Hold the bytes that passed an island's link between two looks at it."""

    begin_s: float
    end_s: float
    sent: int
    received: int

    @property
    def up_bits_per_s(self) -> float:
        """Return the mean rate of sending in that time."""
        return 8 * self.sent / (self.end_s - self.begin_s)

    @property
    def down_bits_per_s(self) -> float:
        """Return the mean rate of receiving in that time."""
        return 8 * self.received / (self.end_s - self.begin_s)


@dataclass(frozen=True)
class LossPoint:
    """Hold a validation loss, and the steps, tokens, seconds and bytes until then."""

    step: int
    tokens: int
    seconds: float
    bytes: int  # sent by all islands
    loss: float


@dataclass(frozen=True)
class IslandOutcome:
    """Describe what one island did, sent and received."""

    name: str
    region: str
    spans: list[Span]
    sending: list[tuple[float, float]]
    flows: list[Flow]
    capacity: list[tuple[float, float, float]]  # from when on, up and down
    rounds: int
    seconds: dict[str, float]  # by state, since all islands trained, for as long as it was in the run
    utilisation: float
    sent: int
    received: int


@dataclass(frozen=True)
class FaultOutcome:
    """Describe a fault as it was given, and whether it happened."""

    said: str
    text: str
    kind: str
    at_s: float
    until_s: float | None
    islands: list[str]
    happened: bool


@dataclass(frozen=True)
class Computed:
    """Hold what was not run but computed by the planner.

    It assumes the step time of the slowest island, and the slowest link at its slowest.
    """

    step_s: float
    data_parallel_utilisation: float
    data_parallel_seconds: float  # for as many steps
    predicted_utilisation: float
    predicted_round_s: float


@dataclass(frozen=True)
class SimulationOutcome:
    """Describe one whole simulation.

    Times are seconds since all islands of the beginning trained; what came before is negative.
    """

    name: str
    setting: str
    model: str
    parameters: int
    seconds: float
    step: int
    rounds: int
    finished: bool
    agree: bool
    losses: list[LossPoint]
    islands: list[IslandOutcome]
    faults: list[FaultOutcome]
    utilisation: float
    computed: Computed | None  # None: nothing was trained
    measured_round_s: float | None = None  # None: no two islands had one

    def times(self, island: IslandOutcome) -> dict[str, float]:
        """Return how an island spent the run's seconds, by state for people; they add up to all of them."""
        others = {state: island.seconds[state] for state in STATES if state != "computing"}
        outside = max(0.0, self.seconds - sum(island.seconds.values()))
        return {"training": island.seconds["computing"], **others, "not in the run": outside}


def outcome_of(config: Config, world: World, fleet: SimulatedFleet) -> SimulationOutcome:
    """Read the islands' events and traffic from their folders, and compute the outcome of a fleet's run."""
    happened, board = fleet.happened, fleet.board
    told = {name: Tail(fleet.plan.folder / name / EVENTS).read() for name in fleet.plan.names}
    everything = sorted((event for events in told.values() for event in events), key=lambda event: event.time)
    zero = happened.zero or min((begin for lives in happened.lives.values() for begin, _ in lives), default=0.0)
    end = max((event.time for event in of_kind(everything, End)), default=happened.ended)
    islands = [
        _island(number, told[island_name(number)], fleet, zero=zero, end=end)
        for number in range(1, world.topology.islands + 1)
    ]
    start = next(iter(of_kind(everything, Start)), None)
    return SimulationOutcome(
        name=config.run, setting=describe(config.sync), model="" if start is None else start.model,
        parameters=0 if start is None else start.parameters, seconds=end - zero, step=board.step,
        rounds=sum(bool(event.contributors) for event in board.rounds), finished=board.finished, agree=board.agree,
        losses=_losses(everything, board, islands, zero), islands=islands,
        faults=[_fault(fault, took_effect=fault in happened.faults) for fault in world.faults],
        utilisation=_share(islands), computed=computed(config, world.topology, told, islands, steps=board.step),
        measured_round_s=usual_round_s(told),
    )  # fmt: skip


def _island(number: int, events: Sequence[Event], fleet: SimulatedFleet, *, zero: float, end: float) -> IslandOutcome:
    """Compute one island's outcome; `zero` and `end` are Unix times of the simulation's beginning and end."""
    name, site, happened = island_name(number), fleet.world.topology.site(number), fleet.happened
    lives, stops = happened.lives.get(name, []), happened.stops.get(name, [])
    spans = [Span(s.begin_s - zero, s.end_s - zero, s.state) for s in timeline(lives, stops, events, end)]
    samples = LineTail(fleet.plan.folder / name / TRAFFIC).lines()
    seen = [Flow(f.begin_s - zero, f.end_s - zero, f.sent, f.received) for f in flows(samples)]
    moments = [0.0, *(at_s for at_s, _ in site.changes if at_s < end - zero)]
    capacity = [(at_s, site.rates_at(at_s).up_bits_per_s, site.rates_at(at_s).down_bits_per_s) for at_s in moments]
    # what comes before all train is the start of processes, not of training
    counted = [Span(max(span.begin_s, 0.0), span.end_s, span.state) for span in spans if span.end_s > 0]
    seconds = {state: sum(span.seconds for span in counted if span.state == state) for state in STATES}
    there = sum(seconds.values())
    return IslandOutcome(
        name, site.region, spans, sending(seen, site.rates.up_bits_per_s), seen, capacity,
        fleet.board.contributions[name], seconds, seconds["computing"] / there if there else 0.0,
        sum(f.sent for f in seen), sum(f.received for f in seen),
    )  # fmt: skip


def _share(islands: Sequence[IslandOutcome]) -> float:
    """Return the share of all islands' time that was spent on training."""
    there = sum(sum(island.seconds.values()) for island in islands)
    return sum(island.seconds["computing"] for island in islands) / there if there else 0.0


def _losses(events: Sequence[Event], board: Board, islands: Sequence[IslandOutcome], zero: float) -> list[LossPoint]:
    """Return the losses of the outer parameters, each step once: that of the first island to report it."""
    tokens = {event.round: event.tokens for event in board.rounds}
    points: dict[int, LossPoint] = {}
    for event in of_kind(events, Validation):
        if event.validation_loss is not None and event.step not in points:
            seconds = event.time - zero
            trained = sum(count for number, count in tokens.items() if number <= event.round)
            sent = sum(flow.sent for island in islands for flow in island.flows if flow.end_s <= seconds)
            points[event.step] = LossPoint(event.step, trained, seconds, sent, event.validation_loss)
    return [points[step] for step in sorted(points)]


def _fault(fault: Fault, *, took_effect: bool) -> FaultOutcome:
    until_s = fault.until_s if math.isfinite(fault.until_s) else None
    names = [island_name(island) for island in (*fault.islands, *fault.others)]
    return FaultOutcome(fault.said, fault.describe(), fault.kind, fault.at_s, until_s, names, took_effect)


def computed(
    config: Config, topology: Topology, told: Told, islands: Sequence[IslandOutcome], *, steps: int
) -> Computed | None:
    """Predict utilisation and round time for all islands that came to train, late ones included."""
    step_s = slowest_step_s(config.island.batch * config.data.sequence, told)
    if step_s is None:
        return None
    trained = [island for island in islands if any(isinstance(event, Start | Step) for event in told[island.name])]
    rates = [rates for island in trained for rates in island.capacity]
    delay_s = max((path.delay_s for path in topology.paths.values()), default=0.0)
    line = LinkModel(min(up for _, up, _ in rates), min(down for _, _, down in rates), delay_s)
    situation = Situation(workload_of(config), len(trained), line, step_s, _host(config, told))
    expected, parallel = predict(situation, config.sync), data_parallel_utilisation(situation)
    return Computed(step_s, parallel, steps * step_s / parallel, expected.utilisation, expected.round_s)


def slowest_step_s(tokens: int, told: Told) -> float | None:
    """Return the seconds of a step on the slowest island, by each island's median; None: nobody trained.

    An island's first report includes its start: it counts only where no island has another.
    """
    reports = [[tokens / event.tokens_per_s for event in of_kind(events, Step)] for events in told.values()]
    usual = [times[1:] for times in reports if len(times) > 1] or [times for times in reports if times]
    return max(map(median, usual), default=None)


def usual_round_s(told: Told) -> float | None:
    """Return the median seconds from a round's last launch until all have applied it; None: no such round.

    The last launch counts, since an island that is ready early waits for the others. An island alone sends nothing: its
    rounds do not count.
    """
    rounds: dict[str, list[tuple[float, float]]] = {}
    for name, events in told.items():
        for event in of_kind(events, Round):
            if len(event.contributors) > 1 and name in event.contributors and event.applied_at is not None:
                rounds.setdefault(event.digest, []).append((event.time - event.round_s, event.applied_at))
    seconds = [max(applied for _, applied in times) - max(began for began, _ in times) for times in rounds.values()]
    return median(seconds) if seconds else None


def _host(config: Config, told: Told) -> Host:
    """Return what a round costs the leader's CPU, by the device that a `start` event names: a GPU has its own name."""
    starts = [event for events in told.values() for event in of_kind(events, Start)]
    device = next((event.device for event in starts), config.island.device)
    return Host(trains_too=True) if device == "auto" or device.startswith(CPU) else Host.of_gpus()


def write_json(outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Write all outcomes to one JSON file."""
    path.write_text(json.dumps({"simulations": [asdict(outcome) for outcome in outcomes]}, allow_nan=False) + "\n")


def timeline(
    lives: Sequence[Sequence[float]], stops: Sequence[Sequence[float]], events: Sequence[Event], end: float
) -> list[Span]:
    """Return what an island did, up to the run's `end` or its own orderly one.

    Where two states hold at a moment, the one that is added later here counts: stopped over dead, dead over waiting.
    """
    found: list[Span] = []
    for number, (begin, over) in enumerate(lives):
        mine = [event for event in events if begin <= event.time <= over]
        trains = next((event.time for event in of_kind(mine, Start)), over)
        ends = next((event.time for event in of_kind(mine, End)), None)
        until = min(ends if ends is not None else over, end)
        found += [Span(begin, trains, "joining"), Span(trains, until, "computing")]
        found += [Span(wait.time - wait.seconds, wait.time, "waiting") for wait in of_kind(mine, Wait)]
        again = lives[number + 1][0] if number + 1 < len(lives) else end
        if ends is None:
            found += [*untold_wait(mine, until), Span(over, again, "dead")]
    found += [Span(begin, over, "stopped") for begin, over in stops]
    return flat(found)


def untold_wait(events: Sequence[Event], until: float) -> list[Span]:
    """Return the wait in which an island was killed, if it was in one.

    Waits are reported when they end, so this one never was. The island is taken to have waited once it was silent for
    longer than its steps ever took.
    """
    told = [event for event in events if isinstance(event, Start | Step | Wait)]
    trained = [after.time - before.time for before, after in pairwise(told) if isinstance(after, Step)]
    begin = told[-1].time + max(trained) if trained else until
    return [Span(begin, until, "waiting")] if begin < until else []


def flat(spans: Sequence[Span]) -> list[Span]:
    """Return spans without overlaps, in order: later in the list covers earlier, and equal neighbours become one."""
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


def flows(samples: Sequence[dict[str, Any]]) -> list[Flow]:
    """Return the bytes between successive samples; the counters of a process that starts again begin at zero."""
    made: list[Flow] = []
    for before, after in pairwise(samples):
        again = after["sent"] < before["sent"] or after["received"] < before["received"]
        sent, received = (after[way] - (0 if again else before[way]) for way in ("sent", "received"))
        if after["time"] > before["time"]:
            made.append(Flow(before["time"], after["time"], sent, received))
    return made


def sending(seen: Sequence[Flow], up_bits_per_s: float) -> list[tuple[float, float]]:
    """Return when an island was sending: stretches with more than 5 % of its uplink's first rate."""
    busy: list[tuple[float, float]] = []
    for flow in (flow for flow in seen if flow.up_bits_per_s > BUSY_SHARE * up_bits_per_s):
        begin = busy.pop()[0] if busy and busy[-1][1] == flow.begin_s else flow.begin_s
        busy.append((begin, flow.end_s))
    return busy
