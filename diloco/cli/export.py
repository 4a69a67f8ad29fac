"""`diloco export`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import RunName, RunTokenizer
from diloco.errors import DataError

if TYPE_CHECKING:
    from diloco.data.tokenizer import Tokenizer
    from diloco.history.load import Trained


def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    tokenizer: RunTokenizer = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export wrote to OUT.")] = False,
) -> None:
    """Write a run's outer parameters as a Hugging Face model.

    Writes those of the newest save, with config and tokenizer. The run may go on meanwhile.
    """
    from diloco.history.export import export as write_export
    from diloco.history.export import refuse_target
    from diloco.history.load import find_run, load_trained
    from diloco.units import format_count

    folder, out = find_run(run), out.expanduser()
    refuse_target(out, folder, force=force)
    trained = load_trained(folder)
    for why in trained.passed:
        print(f"note: {why}", file=sys.stderr)
    kind = write_export(trained, out, tokenizer_if_known(trained, tokenizer))
    count = format_count(sum(parameter.numel() for parameter in trained.module.parameters()))
    print(f"{out}: {count} parameters of step {trained.step}, round {trained.round}, as {kind}")
    print(f'use it with: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    print(f"      or train on from it: model: {{hf: {out}}}")


def tokenizer_if_known(trained: "Trained", given: str | None) -> "Tokenizer | None":
    """Weights are of use without one; a tokenizer that was asked for must be there."""
    from diloco.history.load import tokenizer_of

    try:
        return tokenizer_of(trained, given)
    except DataError as error:
        if given is not None:
            raise
        print(f"note: no tokenizer is written: {error}", file=sys.stderr)
        return None
