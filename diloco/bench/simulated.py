"""Run real islands as `diloco simulate` does, to compare with what planner and virtual time predict.

Steps are small and slowed down by a pause after each: what is compared is what links and rounds cost, so other work on
the machine should not decide.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from diloco.errors import DilocoError
from diloco.plan.predict import LinkModel
from diloco.report.events import Event, Round, Start, Step, of_kind
from diloco.report.watching import Tail
from diloco.simulate.real.outcome import Told, usual_round_s

EVERY, DELAY = 20, 10
SLOWNESS = 8  # times: a step is mostly a pause
WARM_UP, PHASES = 1, 6
MODEL = {"preset": "tiny", "blocks": 1, "width": 256, "heads": 4, "feed_forward": 768}  # large for so short a step
EVENTS = "runs/measured-simulated/island-*/events.jsonl"
NEAR, FAR = LinkModel(20e6, 20e6, 0.02), LinkModel(6e6, 6e6, 0.08)


@dataclass(frozen=True)
class SimulatedConfig:
    """Describe one setting to compare: a link, a codec, and whether rounds are overlapped."""

    line: LinkModel
    codec: str
    overlapped: bool

    @property
    def link(self) -> str:
        """Format the link as the option `--link` takes it."""
        return f"{self.line.up_bits_per_s / 1e6:g}mbit,{1000 * self.line.delay_s:g}ms"

    @property
    def name(self) -> str:
        """Return the setting in words, as the title of a row."""
        return f"{self.link}, {self.codec}, {'overlapped' if self.overlapped else 'blocking'}"

    def settings(self, islands: int) -> dict[str, Any]:
        """Return the run's configuration for so many islands, of which each round waits for all."""
        return {
            "run": "measured", "model": MODEL, "data": {"sequence": 32},
            "island": {"batch": 1, "device": "cpu"}, "inner": {"steps": EVERY * (WARM_UP + PHASES), "warmup": 2},
            "sync": {"every": EVERY, "codec": self.codec, "delay": DELAY if self.overlapped else 0},
            "elastic": {"min_islands": islands, "straggler": 100.0}, "evaluate": {"every": 0}, "log": {"every": 1},
            "checkpoint": {"snapshot_every": 1000000},
        }  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Hold what was measured of a run: seconds of a step and of a round, utilisation, parameters."""

    step_s: float
    round_s: float
    utilisation: float
    parameters: int


Compared = tuple[float, dict[str, Any]]
Foretell = Callable[[SimulatedConfig, Seen], tuple[float, float]]  # seconds of a round, and utilisation


def simulated(setting: SimulatedConfig, islands: int) -> Seen:
    """Run `diloco simulate` with this setting in a temporary folder, and measure its events."""
    with TemporaryDirectory(prefix="diloco-bench-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(setting.settings(islands)))
        slow = [word for island in range(1, islands + 1) for word in ("--slow", f"{island}x{SLOWNESS}")]
        words = ["simulate", str(config), "--islands", str(islands), "--link", setting.link, *slow]
        done = subprocess.run([sys.executable, "-m", "diloco", *words], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise DilocoError(f"diloco {' '.join(words)} ended with {done.returncode}: {done.stderr or done.stdout}")
        told = {path.parent.name: Tail(path).read() for path in sorted(Path(folder).glob(EVENTS))}
    return seen_in(told)


def compare(settings: Sequence[SimulatedConfig], islands: int, word: str, foretell: Foretell) -> Compared:
    """Run each setting, and compare it with what `foretell` predicts.

    Return the worst relative error of the time of a round and of utilisation, and a row for each setting.
    """
    rows: dict[str, Any] = {}
    for setting in settings:
        seen = simulated(setting, islands)
        round_s, utilisation = foretell(setting, seen)
        rows[setting.name] = {
            "step_s": seen.step_s, f"{word}_round_s": round_s, "round_s": seen.round_s,
            "round_error": round_s / seen.round_s - 1, f"{word}_utilisation": utilisation,
            "utilisation": seen.utilisation, "utilisation_error": utilisation / seen.utilisation - 1,
        }  # fmt: skip
    return max(abs(row[error]) for row in rows.values() for error in ("round_error", "utilisation_error")), rows


def seen_in(told: Told) -> Seen:
    """Measure a run by its islands' events; steps are those of the slowest island."""
    step_s = max(_usual_step_s(events) for events in told.values())
    rounds = [[round for round in of_kind(events, Round) if round.contributors] for events in told.values()]
    # from launch to launch
    phase_s = mean(mean(_spans([round.time - round.round_s for round in own])[WARM_UP:]) for own in rounds)
    start = next(event for events in told.values() for event in of_kind(events, Start))
    round_s = usual_round_s(told)
    assert round_s is not None
    return Seen(step_s, round_s, EVERY * step_s / phase_s, start.parameters)


def _spans(moments: Sequence[float]) -> list[float]:
    """Return the seconds from each moment to the next."""
    return [later - earlier for earlier, later in pairwise(moments)]


def _usual_step_s(events: Sequence[Event]) -> float:
    """Return the mean seconds of steps after which nothing is launched or applied."""
    steps = enumerate(_spans([event.time for event in of_kind(events, Step)]), start=1)
    return mean(span for number, span in steps if number % EVERY not in (0, DELAY) and number > EVERY)
