"""The fixed start of a token file: 128 bytes, little-endian, sealed by their own digest.

magic 8 | version 4 | bytes per token 4 | vocab 8 | count 8 | SHA-256 of the payload 32 | tokenizer digest 32 | seal 32
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import DataError

MAGIC = b"DILOCOTK"
VERSION = 1
WIDTHS = (2, 4)
SIZE = 128

_FIELDS = struct.Struct("<8sIIQQ32s32s")
_UNKNOWN = bytes(32)
_AGAIN = "delete it and make it again (diloco tokenize)"


@dataclass(frozen=True)
class TokenFileInfo:
    path: Path
    vocab: int
    count: int
    width: int  # bytes per token
    digest: str  # SHA-256 of the payload
    tokenizer: str | None  # digest of the tokenizer, where known


def width_for(vocab: int) -> int:
    """The narrowest token that holds range(vocab)."""
    for width in WIDTHS:
        if 1 <= vocab <= 256**width:
            return width
    raise DataError(f"a vocabulary of {vocab} tokens: a token file holds 1 to {256 ** WIDTHS[-1]}")


def pack(info: TokenFileInfo) -> bytes:
    tokenizer = bytes.fromhex(info.tokenizer) if info.tokenizer else _UNKNOWN
    digest = bytes.fromhex(info.digest)
    fields = _FIELDS.pack(MAGIC, VERSION, info.width, info.vocab, info.count, digest, tokenizer)
    return fields + hashlib.sha256(fields).digest()


def unpack(path: Path, header: bytes, file_size: int) -> TokenFileInfo:
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a token file: make one with diloco tokenize, or import a raw .bin file")
    if len(header) < SIZE:
        raise DataError(f"{path} is cut short within its header: {_AGAIN}")
    _, version, width, vocab, count, digest, tokenizer = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise DataError(f"{path} has token file version {version}, this diloco reads {VERSION}: {_AGAIN}")
    if hashlib.sha256(header[: _FIELDS.size]).digest() != header[_FIELDS.size : SIZE]:
        raise DataError(f"{path} has a damaged header: {_AGAIN}")
    info = TokenFileInfo(path, vocab, count, width, digest.hex(), None if tokenizer == _UNKNOWN else tokenizer.hex())
    _check(info, file_size)
    return info


def _check(info: TokenFileInfo, file_size: int) -> None:
    if info.width not in WIDTHS:
        raise DataError(f"{info.path} has {info.width} bytes per token, not 2 or 4: {_AGAIN}")
    if not 1 <= info.vocab <= 256**info.width:
        raise DataError(f"{info.path} has a vocabulary of {info.vocab} in {info.width} bytes per token: {_AGAIN}")
    if info.count == 0:
        raise DataError(f"{info.path} has no tokens: tokenise files that hold text")
    expected = SIZE + info.count * info.width
    if file_size != expected:
        problem = "cut short" if file_size < expected else "followed by bytes that do not belong to it"
        raise DataError(f"{info.path} is {problem}: {file_size} bytes instead of {expected}: {_AGAIN}")
