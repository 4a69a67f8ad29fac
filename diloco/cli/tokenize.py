from pathlib import Path
from typing import Literal, cast

from diloco.data import import_raw, tokenize
from diloco.data.batches import TokenisingProgress
from diloco.errors import DataError
from diloco.units import format_count


def tokenize_command(inputs: list[Path], out: Path, tokenizer: str, raw: str | None, vocab: int | None) -> None:
    if raw is None:
        info = tokenize(inputs, out, tokenizer, TokenisingProgress())
    else:
        if raw not in ("uint16", "uint32") or vocab is None or len(inputs) != 1:
            raise DataError("--raw takes uint16 or uint32, one input file, and --vocab with the size of its vocabulary")
        info = import_raw(inputs[0], out, cast(Literal["uint16", "uint32"], raw), vocab)
    print(f"{out}: {format_count(info.count)} tokens, vocabulary {info.vocab}")
    print(f"use it with: data: {{source: tokens, path: {out}}}")
