"""Render the report as one HTML file that needs nothing else: no script, no font, no network.

Its plots are SVG with text that can be selected, one function for each figure.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from diloco.errors import MissingExtra
from diloco.simulate.real.outcome import STATES, IslandOutcome, SimulationOutcome
from diloco.units import format_count, format_duration, format_rate, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1000px; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
figure { margin: 1rem 0 2rem; } figcaption { color: #555; font-size: .9rem; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; font-weight: 600; }
.computed { color: #666; font-style: italic; } .bad { color: #b0392b; }
"""
OVERVIEW = (
    "run", "setting", "islands", "time", "rounds", "loss", "sent by each", "trained", "data parallel (computed)"
)  # fmt: skip
COLOURS = {
    "computing": "#3b8f5a", "waiting": "#e0b13c", "joining": "#6f9fd8", "stopped": "#9a7fc0", "dead": "#c8554a",
}  # fmt: skip
SENDING, CUT, LINE = "#27496d", "#b0392b", ("#27496d", "#c2662d", "#3b8f5a", "#9a4f96", "#7a6a2f", "#4a4a4a")
WIDTH = 10.0  # inches
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip


def need_matplotlib() -> None:
    """Raise MissingExtra if matplotlib is not installed, before anything is run for an hour."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("matplotlib", "plots", "the report of simulate") from None


def write_page(outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Write the report of all outcomes as an HTML file."""
    path.write_text(page(outcomes), encoding="utf-8")


def page(outcomes: Sequence[SimulationOutcome]) -> str:
    """Render the report: an overview of all outcomes first, then the details of each."""
    title = "Simulated: " + ", ".join(dict.fromkeys(outcome.name for outcome in outcomes))
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(OVERVIEW, map(_summary_row, outcomes)),
        _figure("losses", "Loss of the outer parameters", losses(outcomes), "The same runs on four scales."),
        _figure(
            "utilisation", "Utilisation", utilisation(outcomes),
            "Share of the time, since all islands train, that each spent on training steps. Hatched bars were not run: "
            "they are computed from the step time of the slowest island and the slowest link at its slowest. Data "
            "parallel sends 16-bit gradients every step while the backward pass goes on.",
        ),
    ]  # fmt: skip
    for number, outcome in enumerate(outcomes, start=1):
        parts += _details(number, outcome, several=len(outcomes) > 1)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


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


def _details(number: int, outcome: SimulationOutcome, *, several: bool) -> list[str]:
    """Render one outcome: its islands, timeline, faults and links."""
    prefix = f": {escape(outcome.name)}" if several else ""
    same = "all who saw the end hold the same bits" if outcome.agree else "the islands' states were not seen to agree"
    size = format_count(outcome.parameters)
    about = f"{escape(outcome.model)}, {size} parameters, {escape(outcome.setting)}; {same}."
    timeline = "What each island did; the strip below a bar is what it sent. Dashed lines and crosses are faults."
    return [
        f"<h2>Islands{prefix}</h2><p>{about}{_round(outcome)}</p>",
        _islands(outcome),
        _figure(f"timeline-{number}", f"Timeline{prefix}", timelines(outcome), timeline),
        _faults(outcome),
        _figure(
            f"traffic-{number}", f"Links{prefix}", traffic(outcome),
            "What passed each island's link, headers and encryption included, and what could have.",
        ),
    ]  # fmt: skip


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
    return _table(head, rows)


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
    return _table(("at", "fault", "as given", ""), rows)


def _figure(name: str, title: str, drawn: str, caption: str) -> str:
    """Put a drawing into a titled figure with a caption."""
    labelled = drawn.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return f'<h2>{title}</h2><figure id="{name}">{labelled}<figcaption>{caption}</figcaption></figure>'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def svg(name: str, height: float, draw: Callable[["Figure"], None]) -> str:
    """Return what `draw` draws as SVG; `name` keeps the ids of several drawings on one page apart."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": name}
    with rc_context(style):
        figure, out = Figure(figsize=(WIDTH, height), layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    return text[text.index("<svg") :].strip()


def losses(outcomes: Sequence[SimulationOutcome]) -> str:
    """Draw the validation loss of all outcomes over steps, tokens, seconds and bytes."""
    kinds: dict[str, Callable[[SimulationOutcome], list[float]]] = {
        "inner steps": lambda outcome: [float(point.step) for point in outcome.losses],
        "million tokens": lambda outcome: [point.tokens / 1e6 for point in outcome.losses],
        "seconds": lambda outcome: [point.seconds for point in outcome.losses],
        "MB sent by all islands": lambda outcome: [point.bytes / 1e6 for point in outcome.losses],
    }

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(2, 2, sharey=True).flat
        for axes, (label, values) in zip(panels, kinds.items(), strict=True):
            for number, outcome in enumerate(outcomes):
                found, color = [point.loss for point in outcome.losses], LINE[number % len(LINE)]
                axes.plot(values(outcome), found, ".-", color=color, label=name_of(outcome, outcomes))
            axes.set(xlabel=label, ylabel="validation loss")
        if len(outcomes) > 1:
            panels[0].legend()

    return svg("losses", 5.6, draw)


def name_of(outcome: SimulationOutcome, outcomes: Sequence[SimulationOutcome]) -> str:
    """Return an outcome's name, with its setting where another outcome has the same name."""
    same = [other for other in outcomes if other.name == outcome.name]
    return outcome.name if len(same) == 1 else f"{outcome.name} {outcome.setting.removeprefix('sync: ')}"


def timelines(outcome: SimulationOutcome) -> str:
    """Draw what each island did over time, with the faults."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for row, island in enumerate(outcome.islands):
            _row(axes, row, island)
        _mark_faults(axes, outcome)
        axes.set_yticks(range(len(outcome.islands)), [label_of(island) for island in outcome.islands])
        axes.set(xlabel="seconds since all islands train", ylim=(len(outcome.islands) - 0.4, -0.9))
        axes.grid(visible=False, axis="y")
        _legend(figure, outcome)

    return svg(f"timeline {outcome.name} {outcome.setting}", 1.5 + 0.45 * len(outcome.islands), draw)


def label_of(island: IslandOutcome) -> str:
    """Return an island's name, with its region if it has one."""
    return f"{island.name} ({island.region})" if island.region else island.name


def _row(axes: "Axes", row: int, island: IslandOutcome) -> None:
    """Draw one island's states as bars, and when it was sending below them."""
    for state in STATES:
        bars = [(span.begin_s, span.seconds) for span in island.spans if span.state == state]
        axes.broken_barh(bars, (row - 0.32, 0.46), facecolors=COLOURS[state], linewidth=0)
    sent = [(begin, end - begin) for begin, end in island.sending]
    axes.broken_barh(sent, (row + 0.18, 0.16), facecolors=SENDING, linewidth=0)


def _mark_faults(axes: "Axes", outcome: SimulationOutcome) -> None:
    """Draw the faults that happened: lines, a shaded time for cuts, a cross for kills."""
    rows = {island.name: row for row, island in enumerate(outcome.islands)}
    for fault in (fault for fault in outcome.faults if fault.happened and fault.kind != "slow"):
        axes.axvline(fault.at_s, color=CUT, linewidth=0.9, linestyle="--")
        axes.annotate(fault.kind, (fault.at_s, -0.55), xytext=(2, 0), textcoords="offset points", color=CUT)
        if fault.kind == "cut" and fault.until_s is not None:
            axes.axvspan(fault.at_s, min(fault.until_s, outcome.seconds), color=CUT, alpha=0.12, linewidth=0)
        if fault.kind == "kill":
            axes.plot([fault.at_s], [rows[fault.islands[0]]], "x", color="black", markersize=8)


def _legend(figure: "Figure", outcome: SimulationOutcome) -> None:
    from matplotlib.patches import Patch

    there = {span.state for island in outcome.islands for span in island.spans}
    patches = [Patch(color=COLOURS[state], label=state) for state in STATES if state in there]
    patches.append(Patch(color=SENDING, label="sending (below)"))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))


def traffic(outcome: SimulationOutcome) -> str:
    """Draw a row for each island's link: what it carried, and what it could have carried."""

    def draw(figure: "Figure") -> None:
        rows = figure.subplots(len(outcome.islands), 1, sharex=True, squeeze=False).flat
        for axes, island in zip(rows, outcome.islands, strict=True):
            _link(axes, island, outcome.seconds)
        rows[len(outcome.islands) - 1].set(xlabel="seconds since all islands train")
        figure.legend(*rows[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)

    return svg(f"traffic {outcome.name} {outcome.setting}", 0.8 + 1.1 * len(outcome.islands), draw)


def _link(axes: "Axes", island: IslandOutcome, seconds: float) -> None:
    times = [(flow.begin_s + flow.end_s) / 2 for flow in island.flows]
    axes.plot(times, [flow.up_bits_per_s / 1e6 for flow in island.flows], color=LINE[0], label="up")
    axes.plot(times, [flow.down_bits_per_s / 1e6 for flow in island.flows], color=LINE[1], label="down")
    moments = [at_s for at_s, _, _ in island.capacity] + [seconds]
    for column, (colour, name) in enumerate(((LINE[0], "up"), (LINE[1], "down")), start=1):
        rates = [entry[column] / 1e6 for entry in island.capacity]
        label = f"{name}: the link's rate"
        axes.step(moments, [*rates, rates[-1]], where="post", color=colour, linestyle=":", label=label)
    axes.set(ylabel="Mbit/s", ylim=(0, None))
    axes.set_title(f"{label_of(island)}, {format_rate(island.capacity[0][1])} up", loc="left", fontsize=9)


def utilisation(outcomes: Sequence[SimulationOutcome]) -> str:
    """Draw the measured share of training of each island, and below it what the planner computes."""
    bars: list[tuple[str, float, bool]] = []
    for outcome in outcomes:
        name = f"{name_of(outcome, outcomes)}: " if len(outcomes) > 1 else ""
        bars += [(f"{name}{label_of(island)}", island.utilisation, False) for island in outcome.islands]
        if outcome.computed is not None:
            bars.append((f"{name}planned (computed)", outcome.computed.predicted_utilisation, True))
            bars.append((f"{name}data parallel (computed)", outcome.computed.data_parallel_utilisation, True))

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for row, (_, share, computed) in enumerate(bars):
            fill, hatch = ("white", "///") if computed else (SENDING, "")
            axes.barh(row, 100 * share, height=0.6, color=fill, edgecolor=SENDING, hatch=hatch)
            axes.annotate(f"{100 * share:.0f} %", (100 * share, row), xytext=(4, -3), textcoords="offset points")
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
        axes.set(xlabel="% of the time spent on training", xlim=(0, 110), ylim=(len(bars) - 0.4, -0.6))
        axes.grid(visible=False, axis="y")

    return svg("utilisation", 0.9 + 0.3 * len(bars), draw)
