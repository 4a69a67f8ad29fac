"""Declare the commands before a run: `config` and `tokenize`."""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from diloco.cli.shared import Overrides
from diloco.errors import ConfigError, DataError


def config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file (none: the defaults).")] = None,
    set_: Overrides = None,
) -> None:
    """Print every setting of a run with its meaning."""
    from diloco.config.file import load_config, render_config

    if config is not None and not config.exists() and config.suffix not in (".yaml", ".yml"):
        key = str(config).rpartition(".")[2]
        raise ConfigError(f"{config}: no such file: config takes a file; to see one key: diloco config | grep {key}")
    print(render_config(load_config(config, set_ or [])), end="")


def tokenize(
    inputs: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Text files or folders.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The token file to write.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or the folder of a Hugging Face tokenizer.")] = "bytes",
    raw: Annotated[str | None, typer.Option(help="The input is one headerless token file: uint16 or uint32.")] = None,
    vocab: Annotated[int | None, typer.Option(help="With --raw: size of its vocabulary.")] = None,
) -> None:
    """Turn text into a token file.

    With --raw, turn a headerless token file into one. To train on it: data: {source: tokens, path: …}
    """
    from diloco.data import text, tokens
    from diloco.data.batches import TokenisingProgress
    from diloco.units import format_count

    if raw is None:
        info = text.tokenize(inputs, out, tokenizer, TokenisingProgress())
    else:
        if raw not in ("uint16", "uint32") or vocab is None or len(inputs) != 1:
            raise DataError("--raw takes uint16 or uint32, one input file, and --vocab with the size of its vocabulary")
        info = tokens.import_raw(inputs[0], out, cast(Literal["uint16", "uint32"], raw), vocab)
    print(f"{out}: {format_count(info.count)} tokens, vocabulary {info.vocab}")
    print(f"use it with: data: {{source: tokens, path: {out}}}")
