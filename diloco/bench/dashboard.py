"""Measure the dashboard in a real browser: how soon it answers a person, and how soon it shows that an island is lost.

The run is made and simulated (`made_run.py`); the server is the process that `--dashboard` starts, and the browser a
headless Chromium. An interaction's time is what the browser itself measures, from the input to the next frame.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from diloco.bench.browser import LAPTOP, Tab, open_browser
from diloco.bench.made_run import MadeRun
from diloco.bench.report import Check, Report
from diloco.dashboard.beside import Beside

INTERACTION_MS, MARGIN_S = 200.0, 2.0
REPEATS = 5
AXES = ("tokens", "seconds", "bytes", "step")
WATCH = """
window.inputs = [];
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.inputs.push(each.duration);
}).observe({type: "event", durationThreshold: 16, buffered: false});
true
"""
FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))"


def measure(*, islands: int, rounds: int) -> Report:
    """Show a run of so many islands and rounds, use its page, and kill an island."""
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-", ignore_cleanup_errors=True) as place,
        MadeRun(Path(place) / "many", islands, rounds) as run,
        closing(Beside(run.folder, "127.0.0.1", None)) as beside,
        open_browser() as browser,
    ):
        tab = Tab(browser)
        tab.look_like(LAPTOP)
        loaded_s = _load(tab, beside.url, islands)
        used = _interactions(tab)
        lost_s = _lost(tab, run)
        checks = [
            Check(
                "dashboard.interaction_ms",
                max(each["until_frame_ms"] for each in used.values()),
                INTERACTION_MS,
                "lower",
            ),
            Check("dashboard.lost_shown_s", lost_s, run.silence_s + MARGIN_S, "lower"),
            Check("dashboard.complaints", len(tab.complaints), 0, "lower"),
        ]
        figures: dict[str, Any] = {"islands": islands, "rounds": rounds, "interactions": used}
        return Report(checks, figures | {"loaded_s": loaded_s, "silence_s": run.silence_s})


def _load(tab: Tab, url: str, islands: int) -> float:
    """Open the page, and return the seconds until it has drawn everything."""
    began = time.monotonic()
    tab.open(url)
    tab.wait(f"document.querySelectorAll('#islands tbody tr').length >= {islands}")
    tab.wait("document.querySelectorAll('.plot .main-svg').length > 0 && document.querySelector('canvas') !== null")
    tab.wait("document.querySelector('#links button') !== null")  # links are told after the first exchange that is seen
    return round(time.monotonic() - began, 2)


def _interactions(tab: Tab) -> dict[str, dict[str, float]]:
    """Return how many milliseconds kinds of input take until the next frame, and of processor time: medians."""
    tab.run(WATCH)
    plot, canvas = "#losses .plot", "#timeline canvas"
    kinds: dict[str, Callable[[int], None]] = {
        "choose an axis": lambda turn: tab.click(
            f"#losses [data-choice={('tokens', 'seconds', 'bytes', 'step')[turn % 4]}]"
        ),
        "point at a curve": lambda turn: tab.hover(plot, 0.3 + 0.1 * turn),
        "point at the timeline": lambda turn: tab.hover(canvas, 0.3 + 0.1 * turn),
        "look closer": lambda turn: tab.drag(canvas, 0.3, 0.5 + 0.05 * turn),
        "choose a link": lambda turn: tab.click(f"#links button:nth-child({1 + turn % 2})"),
        "light or dark": lambda turn: tab.click(".title button"),
        "show older rounds": lambda turn: tab.click("#log .older"),
    }
    tab.ask("Performance.enable", timeDomain="threadTicks")
    found: dict[str, dict[str, float]] = {}
    for name, use in kinds.items():
        times, busy = [], []
        for turn in range(REPEATS):
            tab.run("window.inputs.length = 0")
            before = _processor_ms(tab)
            use(turn)
            tab.run(FRAME)
            busy.append(_processor_ms(tab) - before)
            times.append(max(tab.run("window.inputs"), default=16.0))
        found[name] = {"until_frame_ms": round(median(times), 1), "processor_ms": round(median(busy), 1)}
    return found


def _processor_ms(tab: Tab) -> float:
    """Return the processor time that the page's main thread has used so far."""
    metrics = {each["name"]: each["value"] for each in tab.ask("Performance.getMetrics")["metrics"]}
    return 1000 * float(metrics["TaskDuration"])


def _lost(tab: Tab, run: MadeRun) -> float:
    """Kill an island, and return the seconds until the page says that it is lost."""
    name = run.called(run.ids[-1])
    state = (
        f"[...document.querySelectorAll('#islands tr')].find((row) => row.innerText.includes('{name}'))?.dataset.state"
    )
    tab.wait(f"{state} !== undefined && {state} !== 'lost'")
    killed = time.monotonic()
    run.kill(run.ids[-1])
    tab.wait(f"{state} === 'lost'")
    return round(time.monotonic() - killed, 2)
