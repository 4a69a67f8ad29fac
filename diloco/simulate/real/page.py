"""Render the report as one HTML file that needs nothing else, of the parts that every page about a run is made of."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from diloco.report.page import chart, panel, still_page, table
from diloco.report.shape import Bar, Curve, LinkUse, Mark, TimelineRow
from diloco.simulate.real.outcome import IslandOutcome, SimulationOutcome
from diloco.units import format_count, format_duration, format_size

OVERVIEW = (
    "run", "setting", "islands", "time", "rounds", "loss", "sent by each", "trained", "data parallel (computed)"
)  # fmt: skip
UTILISATION = (
    "Share of the time, since all islands train, that each spent on training steps. Bars without a fill were not run: "
    "they are computed from the step time of the slowest island and the slowest link at its slowest. Data parallel "
    "sends 16-bit gradients every step while the backward pass goes on."
)
TIMELINE = "What each island did; the strip below a bar is what it sent. Dashed lines and diamonds are faults."
LINKS = "What passed each island's link, headers and encryption included, and what could have."


def write_page(outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Write the report of all outcomes as an HTML file."""
    path.write_text(page(outcomes), encoding="utf-8")


def page(outcomes: Sequence[SimulationOutcome]) -> str:
    """Render the report: an overview of all outcomes first, then the details of each."""
    title = "Simulated: " + ", ".join(dict.fromkeys(outcome.name for outcome in outcomes))
    drawings = list[Any]()

    def drawn(kind: str, data: Any) -> str:
        drawings.append(data)
        return chart(kind, len(drawings) - 1)

    sections = [
        panel("overview", "Overview", table(OVERVIEW, map(_summary_row, outcomes))),
        panel("losses", "Loss of the outer parameters", drawn("losses", losses(outcomes))),
        panel("utilisation", "Utilisation", drawn("utilisation", utilisation(outcomes)), UTILISATION),
    ]
    for number, outcome in enumerate(outcomes, start=1):
        of = f" of {outcome.name}" if len(outcomes) > 1 else ""
        story = drawn("timeline", timeline_of(outcome))
        sections += [
            panel(f"islands-{number}", f"Islands{of}", f"<p>{_about(outcome)}</p>{_islands(outcome)}"),
            panel(f"timeline-{number}", f"Timeline{of}", story + _faults(outcome), TIMELINE),
            panel(f"traffic-{number}", f"Links{of}", drawn("links", traffic(outcome)), LINKS),
        ]  # fmt: skip
    top = f'<header class="top"><div class="title"><h1>{escape(title)}</h1></div></header>'
    body = f'<div class="simulated">{top}<main>{"".join(sections)}</main></div>'
    return still_page(title, body, {"drawings": drawings})


def _summary_row(outcome: SimulationOutcome) -> list[str]:
    """Return an outcome's cells of the overview."""
    loss = f"{outcome.losses[0].loss:.3f} → {outcome.losses[-1].loss:.3f}" if outcome.losses else "not measured"
    parallel = "" if outcome.computed is None else (
        f"{100 * outcome.computed.data_parallel_utilisation:.1f} % trained, "
        f"{format_duration(outcome.computed.data_parallel_seconds)} for as many steps"
    )  # fmt: skip
    ended = "" if outcome.finished else ' <span class="bad">not finished</span>'
    sent = format_size(mean(island.sent for island in outcome.islands))
    return [
        f"{escape(outcome.name)}{ended}", escape(outcome.setting.removeprefix("sync: ")), str(len(outcome.islands)),
        format_duration(outcome.seconds), str(outcome.rounds), loss, sent,
        f"{100 * outcome.utilisation:.0f} %", f'<span class="computed">{parallel}</span>',
    ]  # fmt: skip


def _about(outcome: SimulationOutcome) -> str:
    """Describe what was trained, whether the islands agree, and how long a round took, as HTML."""
    same = "all who saw the end hold the same bits" if outcome.agree else "the islands' states were not seen to agree"
    size = format_count(outcome.parameters)
    return f"{escape(outcome.model)}, {size} parameters, {escape(outcome.setting)}; {same}.{_round(outcome)}"


def _round(outcome: SimulationOutcome) -> str:
    """Compare the measured time of a round with the computed one, in a sentence."""
    if outcome.measured_round_s is None or outcome.computed is None:
        return ""
    measured, planned = map(format_duration, (outcome.measured_round_s, outcome.computed.predicted_round_s))
    computed = f'<span class="computed">{planned} as computed</span>'
    return f" A round took {measured} from its last launch until all had applied it (median); {computed}."


def _islands(outcome: SimulationOutcome) -> str:
    states = outcome.times(outcome.islands[0])
    head = ("island", "trained", *states, "in rounds", "sent", "received")
    rows = (
        [
            escape(label_of(island)), f"{100 * island.utilisation:.0f} %",
            *map(format_duration, outcome.times(island).values()),
            f"{island.rounds} of {outcome.rounds}", format_size(island.sent), format_size(island.received),
        ]
        for island in outcome.islands
    )  # fmt: skip
    return table(head, rows)


def _faults(outcome: SimulationOutcome) -> str:
    if not outcome.faults:
        return ""
    rows = (
        [
            f"{fault.at_s:g} s", escape(fault.text), f"<code>{escape(fault.said)}</code>",
            "" if fault.happened else '<span class="bad">did not happen: the run, or the island, had ended</span>',
        ]
        for fault in outcome.faults
    )  # fmt: skip
    return table(("at", "fault", "as given", ""), rows)


def losses(outcomes: Sequence[SimulationOutcome]) -> list[dict[str, Any]]:
    """Return the validation losses of all outcomes over steps, tokens, seconds and bytes."""
    return [
        vars(
            Curve(
                name_of(outcome, outcomes), "validation", [point.step for point in outcome.losses],
                [point.tokens for point in outcome.losses], [point.seconds for point in outcome.losses],
                [point.bytes for point in outcome.losses], [point.loss for point in outcome.losses],
            )
        )
        for outcome in outcomes
    ]  # fmt: skip


def name_of(outcome: SimulationOutcome, outcomes: Sequence[SimulationOutcome]) -> str:
    """Return an outcome's name, with its setting where another outcome has the same name."""
    same = [other for other in outcomes if other.name == outcome.name]
    return outcome.name if len(same) == 1 else f"{outcome.name} {outcome.setting.removeprefix('sync: ')}"


def timeline_of(outcome: SimulationOutcome) -> dict[str, Any]:
    """Return what each island did over time, with the faults that happened."""
    rows = [
        TimelineRow(
            label_of(island), [(span.begin_s, span.end_s, span.state) for span in island.spans], island.sending
        )
        for island in outcome.islands
    ]  # fmt: skip
    places = {island.name: place for place, island in enumerate(outcome.islands)}
    marks = []
    for fault in (fault for fault in outcome.faults if fault.happened and fault.kind != "slow"):
        until = min(fault.until_s, outcome.seconds) if fault.kind == "cut" and fault.until_s is not None else None
        mark = vars(Mark(fault.at_s, fault.kind, fault.text, until=until))
        marks.append({**mark, "line": True, "row": places[fault.islands[0]] if fault.kind == "kill" else -1})
    return {"rows": [vars(row) for row in rows], "phases": [], "marks": marks, "zero": None}


def label_of(island: IslandOutcome) -> str:
    """Return an island's name, with its region if it has one."""
    return f"{island.name} ({island.region})" if island.region else island.name


def traffic(outcome: SimulationOutcome) -> list[dict[str, Any]]:
    """Return what each island's link carried, and what it could have carried."""
    return [
        vars(
            LinkUse(
                label_of(island), [(flow.begin_s + flow.end_s) / 2 for flow in island.flows],
                [flow.up_bits_per_s for flow in island.flows], [flow.down_bits_per_s for flow in island.flows],
                island.capacity, outcome.seconds,
            )
        )
        for island in outcome.islands
    ]  # fmt: skip


def utilisation(outcomes: Sequence[SimulationOutcome]) -> list[dict[str, Any]]:
    """Return the measured share of training of each island, and below it what the planner computes."""
    bars: list[Bar] = []
    for outcome in outcomes:
        name = f"{name_of(outcome, outcomes)}: " if len(outcomes) > 1 else ""
        bars += [Bar(f"{name}{label_of(island)}", island.utilisation) for island in outcome.islands]
        if outcome.computed is not None:
            bars.append(Bar(f"{name}planned (computed)", outcome.computed.predicted_utilisation, computed=True))
            bars.append(
                Bar(f"{name}data parallel (computed)", outcome.computed.data_parallel_utilisation, computed=True)
            )
    return [vars(bar) for bar in bars]
