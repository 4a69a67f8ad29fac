import sys
from pathlib import Path

from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError
from diloco.history.export import export, refuse_target
from diloco.history.load import Trained, find_run, load_trained, tokenizer_of
from diloco.units import format_count


def export_command(run: str, out: Path, *, tokenizer: str | None, force: bool) -> None:
    folder, out = find_run(run), out.expanduser()
    refuse_target(out, folder, force=force)
    trained = load_trained(folder)
    for why in trained.passed:
        print(f"note: {why}", file=sys.stderr)
    kind = export(trained, out, tokenizer_if_known(trained, tokenizer))
    count = format_count(sum(parameter.numel() for parameter in trained.module.parameters()))
    print(f"{out}: {count} parameters of step {trained.step}, round {trained.round}, as {kind}")
    print(f'use it with: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
    print(f"      or train on from it: model: {{hf: {out}}}")


def tokenizer_if_known(trained: Trained, given: str | None) -> Tokenizer | None:
    """Weights are of use without one; a tokenizer that was asked for must be there."""
    try:
        return tokenizer_of(trained, given)
    except DataError as error:
        if given is not None:
            raise
        print(f"note: no tokenizer is written: {error}", file=sys.stderr)
        return None
