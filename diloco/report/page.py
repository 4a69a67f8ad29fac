"""The parts of which every page about a run is made: the dashboard, `diloco report` and `simulate`'s report.

Names and messages may come from peers of ill will. Here they are escaped or travel as JSON; the scripts put them into
pages as text, never as HTML. A page asks nobody but its own server for anything, and one in a file nobody at all.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.errors import MissingExtra

ASSETS = ("page.css", "parts.js", "timeline.js", "run.js", "live.js", "still.js")
STILL = ("parts.js", "timeline.js", "run.js", "still.js")  # the scripts of a page in a file
LIVE = ("parts.js", "timeline.js", "run.js", "live.js")
ICON = "data:image/svg+xml," + (
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Ccircle cx='4' cy='11' r='3' fill='%233987e5'/%3E"
    "%3Ccircle cx='12' cy='11' r='3' fill='%23199e70'/%3E%3Ccircle cx='8' cy='4' r='3' fill='%23d95926'/%3E%3C/svg%3E"
)
UTILISATION = (
    "Share of its time in the run that each island spent on training steps, as its contributions or waits tell it."
)
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'self' 'unsafe-inline'; base-uri 'none'; " \
    "form-action 'none'; frame-ancestors 'none'; script-src 'self'"  # fmt: skip


def need_plotly(needed_for: str) -> None:
    """Raise MissingExtra if the plotting library is not installed, before anything is run for an hour."""
    if find_spec("plotly") is None:
        raise MissingExtra("plotly", "plots", needed_for)


def plotting_library() -> str:
    """Return the JavaScript of the plotting library, from its installed package."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise MissingExtra("plotly", "plots", "a page with plots")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def asset(name: str) -> str:
    """Return the text of one of ASSETS."""
    return (files("diloco.report") / "assets" / name).read_text(encoding="utf-8")


def live_page() -> str:
    """Return the page of the dashboard; what it shows comes by its stream of events."""
    scripts = "".join(f'<script src="assets/{name}" defer></script>' for name in ("plotly.js", *LIVE))
    head = f'<title>diloco</title><link rel="stylesheet" href="assets/page.css">{scripts}'
    return _document(head, run_sections())


def still_page(title: str, body: str, data: Any) -> str:
    """Return a page that is one file: styles, scripts and data are in it. `still.js` draws the data."""
    scripts = [plotting_library(), *map(asset, STILL)]
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; script-src {hashes}"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title>'
        f"<style>{asset('page.css')}</style>"
    )
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # so that no text ends the element
    tail = f'<script type="application/json" id="data">{text}</script>'
    tail += "".join(f"<script>{script}</script>" for script in scripts)
    return _document(head, body + tail)


def _document(head: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="referrer" content="no-referrer"><link rel="icon" href="{ICON}">{head}</head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def run_sections() -> str:
    """Return the empty sections of a page about a real run, which `run.js` fills."""
    sections = [
        panel("why", "What holds it up", '<ul class="why"></ul>'),
        panel("losses", "Loss", chart("losses")),
        panel("links", "Links", chart("links") + '<div class="meters"></div>'),
        panel("islands", "Islands", '<div class="islands"></div>'),
        panel(
            "timeline", "Timeline", chart("timeline"), "Drag over a stretch to look closer; a double click shows all."
        ),
        panel("utilisation", "Utilisation", chart("utilisation"), UTILISATION),
        panel("log", "Log", '<div class="log"></div>'),
    ]
    return f'<header class="top" id="top"></header><main>{"".join(sections)}</main><p class="foot" id="foot"></p>'


def panel(name: str, title: str, inside: str, caption: str = "") -> str:
    """Return a titled section; `inside` is HTML."""
    under = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f'<section class="panel" id="{name}"><h2>{escape(title)}</h2>{inside}{under}</section>'


def chart(kind: str, at: int | None = None) -> str:
    """Return the place of a drawing. `still.js` draws into it what the page's data have at this place."""
    place = "" if at is None else f' data-at="{at}"'
    return f'<figure class="chart" data-kind="{kind}"{place}></figure>'


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls sideways where it is too wide. The cells are HTML."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
