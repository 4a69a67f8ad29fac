"""Frames: versioned, bounded, checksummed. Pure functions on bytes.

A frame travels as one piece or as several: a paced link cuts large payloads so that many streams share it evenly.
A piece is a fixed header, a small `head` (first piece only) and payload bytes; `rest` says how many payload bytes of
the frame follow in later pieces. Every length is checked against a limit before anything of that length is allocated.
"""

import struct
from dataclasses import dataclass

import xxhash

from diloco.errors import FrameError

Buffer = bytes | bytearray | memoryview

MAGIC = b"dL"
VERSION = 1
END = 255  # the sender has no more to say; a stream that stops without it was cut
HELLO = 254  # opens a connection, answers an opening
LAST_FREE_KIND = 253  # 0 … 253 belong to the user of a stream

CONTINUES = 1  # flag: payload of the frame that the piece before belongs to
SECURED = 2  # flag: TLS already protects every byte, the checksum is zero

MAX_HEAD = 64 * 1024
MAX_PAYLOAD = 64 * 1024 * 1024  # of a whole frame

# magic, version, kind, flags, head length, payload length, rest, send time; the checksum covers these and so is apart
_FIELDS = struct.Struct("<2sBBIIQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True)
class FrameHeader:
    """Describe one piece of a frame, as its header does."""

    kind: int
    flags: int
    head_length: int
    length: int  # payload bytes of this piece
    rest: int  # payload bytes of the same frame in later pieces
    stamp_ns: int  # CLOCK_MONOTONIC of the sender's machine when the piece left its uplink; 0 when not shaped
    checksum: int

    @property
    def continues(self) -> bool:
        """Tell whether this piece belongs to the same frame as the piece before it."""
        return bool(self.flags & CONTINUES)


def pack_header(kind: int, head: Buffer, payload: Buffer, *, rest: int = 0, flags: int = 0, stamp_ns: int = 0) -> bytes:
    """Return the header of a piece, with a checksum over header, head and payload unless TLS protects them."""
    length = memoryview(payload).nbytes
    fields = _FIELDS.pack(MAGIC, VERSION, kind, flags, len(head), length, rest, stamp_ns)
    return fields + _CHECKSUM.pack(0 if flags & SECURED else _digest(fields, head, payload))


def parse_header(data: Buffer) -> FrameHeader:
    """Return the header in these bytes.

    Raises FrameError for whatever is not allowed, such as a length beyond its limit.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, kind, flags, head_length, length, rest, stamp_ns = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"no diloco frame: it starts with {magic.hex()}")
    if version != VERSION:
        raise FrameError(f"frame version {version}, this side speaks {VERSION}: use the same release on both sides")
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    header = FrameHeader(kind, flags, head_length, length, rest, stamp_ns, checksum)
    _check_lengths(header)
    _check_flags(header)
    return header


def _check_lengths(header: FrameHeader) -> None:
    if header.head_length > MAX_HEAD:
        raise FrameError(f"frame head of {header.head_length} bytes, at most {MAX_HEAD} are accepted")
    if header.length + header.rest > MAX_PAYLOAD:
        raise FrameError(f"frame of {header.length + header.rest} bytes, at most {MAX_PAYLOAD} are accepted")
    if header.rest and not header.length:
        raise FrameError("an empty piece that promises more: it would never end")


def _check_flags(header: FrameHeader) -> None:
    if header.flags & ~(CONTINUES | SECURED):
        raise FrameError(f"unknown frame flags {header.flags:#x}")
    if header.flags & SECURED and header.checksum:
        raise FrameError("a frame inside TLS carries no checksum")
    if header.continues and (header.head_length or not header.length):
        raise FrameError("a continuing piece has payload and no head")
    if header.kind == END and (header.head_length or header.length or header.continues):
        raise FrameError("an end mark carries nothing")


def check_piece(header: FrameHeader, raw_header: Buffer, head: Buffer, payload: Buffer, *, secured: bool) -> None:
    """Raise FrameError unless what arrived is what was sent.

    `secured` is what this side knows of its own connection.
    """
    if bool(header.flags & SECURED) != secured:
        raise FrameError("a frame without checksum outside TLS" if not secured else "a frame not marked as inside TLS")
    if not secured and header.checksum != _digest(memoryview(raw_header)[: _FIELDS.size], head, payload):
        raise FrameError("checksum mismatch: the frame was damaged on its way")


def _digest(fields: Buffer, head: Buffer, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(head)
    digest.update(payload)
    return digest.intdigest()
