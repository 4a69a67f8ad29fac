"""Bounded binary fields for what strangers send: every length is checked before anything of that length is allocated.

Integers are unsigned and big-endian. A reader raises `Malformed` and nothing else.
"""

import re
from dataclasses import dataclass

ADDRESS_LIMIT = 255
# No comma or space: hivemind joins addresses with commas on p2pd's command line.
MULTIADDR = re.compile(r"(?:/[A-Za-z0-9._:%-]+)+")


class Malformed(ValueError):
    """Signal that bytes, or what is to be written as bytes, do not fit their format."""


@dataclass
class Reader:
    """Read the fields of a message in order, and raise `Malformed` for whatever does not fit."""

    data: bytes
    position: int = 0

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes, all of which must be present."""
        end = self.position + length
        if end > len(self.data):
            raise Malformed(f"{end - len(self.data)} bytes are missing")
        taken, self.position = self.data[self.position : end], end
        return taken

    def integer(self, size: int) -> int:
        """Read an unsigned big-endian number of `size` bytes."""
        return int.from_bytes(self.take(size), "big")

    def count(self, limit: int) -> int:
        """Read a number of entries, one byte, and refuse more than `limit`."""
        number = self.integer(1)
        if number > limit:
            raise Malformed(f"{number} entries, at most {limit} are allowed")
        return number

    def blob(self, limit: int) -> bytes:
        """Read bytes behind their length (two bytes), and refuse more than `limit`."""
        length = self.integer(2)
        if length > limit:
            raise Malformed(f"a field of {length} bytes, at most {limit} are allowed")
        return self.take(length)

    def text(self, limit: int) -> str:
        """Read a printable UTF-8 text of up to `limit` bytes."""
        raw = self.blob(limit)
        try:
            return printable(raw.decode())
        except UnicodeDecodeError:
            raise Malformed("a text is not UTF-8") from None

    def address(self) -> str:
        """Read a multiaddr of up to 255 bytes."""
        return multiaddr(self.text(ADDRESS_LIMIT))

    def finish(self) -> None:
        """Refuse a message that has bytes left."""
        if self.position != len(self.data):
            raise Malformed(f"{len(self.data) - self.position} bytes too many")


def integer(number: int, size: int) -> bytes:
    """Write an unsigned number as `size` big-endian bytes."""
    if not 0 <= number < 256**size:
        raise Malformed(f"{number} does not fit {size} bytes")
    return number.to_bytes(size, "big")


def count(number: int, limit: int) -> bytes:
    """Write a number of entries, at most `limit`, as one byte."""
    if number > limit:
        raise Malformed(f"{number} entries, at most {limit} are allowed")
    return integer(number, 1)


def fixed(raw: bytes, length: int) -> bytes:
    """Return the bytes as they are, if there are exactly `length`."""
    if len(raw) != length:
        raise Malformed(f"{len(raw)} bytes where {length} belong")
    return raw


def blob(raw: bytes, limit: int) -> bytes:
    """Write up to `limit` bytes behind their length (two bytes)."""
    if len(raw) > limit:
        raise Malformed(f"a field of {len(raw)} bytes, at most {limit} are allowed")
    return integer(len(raw), 2) + raw


def text(value: str, limit: int) -> bytes:
    """Write a printable text of up to `limit` bytes of UTF-8 behind its length."""
    try:
        return blob(printable(value).encode(), limit)
    except UnicodeEncodeError:
        raise Malformed("a text is not Unicode") from None


def address(value: str) -> bytes:
    """Write a multiaddr of up to 255 bytes behind its length."""
    return text(multiaddr(value), ADDRESS_LIMIT)


def printable(value: str) -> str:
    """Refuse control characters: these texts end up in other people's terminals and logs."""
    if not value.isprintable():
        raise Malformed("a text has control characters")
    return value


def multiaddr(value: str) -> str:
    """Refuse a text that is no multiaddr, or that could be taken apart on p2pd's command line."""
    if not MULTIADDR.fullmatch(value):
        raise Malformed(f"{value[:60]!r} is no multiaddr such as /ip4/10.0.0.7/tcp/31337/p2p/12D3…")
    return value
