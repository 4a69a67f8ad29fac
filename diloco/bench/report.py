"""What every benchmark has: a way to refuse options, and one form of results."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from diloco.errors import ConfigError

Parsed = TypeVar("Parsed")


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


def parse_option(name: str, text: str, parse: Callable[[str], Parsed]) -> Parsed:
    """Return what `parse` makes of an option's text; ConfigError names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text}: {error}") from None


def show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in report.checks], **report.figures}))
        return
    console = Console(highlight=False)
    for name, value in report.figures.items():
        console.print(_table_of(name, value) if _is_table(value) else f"{name}: {_text(value)}")
    if report.checks:
        console.print(_table_of_checks(report.checks))


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(row, dict) for row in value.values())


def _table_of(name: str, rows: dict[str, dict[str, Any]]) -> Table:
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


def _table_of_checks(checks: list[Check]) -> Table:
    table = Table("check", "value", "limit", "")
    for check in checks:
        sign = "≤" if check.better == "lower" else "≥"
        verdict = "holds" if check.holds else "fails"
        table.add_row(check.name, f"{check.value:.4g}", f"{sign} {check.limit:g}", verdict)
    return table
