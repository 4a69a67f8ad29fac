"""The one form of every benchmark's result."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    limit: float
    better: Literal["lower", "higher"]

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


@dataclass(frozen=True)
class Report:
    checks: list[Check]
    figures: dict[str, Any] = field(default_factory=dict)


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in report.checks], **report.figures}))
        return
    console = Console(highlight=False)
    if report.figures:
        figures = Table.grid(padding=(0, 2))
        for name, value in report.figures.items():
            figures.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
        console.print(figures)
    if report.checks:
        table = Table("check", "value", "limit", "")
        for check in report.checks:
            sign = "≤" if check.better == "lower" else "≥"
            table.add_row(
                check.name, f"{check.value:.4g}", f"{sign} {check.limit:g}", "holds" if check.holds else "fails"
            )
        console.print(table)
