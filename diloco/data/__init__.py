"""Data: a source is a row of tokens indexable by position; samples are cut out of it and shuffled without memory.

>>> samples = Samples(stdlib_source(), sequence=256, seed=0, validation_fraction=0.05)
>>> samples.train(position=0, count=16).shape  # the same rows on every island
(16, 257)

May import: island (where a batch goes) and below. Start with `samples.py`, then `batches.py`.
"""

from diloco.data.convert import tokenize
from diloco.data.header import TokenFileInfo
from diloco.data.hf import hf_source
from diloco.data.samples import Samples
from diloco.data.shuffle import permute
from diloco.data.source import ByteFiles, Progress, Source
from diloco.data.stdlib import stdlib_source
from diloco.data.text import text_source
from diloco.data.tokenizer import tokenizer_digest
from diloco.data.tokens import TokenFile, TokenWriter, import_raw

__all__ = [
    "ByteFiles",
    "Progress",
    "Samples",
    "Source",
    "TokenFile",
    "TokenFileInfo",
    "TokenWriter",
    "hf_source",
    "import_raw",
    "permute",
    "stdlib_source",
    "text_source",
    "tokenize",
    "tokenizer_digest",
]
