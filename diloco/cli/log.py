import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from diloco.history.log import Findings, Row, checkout, find_logs, furthest, lines, names_of, origin, rows, verify

COLUMNS = ("round", "fragment", "step", "tokens", "bytes", "digest", "contributors")


def log_command(run: str, *, check: bool, out: tuple[int, Path] | None, as_json: bool) -> None:
    logs = find_logs(run)
    if out is not None:
        number, folder = out
        path = checkout(furthest(logs), number, folder)
        say(f"round {number} is in {path}; diloco export {folder} OUT makes a Hugging Face model of it")
    elif check:
        findings = {str(log): verify(log) for log in logs}
        print(json.dumps({log: asdict(found) for log, found in findings.items()}, indent=1)) if as_json else None
        for log, found in {} if as_json else findings.items():
            say(story(log, found))
        raise SystemExit(any(found.problems for found in findings.values()))
    else:
        longest = furthest(logs)
        if (parent := origin(longest)) is not None and not as_json:
            say(f"rewound: it begins with {parent}")
        show(rows(longest), names_of(logs), as_json=as_json)


def show(found: list[Row], names: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for line in lines(found, names):
        table.add_row(*line)
    Console(highlight=False, width=None).print(table)


def story(log: str, found: Findings) -> str:
    counted = (
        f"{found.snapshots} snapshots, rounds {found.first} to {found.last} replayed, {found.digests} digests equal"
    )
    if not found.problems:
        return f"{log}: whole: {counted}"
    return "\n".join([f"{log}: NOT whole ({counted})", *(f"  {problem}" for problem in found.problems)])


def say(text: str) -> None:
    Console(highlight=False).print(text, soft_wrap=True, markup=False)
