"""What came of a simulation, in numbers: for the summary, the page and report.json."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from diloco.config.schema import Config
from diloco.model.accelerators import CPU
from diloco.plan.plan import describe
from diloco.plan.predict import Host, Line, Situation, data_parallel_utilisation, predict
from diloco.plan.workload import workload_of
from diloco.report.board import Board
from diloco.report.events import Event
from diloco.report.watching import Tail
from diloco.simulate.real.faults import Fault
from diloco.simulate.real.fleet import SimulatedFleet, World
from diloco.simulate.real.network import TRAFFIC
from diloco.simulate.real.timeline import STATES, Flow, Span, flows, sending, timeline
from diloco.simulate.real.topology import Topology, island_name

Told = Mapping[str, Sequence[Event]]  # by island


@dataclass(frozen=True)
class LossPoint:
    step: int
    tokens: int
    seconds: float
    bytes: int  # sent by all islands
    loss: float


@dataclass(frozen=True)
class IslandStory:
    name: str
    region: str
    spans: list[Span]
    sending: list[tuple[float, float]]
    flows: list[Flow]
    capacity: list[tuple[float, float, float]]  # from when on, up and down
    rounds: int
    seconds: dict[str, float]  # by state, from its first step to the end of the run
    utilisation: float
    sent: int
    received: int


@dataclass(frozen=True)
class FaultStory:
    said: str
    text: str
    kind: str
    at_s: float
    until_s: float | None
    islands: list[str]
    happened: bool


@dataclass(frozen=True)
class Computed:
    """Not run: from the planner, with the step time of the slowest island and the slowest link at its slowest."""

    step_s: float
    data_parallel_utilisation: float
    data_parallel_seconds: float  # for as many steps
    predicted_utilisation: float
    predicted_round_s: float


@dataclass(frozen=True)
class Story:
    """Times are seconds since all islands of the beginning trained; what came before is negative."""

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
    islands: list[IslandStory]
    faults: list[FaultStory]
    utilisation: float
    computed: Computed | None  # None: nothing was trained
    measured_round_s: float | None = None  # None: no two islands had one


def story_of(config: Config, world: World, fleet: SimulatedFleet) -> Story:
    happened, board = fleet.happened, fleet.board
    told = {name: Tail(fleet.plan.folder / name / "events.jsonl").read() for name in fleet.plan.names}
    everything = sorted((event for events in told.values() for event in events), key=lambda event: event["time"])
    zero = happened.zero or min((begin for lives in happened.lives.values() for begin, _ in lives), default=0.0)
    end = max((event["time"] for event in everything if event["event"] == "end"), default=happened.ended)
    islands = [
        _island(number, told[island_name(number)], fleet, zero=zero, end=end)
        for number in range(1, world.topology.islands + 1)
    ]
    start: Event = next((event for event in everything if event["event"] == "start"), {})
    return Story(
        name=config.run, setting=describe(config.sync), model=start.get("model", ""),
        parameters=start.get("parameters", 0), seconds=end - zero, step=board.step,
        rounds=sum(bool(event["contributors"]) for event in board.rounds), finished=board.finished, agree=board.agree,
        losses=_losses(everything, board, islands, zero), islands=islands,
        faults=[_fault(fault, took_effect=fault in happened.faults) for fault in world.faults],
        utilisation=_share(islands), computed=computed(config, world.topology, told, islands, steps=board.step),
        measured_round_s=usual_round_s(told),
    )  # fmt: skip


def _island(number: int, events: Sequence[Event], fleet: SimulatedFleet, *, zero: float, end: float) -> IslandStory:
    name, site, happened = island_name(number), fleet.world.topology.site(number), fleet.happened
    lives, stops = happened.lives.get(name, []), happened.stops.get(name, [])
    spans = [Span(s.begin_s - zero, s.end_s - zero, s.state) for s in timeline(lives, stops, events, end)]
    samples = Tail(fleet.plan.folder / name / TRAFFIC).read()
    seen = [Flow(f.begin_s - zero, f.end_s - zero, f.sent, f.received) for f in flows(samples)]
    moments = [0.0, *(at_s for at_s, _ in site.changes if at_s < end - zero)]
    capacity = [(at_s, site.rates_at(at_s).up_bits_per_s, site.rates_at(at_s).down_bits_per_s) for at_s in moments]
    # what comes before all train is the start of processes, not of training
    counted = [Span(max(span.begin_s, 0.0), span.end_s, span.state) for span in spans if span.end_s > 0]
    seconds = {state: sum(span.seconds for span in counted if span.state == state) for state in STATES}
    there = sum(seconds.values())
    return IslandStory(
        name, site.region, spans, sending(seen, site.rates.up_bits_per_s), seen, capacity,
        fleet.board.contributions[name], seconds, seconds["computing"] / there if there else 0.0,
        sum(f.sent for f in seen), sum(f.received for f in seen),
    )  # fmt: skip


def _share(islands: Sequence[IslandStory]) -> float:
    """Of the time of all of them that was spent on training."""
    there = sum(sum(island.seconds.values()) for island in islands)
    return sum(island.seconds["computing"] for island in islands) / there if there else 0.0


def _losses(events: Sequence[Event], board: Board, islands: Sequence[IslandStory], zero: float) -> list[LossPoint]:
    """Of the outer parameters; each step once, by whoever tells it first."""
    tokens = {event["round"]: event["tokens"] for event in board.rounds}
    points: dict[int, LossPoint] = {}
    for event in events:
        if event["event"] == "validation" and event["validation_loss"] is not None and event["step"] not in points:
            seconds = event["time"] - zero
            trained = sum(count for number, count in tokens.items() if number <= event["round"])
            sent = sum(flow.sent for island in islands for flow in island.flows if flow.end_s <= seconds)
            points[event["step"]] = LossPoint(event["step"], trained, seconds, sent, event["validation_loss"])
    return [points[step] for step in sorted(points)]


def _fault(fault: Fault, *, took_effect: bool) -> FaultStory:
    until_s = fault.until_s if math.isfinite(fault.until_s) else None
    names = [island_name(island) for island in (*fault.islands, *fault.others)]
    return FaultStory(fault.said, fault.describe(), fault.kind, fault.at_s, until_s, names, took_effect)


def computed(
    config: Config, topology: Topology, told: Told, islands: Sequence[IslandStory], *, steps: int
) -> Computed | None:
    """Of all who came to train, the late ones among them."""
    step_s = slowest_step_s(config.island.batch * config.data.sequence, told)
    if step_s is None:
        return None
    trained = [island for island in islands if _told_of(told[island.name], "start", "step")]
    rates = [rates for island in trained for rates in island.capacity]
    delay_s = max((path.delay_s for path in topology.paths.values()), default=0.0)
    line = Line(min(up for _, up, _ in rates), min(down for _, _, down in rates), delay_s)
    situation = Situation(workload_of(config), len(trained), line, step_s, _host(config, told))
    expected, parallel = predict(situation, config.sync), data_parallel_utilisation(situation)
    return Computed(step_s, parallel, steps * step_s / parallel, expected.utilisation, expected.round_s)


def slowest_step_s(tokens: int, told: Told) -> float | None:
    """By the median of each island. Its first report has its start in it: that counts where nobody has another."""
    reports = [[tokens / event["tokens_per_s"] for event in _told_of(events, "step")] for events in told.values()]
    usual = [times[1:] for times in reports if len(times) > 1] or [times for times in reports if times]
    return max(map(median, usual), default=None)


def usual_round_s(told: Told) -> float | None:
    """From the last launch, since who is ready early waits for the others, until all have applied it. An island alone
    sends nothing: its rounds do not count."""
    rounds: dict[str, list[tuple[float, float]]] = {}
    for name, events in told.items():
        for event in _told_of(events, "round"):
            if len(event["contributors"]) > 1 and name in event["contributors"] and event["applied_at"] is not None:
                rounds.setdefault(event["digest"], []).append((event["time"] - event["round_s"], event["applied_at"]))
    seconds = [max(applied for _, applied in times) - max(began for began, _ in times) for times in rounds.values()]
    return median(seconds) if seconds else None


def _host(config: Config, told: Told) -> Host:
    """As a start tells it: a GPU has a name of its own."""
    starts = [event for events in told.values() for event in _told_of(events, "start")]
    device = next((event["device"] for event in starts if "device" in event), config.island.device)
    return Host(trains_too=True) if device == "auto" or device.startswith(CPU) else Host.of_gpus()


def _told_of(events: Sequence[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["event"] in kinds]


def write_json(stories: Sequence[Story], path: Path) -> None:
    path.write_text(json.dumps({"simulations": [asdict(story) for story in stories]}, allow_nan=False) + "\n")
