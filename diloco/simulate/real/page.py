"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import mean

from diloco.simulate.real import drawing
from diloco.simulate.real.story import Story
from diloco.units import format_count, format_duration, format_size

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


def write_page(stories: Sequence[Story], path: Path) -> None:
    path.write_text(page(stories), encoding="utf-8")


def page(stories: Sequence[Story]) -> str:
    title = "Simulated: " + ", ".join(dict.fromkeys(story.name for story in stories))
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(OVERVIEW, map(_summary_row, stories)),
        _figure("losses", "Loss of the outer parameters", drawing.losses(stories), "The same runs on four scales."),
        _figure(
            "utilisation", "Utilisation", drawing.utilisation(stories),
            "Share of the time, since all islands train, that each spent on training steps. Hatched bars were not run: "
            "they are computed from the step time of the slowest island and the slowest link at its slowest. Data "
            "parallel sends 16-bit gradients every step while the backward pass goes on.",
        ),
    ]  # fmt: skip
    for number, story in enumerate(stories, start=1):
        parts += _details(number, story, several=len(stories) > 1)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _summary_row(story: Story) -> list[str]:
    loss = f"{story.losses[0].loss:.3f} → {story.losses[-1].loss:.3f}" if story.losses else "not measured"
    parallel = "" if story.computed is None else (
        f"{100 * story.computed.data_parallel_utilisation:.1f} % trained, "
        f"{format_duration(story.computed.data_parallel_seconds)} for as many steps"
    )  # fmt: skip
    ended = "" if story.finished else ' <span class="bad">not finished</span>'
    sent = format_size(mean(island.sent for island in story.islands))
    return [
        f"{escape(story.name)}{ended}", escape(story.setting.removeprefix("sync: ")), str(len(story.islands)),
        format_duration(story.seconds), str(story.rounds), loss, sent,
        f"{100 * story.utilisation:.0f} %", f'<span class="computed">{parallel}</span>',
    ]  # fmt: skip


def _details(number: int, story: Story, *, several: bool) -> list[str]:
    prefix = f": {escape(story.name)}" if several else ""
    same = "all who saw the end hold the same bits" if story.agree else "the islands' states were not seen to agree"
    about = f"{escape(story.model)}, {format_count(story.parameters)} parameters, {escape(story.setting)}; {same}."
    timeline = "What each island did; the strip below a bar is what it sent. Dashed lines and crosses are faults."
    return [
        f"<h2>Islands{prefix}</h2><p>{about}{_round(story)}</p>",
        _islands(story),
        _figure(f"timeline-{number}", f"Timeline{prefix}", drawing.timelines(story), timeline),
        _faults(story),
        _figure(
            f"traffic-{number}", f"Links{prefix}", drawing.traffic(story),
            "What passed each island's link, headers and encryption included, and what could have.",
        ),
    ]  # fmt: skip


def _round(story: Story) -> str:
    if story.measured_round_s is None or story.computed is None:
        return ""
    measured, planned = map(format_duration, (story.measured_round_s, story.computed.predicted_round_s))
    computed = f'<span class="computed">{planned} as computed</span>'
    return f" A round took {measured} from its last launch until all had applied it (median); {computed}."


def _islands(story: Story) -> str:
    head = ("island", "trained", "waited", "stopped", "dead", "in rounds", "sent", "received")
    rows = (
        [
            escape(drawing.label_of(island)), f"{100 * island.utilisation:.0f} %",
            *(format_duration(island.seconds[state]) for state in ("waiting", "stopped", "dead")),
            f"{island.rounds} of {story.rounds}", format_size(island.sent), format_size(island.received),
        ]
        for island in story.islands
    )  # fmt: skip
    return _table(head, rows)


def _faults(story: Story) -> str:
    if not story.faults:
        return ""
    rows = (
        [
            f"{fault.at_s:g} s", escape(fault.text), f"<code>{escape(fault.said)}</code>",
            "" if fault.happened else '<span class="bad">did not happen: the run, or the island, had ended</span>',
        ]
        for fault in story.faults
    )  # fmt: skip
    return _table(("at", "fault", "as given", ""), rows)


def _figure(name: str, title: str, drawn: str, caption: str) -> str:
    labelled = drawn.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return f'<h2>{title}</h2><figure id="{name}">{labelled}<figcaption>{caption}</figcaption></figure>'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
