"""Provide what every benchmark has: a clock, and one form of results."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from rich.table import Table

from diloco.report.console import table_console


@dataclass(frozen=True)
class Check:
    """Compare one measured value with its limit."""

    name: str
    value: float
    limit: float
    better: Literal["lower", "higher"]

    @property
    def bound(self) -> str:
        """Format the limit for people, such as `≤ 1.03`."""
        return f"{'≤' if self.better == 'lower' else '≥'} {self.limit:g}"

    @property
    def holds(self) -> bool:
        """Return whether the value is within the limit, or equal to it."""
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


@dataclass(frozen=True)
class Report:
    """Hold the outcome of a benchmark: checks against limits, and other figures by name."""

    checks: list[Check]
    figures: dict[str, Any] = field(default_factory=dict)


def time_s(work: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the seconds per call over so many calls in a row, until a GPU has done its part, too."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def show(report: Report, *, as_json: bool) -> None:
    """Print a report as tables, or as one JSON object with `checks` beside the figures."""
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in report.checks], **report.figures}))
        return
    console = table_console()
    for name, figure in report.figures.items():
        are_rows = isinstance(figure, list) and figure and all(isinstance(row, dict) for row in figure)
        value = {str(number): row for number, row in enumerate(figure, start=1)} if are_rows else figure
        is_table = isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values())
        console.print(_table(name, value) if is_table else f"{name}: {_text(value)}")
    if report.checks:
        table = Table("check", "value", "limit", "")
        for check in report.checks:
            table.add_row(check.name, f"{check.value:.4g}", check.bound, "holds" if check.holds else "fails")
        console.print(table)


def _table(name: str, rows: dict[str, dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table(name, *columns)
    for title, row in rows.items():
        table.add_row(title, *(_text(row.get(column, "")) for column in columns))
    return table


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
