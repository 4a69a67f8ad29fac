"""Typed values as JSON and back: messages, records, states. What comes from a peer is checked against its type."""

import json
import lzma
import re
import sys
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from diloco.elastic.protocol.messages import Message
from diloco.errors import MessageRefused

PACKED = b"\0"  # no JSON begins so
PACK_BYTES = 16 << 10
MAX_MESSAGE = 1 << 20  # unpacked
MAX_MESSAGES = {"Begin": 8 << 20, "Promise": 8 << 20}  # a proposal of 1000 islands takes 0.5 MB, of much data 1.2
MAX_RATIO = 64  # of unpacked to packed bytes: proposals of 1000 islands have 3 to 7
HARMLESS = 256 << 10  # unpacked, at whatever ratio
MAX_UNPACK_MEMORY = 4 << 20  # what we pack takes less than 1 MiB to unpack
MAX_TEXT = 8192
MAX_ITEMS = 100_000
MAX_INTEGER = 2**53  # up to here a float is exact, too
FEW_LISTS, BYTES_OF_A_LIST = 1000, 8  # a list takes 20 times the memory of its three bytes: ours have 25 and more each
LARGEST_FLOAT = sys.float_info.max
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message)}
LONGEST_OPENING = 16
OPENING = re.compile(rb'\["([A-Z][a-z]+)",')

T = TypeVar("T")


def encode_message(message: Message) -> bytes:
    """Encode a message for a peer, and compress it if it is larger than 16 KiB.

    A message about many islands names each of them several times, far apart: compressed, a fifth is left.
    """
    raw = dump([type(message).__name__, to_plain(message)])
    return PACKED + lzma.compress(raw, preset=0) if len(raw) > PACK_BYTES else raw


def unpack(raw: bytes) -> bytes:
    """Return a message's JSON, decompressed if it is compressed; raise MessageRefused before it gets too long.

    Each kind of message has a limit of its own, so the first few bytes are looked at before all others.
    """
    if not raw.startswith(PACKED):
        _limit_of(raw)
        return raw
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_UNPACK_MEMORY)
    try:
        opening = unpacker.decompress(raw[len(PACKED) :], max_length=LONGEST_OPENING)
        most = min(_limit_of(opening), max(HARMLESS, MAX_RATIO * len(raw)))
        rest = b"" if unpacker.eof else unpacker.decompress(b"", max_length=most)
    except (lzma.LZMAError, EOFError) as error:
        raise MessageRefused(f"cannot be unpacked: {error}") from None
    if not unpacker.eof or unpacker.unused_data:
        raise MessageRefused("unpacked, it is too long, or cut off")
    return opening + rest


def _limit_of(raw: bytes) -> int:
    """Return how many bytes of JSON a message may have that opens so; raise MessageRefused for more."""
    opening = OPENING.match(raw)
    kind = opening[1].decode() if opening is not None else ""
    if kind not in KINDS:
        raise MessageRefused("no message of ours")
    limit = MAX_MESSAGES.get(kind, MAX_MESSAGE)
    if len(raw) > limit:
        raise MessageRefused(f"{kind} of {len(raw)} bytes, at most {limit} are accepted")
    return limit


def decode_message(raw: bytes) -> Message:
    """Decode what a peer has sent, and raise MessageRefused unless it is a message of ours."""
    match parse(unpack(raw)):
        case [str(kind), body] if kind in KINDS:
            return typing.cast(Message, from_plain(KINDS[kind], body))
    raise MessageRefused("no message of ours")


def encode(value: object) -> bytes:
    """Return a typed value as JSON, for `decode` to read back."""
    return dump(to_plain(value))


def decode(kind: type[T], raw: bytes) -> T:
    """Build a value of type `kind` from JSON, and raise MessageRefused if it does not fit the type."""
    return typing.cast(T, from_plain(kind, parse(raw)))


def dump(plain: object) -> bytes:
    """Return plain values as compact JSON, and raise ValueError for NaN and infinity."""
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()


def parse(raw: bytes) -> Any:
    """Return the plain values in a JSON text of lists, and raise MessageRefused if it is none.

    What it takes in memory is bounded by its length: there are no objects, and not more lists than values fill.
    """
    if raw.count(b"[") > FEW_LISTS + len(raw) // BYTES_OF_A_LIST:
        raise MessageRefused("it has too many lists")
    try:
        return json.loads(raw, parse_constant=_no_number, object_hook=_no_object)
    except (ValueError, RecursionError) as error:
        raise MessageRefused(f"not JSON: {type(error).__name__}") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _no_object(found: dict[str, object]) -> None:
    raise ValueError("an object, and ours are lists")


def to_plain(value: object) -> Any:
    """Convert dataclasses and tuples to lists of their values, at every depth."""
    if is_dataclass(value):
        return [to_plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Build a value of type `kind` from lists and scalars, and raise MessageRefused if they do not fit."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        (other,) = (option for option in typing.get_args(kind) if option is not types.NoneType)
        return None if plain is None else from_plain(other, plain)
    if origin is tuple:
        return _tuple(typing.get_args(kind), plain)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _hints(kind)
        if not isinstance(plain, list) or len(plain) != len(hints):
            raise MessageRefused(f"{kind.__name__} has {len(hints)} fields")
        return kind(*(from_plain(hint, part) for hint, part in zip(hints, plain, strict=True)))
    return _scalar(kind, plain)


def _tuple(items: tuple[Any, ...], plain: Any) -> tuple[Any, ...]:
    if not isinstance(plain, list) or len(plain) > MAX_ITEMS:
        raise MessageRefused("a list was due")
    if len(items) == 2 and items[1] is ...:
        return tuple(from_plain(items[0], part) for part in plain)
    if len(items) != len(plain):
        raise MessageRefused(f"{len(plain)} entries where {len(items)} were due")
    return tuple(from_plain(item, part) for item, part in zip(items, plain, strict=True))


@cache
def _hints(kind: Any) -> tuple[Any, ...]:
    """Return the types of a class's fields, in order: our dataclasses and named tuples annotate nothing else."""
    return tuple(typing.get_type_hints(kind).values())


def _scalar(kind: Any, plain: Any) -> Any:
    if kind is float and type(plain) in (int, float):
        if not abs(plain) <= LARGEST_FLOAT:  # JSON's 1e999 is infinite, its integers have no end
            raise MessageRefused("a number is too large")
        return float(plain)
    if type(plain) is not kind:
        raise MessageRefused(f"{type(plain).__name__} where {getattr(kind, '__name__', kind)} was due")
    if kind is str and (len(plain) > MAX_TEXT or not plain.isprintable()):
        raise MessageRefused("a text is too long, or cannot be printed")
    if kind is int and abs(plain) > MAX_INTEGER:
        raise MessageRefused("a number is too large")
    return plain
