import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diloco.cli.examine import examine

MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "bad": "[red]✗[/]"}


def doctor_command(folder: Path, *, as_json: bool) -> None:
    findings = examine(folder)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        table = Table.grid(padding=(0, 2))
        for finding in findings:
            advice = f"\n[dim]-> {escape(finding.mend)}[/]" if finding.mend else ""
            table.add_row(MARKS[finding.state], finding.name, escape(finding.detail) + advice)
        Console(highlight=False).print(table)
    if any(finding.state == "bad" for finding in findings):
        sys.exit(1)
