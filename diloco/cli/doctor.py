"""`diloco doctor`."""

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import Json

if TYPE_CHECKING:
    from diloco.cli.examine import Finding

MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "bad": "[red]✗[/]"}


def doctor(
    dir: Annotated[Path, typer.Option(help="Where runs will be kept.")] = Path("runs"), json: Json = False
) -> None:
    """Check what this machine can do, and what is missing."""
    from diloco.cli.examine import examine

    findings = examine(dir)
    if json:
        print(dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show(findings)
    sys.exit(any(finding.state == "bad" for finding in findings))


def show(findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        advice = f"\n[dim]-> {escape(finding.mend)}[/]" if finding.mend else ""
        table.add_row(MARKS[finding.state], finding.name, escape(finding.detail) + advice)
    Console(highlight=False).print(table)
