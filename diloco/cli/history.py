"""Declare the commands about what a run has left: `log`, `restore`, `rewind`, `set`, `export` and `sample`."""

import io
import json
import os
import sys
from dataclasses import asdict
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import Device, Json, Overrides, RunName, RunTokenizer, next_commands, say
from diloco.errors import ConfigError, DataError, SaveError

if TYPE_CHECKING:
    from diloco.elastic.protocol.record import Amendment
    from diloco.history.log import Findings, Row

COLUMNS = ("round", "fragment", "step", "tokens", "bytes", "digest", "contributors")
# A young model says anything, and a terminal would obey.
HARMLESS = dict.fromkeys({*range(32), *range(127, 160)} - set(map(ord, "\t\n")), "\ufffd")


def log(
    run: RunName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, replay, compare all digests.")] = False,
    checkout: Annotated[
        tuple[int, Path] | None,
        typer.Option("--checkout", metavar="ROUND OUT", help="Write the state after this round to a new folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the rounds of a run: contributors, bytes, digests.

    With --verify, anything that is damaged is named and the exit code is 1. The run may continue meanwhile.
    """
    from diloco.history import log as history
    from diloco.run.genesis import read_genesis

    logs = history.find_logs(run)
    if verify and checkout is None:
        findings = {str(log): history.verify(log) for log in logs}
        if as_json:
            print(json.dumps({log: asdict(found) for log, found in findings.items()}, indent=1))
        else:
            say(*(describe(log, found) for log, found in findings.items()))
        raise SystemExit(any(found.problems for found in findings.values()))
    longest = history.furthest(logs)
    if checkout is not None:
        number, folder = checkout
        path = history.checkout(longest, number, folder)
        say(f"round {number} is in {path}; diloco export {folder} OUT makes a Hugging Face model of it")
    elif as_json:
        print(json.dumps([asdict(row) for row in history.rows(longest)], indent=1))
    else:
        if (genesis := read_genesis(longest)) is not None and genesis.parent is not None:
            say(f"rewound: it begins with {genesis.parent}")
        rows = history.rows(longest)
        if rows and rows[0].round > 1:
            say(f"rounds before {rows[0].round} are not in this log: see checkpoint.keep")
        show(rows, history.names_of(logs))


def describe(log: str, found: "Findings") -> str:
    """Format what --verify found in a log: what was counted, and a line for each problem."""
    counted = (
        f"{found.snapshots} snapshot{'s' * (found.snapshots != 1)}, "
        f"rounds {found.first} to {found.last} replayed, {found.digests} digests equal"
    )
    if not found.problems:
        return f"{log}: whole: {counted}"
    return "\n".join([f"{log}: NOT whole ({counted})", *(f"  {problem}" for problem in found.problems)])


def show(found: "list[Row]", names: dict[str, str]) -> None:
    """Print the rounds as a table, with islands' names where they are known, else the end of their peer id."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, box=None, pad_edge=False)
    for row in found:
        fragment = "-" if row.fragment < 0 else row.fragment
        who = ", ".join(names.get(peer, peer[-8:]) for peer in row.contributors) or "-"
        who = f"{who}; set {row.amendment}" if row.amendment else who
        cells = (row.round, fragment, row.step, row.tokens, row.bytes, row.digest[:12], who)
        table.add_row(*map(str, cells))
    Console(highlight=False).print(table)


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
    effect on every island with the same round; diloco log shows which.
    """
    from diloco.train.amend import FOLDER, in_words

    folder = founding_folder(run)
    while (amendment := amend(folder, changes)) is None:
        pass  # somebody else was quicker: look again
    say(
        f"change {amendment.number} of {run}: {in_words(amendment)}",
        f"It waits in {folder / FOLDER}: the island that trains there, or the next one that does, brings it to the "
        "others. It holds for all of them from one round on, which diloco log shows.",
    )


def founding_folder(run: str) -> Path:
    """Return the folder of a run that has its owner's key; raise SaveError if it was founded elsewhere."""
    from diloco.history.log import find_logs

    folders = [log.parent for log in find_logs(run)]
    folder = next((folder for folder in folders if (folder / "owner.key").is_file()), None)
    if folder is None:
        raise SaveError(
            f"{folders[0]} joined a run that was founded elsewhere: only its owner changes it, "
            "in the folder in which it was founded"
        )
    return folder


def amend(folder: Path, overrides: list[str]) -> "Amendment | None":
    """Sign and write the amendment that follows those in force and those that still wait.

    None: another one has taken its number, so try again.
    """
    from diloco.comm.peers.identity import Identity
    from diloco.data.samples import OWN_LOOP
    from diloco.history.log import genesis_of, newest_state
    from diloco.run.folder import OUTER
    from diloco.train.amend import amended, check, with_waiting, write_amendment

    genesis, state = genesis_of(folder / OUTER), newest_state(folder / OUTER)
    made = with_waiting(folder, state.amendments)
    config = amended(genesis.configure({}), made)
    changes = check(config, overrides, own_loop=genesis.data == OWN_LOOP)
    if state.step >= config.inner.steps:
        raise ConfigError(
            f"the run is at its end, step {state.step}: diloco rewind RUN {state.head.round} --set … trains on (a run "
            "of one island also by diloco run CONFIG --resume --set …)"
        )
    if changes.get("inner.steps", state.step + 1) <= state.step:
        raise ConfigError(f"inner.steps={changes['inner.steps']}: the run is at step {state.step} already")
    return write_amendment(folder, Identity.load(folder / "owner.key"), len(made) + 1, changes)


def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    tokenizer: RunTokenizer = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote to OUT.")] = False,
) -> None:
    """Write a run's outer parameters as a Hugging Face model.

    Writes those of the newest save, with config and tokenizer. The run may continue meanwhile.
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
    kind = write_export(trained, out, speech)
    count = format_count(sum(parameter.numel() for parameter in trained.module.parameters()))
    print(f"{out}: {count} parameters of step {trained.step}, round {trained.round}, as {kind}")
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

    Takes those of the newest save; the run may continue meanwhile. The text ends early where the model ends the
    document.
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        print(text.translate(HARMLESS) if sys.stdout.isatty() else text, end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
