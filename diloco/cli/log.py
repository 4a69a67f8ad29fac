"""`diloco log`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import Json, RunName, say

if TYPE_CHECKING:
    from diloco.history.log import Findings, Row

COLUMNS = ("round", "fragment", "step", "tokens", "bytes", "digest", "contributors")


def log(
    run: RunName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, replay, compare all digests.")] = False,
    checkout: Annotated[
        tuple[int, Path] | None,
        typer.Option("--checkout", metavar="ROUND OUT", help="Write the state after this round to a new folder."),
    ] = None,
    json: Json = False,
) -> None:
    """List the rounds of a run: contributors, bytes, digests.

    With --verify, anything that is damaged is named and the exit code is 1. The run may go on meanwhile.
    """
    from diloco.history.log import checkout as write_checkout
    from diloco.history.log import find_logs, furthest, names_of, rows
    from diloco.run.genesis import read_genesis

    logs = find_logs(run)
    if checkout is not None:
        number, folder = checkout
        path = write_checkout(furthest(logs), number, folder)
        say(f"round {number} is in {path}; diloco export {folder} OUT makes a Hugging Face model of it")
    elif verify:
        check(logs, as_json=json)
    else:
        longest = furthest(logs)
        genesis = read_genesis(longest)
        if genesis is not None and genesis.parent is not None and not json:
            say(f"rewound: it begins with {genesis.parent}")
        show(rows(longest), names_of(logs), as_json=json)


def check(logs: list[Path], *, as_json: bool) -> None:
    """Exit code 0 if all of it is whole."""
    from diloco.history.log import verify

    findings = {str(log): verify(log) for log in logs}
    if as_json:
        print(json.dumps({log: asdict(found) for log, found in findings.items()}, indent=1))
    else:
        say(*(describe(log, found) for log, found in findings.items()))
    raise SystemExit(any(found.problems for found in findings.values()))


def describe(log: str, found: "Findings") -> str:
    counted = (
        f"{found.snapshots} snapshots, rounds {found.first} to {found.last} replayed, {found.digests} digests equal"
    )
    if not found.problems:
        return f"{log}: whole: {counted}"
    return "\n".join([f"{log}: NOT whole ({counted})", *(f"  {problem}" for problem in found.problems)])


def show(found: "list[Row]", names: dict[str, str], *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in found:
        fragment = "-" if row.fragment < 0 else row.fragment
        who = ", ".join(names.get(peer, peer[-8:]) for peer in row.contributors) or "-"
        who = f"{who}; set {row.amendment}" if row.amendment else who
        cells = (row.round, fragment, row.step, row.tokens, row.bytes, row.digest[:12], who)
        table.add_row(*map(str, cells))
    Console(highlight=False).print(table)
