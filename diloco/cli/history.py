"""Declare the commands about what a run has left: `log`, `restore`, `rewind`, `set`, `export` and `sample`."""

import io
import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from diloco.cli.shared import Device, Json, Overrides, RunName, RunTokenizer, next_commands, say
from diloco.errors import ConfigError, DataError, SaveError

if TYPE_CHECKING:
    from diloco.checkpoint.log.history import RoundHeader
    from diloco.elastic.protocol.record import Amendment
    from diloco.history.log import Findings
    from diloco.history.rounds import RunHistory

COLUMNS = ("round", "committed", "fragment", "step", "tokens", "size", "loss", "digest", "contributors")
Dtype = Literal["float32", "bfloat16", "float16"]


def log(
    run: RunName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, replay, compare all digests.")] = False,
    checkout: Annotated[
        tuple[int, Path] | None,
        typer.Option("--checkout", metavar="ROUND OUT", help="Write the state after this round to a new folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List all rounds of a run, the first ones too.

    When, by whom, losses, digests, and which states can still be had. With --verify, anything that is damaged is named
    and the exit code is 1. The run may continue meanwhile.
    """
    from diloco.history.find import find_logs

    logs = find_logs(run)
    if verify and checkout is None:
        verify_logs(logs, as_json=as_json)
    elif checkout is not None:
        from diloco.history import log as history

        number, folder = checkout
        path = history.checkout(history.furthest(logs), number, folder)
        say(f"round {number} is in {path}; diloco export {folder} OUT makes a Hugging Face model of it")
    else:
        from diloco.history.rounds import history_of

        found = history_of(logs)
        if as_json:
            print(json.dumps(found.plain(), indent=1))
        else:
            say(*show(found, logs[0], run))


def verify_logs(logs: list[Path], *, as_json: bool) -> None:
    """Verify logs, print what was found, and exit with 1 if anything is damaged."""
    from diloco.history import log as history

    findings = {str(log): history.verify(log) for log in logs}
    if as_json:
        print(json.dumps({log: asdict(found) for log, found in findings.items()}, indent=1))
    else:
        say(*(describe(log, found) for log, found in findings.items()))
    raise SystemExit(any(found.problems for found in findings.values()))


def describe(log: str, found: "Findings") -> str:
    """Format what --verify found in a log: what was counted, and a line for each problem."""
    counted = (
        f"{found.snapshots} snapshot{'s' * (found.snapshots != 1)}, "
        f"rounds {found.first} to {found.last} replayed, {found.digests} digests equal"
    )
    if not found.problems:
        return f"{log}: whole: {counted}"
    return "\n".join([f"{log}: NOT whole ({counted})", *(f"  {problem}" for problem in found.problems)])


def show(found: "RunHistory", log: Path, run: str) -> list[str]:
    """Format a run's rounds as a table, and say which of their states can still be had."""
    from diloco.report.tables import aligned
    from diloco.run.genesis import read_genesis

    genesis = read_genesis(log)
    begins = [f"rewound: it begins with {genesis.parent}"] if genesis is not None and genesis.parent else []
    fragments = any(header.fragment > 0 for header in found.rounds)
    head = [name for name in COLUMNS if fragments or name != "fragment"]
    rows = [[cells[name] for name in head] for cells in (cells_of(found, header) for header in found.rounds)]
    return [*begins, *aligned(head, rows, left=("committed",)), *states_line(found, run)]


def cells_of(found: "RunHistory", header: "RoundHeader") -> dict[str, str]:
    """Return what the table says of a round, by column."""
    from diloco.units import format_count, format_size

    late = {part.island for part in header.contributions if part.late}
    who = [f"{found.names.of(part.island)}{' (late)' * (part.island in late)}" for part in header.contributions]
    moves = ("joined", header.joined), ("left", header.left)
    notes = [f"{word}: {', '.join(map(found.names.of, peers))}" for word, peers in moves if peers]
    notes += [f"set {found.changes(header)}"] if header.amendment else []
    when = datetime.fromtimestamp(header.time_ms / 1000).strftime("%Y-%m-%d %H:%M:%S") if header.time_ms else "-"
    return {
        "round": str(header.round), "committed": when, "fragment": "-" if header.fragment < 0 else str(header.fragment),
        "step": str(header.step), "tokens": format_count(header.tokens), "size": format_size(header.size),
        "loss": "-" if header.loss is None else f"{header.loss:.4f}", "digest": header.digest[:12],
        "contributors": "; ".join([", ".join(who) or "-", *notes]),
    }  # fmt: skip


def states_line(found: "RunHistory", run: str) -> list[str]:
    """Say which rounds' states can be had, and since when the others are gone."""
    if not found.rounds:
        return ["no round is committed yet"]
    if found.states is None:
        return ["no state of these rounds can be had: no snapshot is left"]
    first, last = found.states
    gone = found.rounds[0].round < first or found.part > 0
    earlier = "; earlier ones were removed (checkpoint.keep)" if gone else ""
    return [f"states of rounds {first} to {last} can be had: diloco log {run} --checkout ROUND OUT{earlier}"]


def restore(
    url: Annotated[str, typer.Argument(metavar="URL", help="The run's checkpoint.remote, or a run's folder there.")],
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.", show_default=False)],
) -> None:
    """Restore a run's folder from its copy at checkpoint.remote.

    Brings back the newest snapshot and the log since; every byte is checked. Keys are never copied: take part again
    with a ticket, or make a new run of it with diloco rewind.
    """
    from diloco.history.restore import restore_run

    folder, findings = dir.resolve(), restore_run(url, dir, lambda what, text: say(f"{what}: {text}"))
    say(
        describe(str(dir), findings),
        *next_commands({
            f'diloco sample {folder} "def main("': "continues a text; diloco export makes a Hugging Face model of it",
            f"diloco join TICKET --dir {folder}": "takes part in the run again, if it still goes on somewhere",
            f"diloco rewind {folder} {findings.last}":
                "makes a new run of it that goes on from there: the old run's key is not in the copy, and need not be",
        }),
    )  # fmt: skip
    raise SystemExit(bool(findings.problems))


def rewind(
    run: RunName,
    round: Annotated[int, typer.Argument(metavar="ROUND", min=0, help="As in diloco log.", show_default=False)],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The new run's folder; RUN-round-ROUND if not given.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Start a new run from an earlier round of another one.

    It has that round's parameters, momentum, clock and consumed samples, and other settings where --set gives them. The
    old run stays as it is.
    """
    from diloco.history.rewind import rewind

    branch = rewind(run, round, out, set_ or [])
    parent = branch.genesis.parent
    assert parent is not None
    if branch.own_loop:
        resume = f"the program of the run, with diloco.connect(…, dir={str(branch.folder)!r})"
    else:
        resume = f"diloco run {branch.folder}/config.yaml --resume"
    say(
        f"{branch.folder} is a new run that begins with round {round} of {branch.source}, at step {parent.step}",
        *next_commands({resume: "trains on from there", f"diloco log {branch.folder}": "says where it comes from"}),
        f"{branch.source} is as it was. Stop it if it still runs; its tickets let nobody into the new run: add",
        "--islands 1 to open the new run to others: it then prints a ticket of its own",
    )


def set_settings(
    run: RunName,
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="inner.lr=1e-4 …", show_default=False)],
) -> None:
    """Change settings of a run, while it trains or not.

    The change is signed with the key of the run's owner, which is in the folder in which the run was founded. It takes
    effect on every island with the same round; diloco log shows which. After the run's end, inner.steps=… prolongs it:
    diloco run CONFIG --resume then trains on.
    """
    from diloco.train.amend import FOLDER, in_words

    folder = founding_folder(run)
    while (amendment := made_amendment(folder, changes)) is None:
        pass  # somebody else was quicker: look again
    say(
        f"change {amendment.number} of {run}: {in_words(amendment)}",
        f"It waits in {folder / FOLDER}: the island that trains there, or the next one that does, brings it to the "
        "others. It holds for all of them from one round on, which diloco log shows.",
    )


def founding_folder(run: str) -> Path:
    """Return the folder of a run that has its owner's key; raise SaveError if it was founded elsewhere."""
    from diloco.history.find import find_logs

    folders = [log.parent for log in find_logs(run)]
    folder = next((folder for folder in folders if (folder / "owner.key").is_file()), None)
    if folder is None:
        raise SaveError(
            f"{folders[0]} joined a run that was founded elsewhere: only its owner changes it, "
            "in the folder in which it was founded"
        )
    return folder


def made_amendment(folder: Path, overrides: list[str]) -> "Amendment | None":
    """Sign and write the amendment that follows those in force and those that still wait.

    None: another one has taken its number, so try again.
    """
    from diloco.history.log import genesis_of, newest_state
    from diloco.run.amending import amend
    from diloco.run.folder import OUTER

    return amend(folder, genesis_of(folder / OUTER), newest_state(folder / OUTER), overrides)


def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    tokenizer: RunTokenizer = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote to OUT.")] = False,
    dtype: Annotated[
        Dtype, typer.Option(metavar="DTYPE", help="Of the weights: float32, bfloat16 or float16.")
    ] = "float32",
) -> None:
    """Write a run's outer parameters as a Hugging Face model.

    Writes those of the newest save, with config and tokenizer; where there is no save, as after `diloco restore`, those
    of the log's newest round. The run may continue meanwhile.
    """
    from diloco.history.export import export as write_export
    from diloco.history.export import refuse_target
    from diloco.history.load import find_run, load_trained, tokenizer_of
    from diloco.units import format_count

    folder, out = find_run(run), out.expanduser()
    refuse_target(out, folder, force=force)
    trained = load_trained(folder)
    for why in trained.passed:
        note(why)
    speech = None
    try:
        speech = tokenizer_of(trained, tokenizer)
    except DataError as error:
        if tokenizer is not None:
            raise
        note(f"no tokenizer is written: {error}")  # weights are of use without one
    count = format_count(sum(parameter.numel() for parameter in trained.module.parameters()))
    kind = write_export(trained, out, speech, dtype)
    print(f"{out}: {count} parameters of step {trained.step}, round {trained.round}, as {kind} in {dtype}")
    print(f'use it with: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    print(f"      or train on from it: model: {{hf: {out}}}")


def sample(
    run: RunName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="How the text begins.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Lower is safer; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives another text.")] = 0,
    tokenizer: RunTokenizer = None,
    device: Device = "auto",
) -> None:
    """Continue a text with a run's outer parameters.

    Takes those of the newest save, or of the log's newest round where there is none; the run may continue meanwhile.
    The text ends early where the model ends the document.
    """
    from diloco.history.load import find_run, load_trained, tokenizer_of
    from diloco.history.sample import Sampling, continued, encode_prompt, spoken
    from diloco.island.mesh import pick_device

    if not isfinite(temperature):
        raise ConfigError(f"--temperature {temperature}: give a number from 0 (always the likeliest) up")
    where = pick_device(device)
    trained = load_trained(find_run(run))
    for why in trained.passed:
        note(why)
    speech = tokenizer_of(trained, tokenizer)
    prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")  # a shell may pass any bytes
    row = encode_prompt(prompt, speech, trained.config.data)
    if len(row) > trained.context:
        note(f"of the prompt's {len(row)} tokens the model sees the last {trained.context}, its whole context")
    row, choice = row[-trained.context :], Sampling(temperature, top_k, seed)
    following = continued(
        trained.module.to(where), row, context=trained.context, vocab=speech.vocab, choice=choice, end=speech.end
    )
    note(f"the model of step {trained.step}, round {trained.round}")
    write(prompt)
    for text in spoken(islice(following, tokens), row, speech.decode):
        write(text)
    write("\n")


def note(text: str) -> None:
    """Print a remark to standard error, so that the output stays clean."""
    print(f"note: {text}", file=sys.stderr)


def write(text: str) -> None:
    """Print text as it comes; on a terminal, control characters are replaced, since it would obey them.

    Exits with 0 when the reader of a pipe has closed it.
    """
    from diloco.report.tables import harmless

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        print(harmless(text, lines=True) if sys.stdout.isatty() else text, end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
