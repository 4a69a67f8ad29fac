import pytest

from diloco.comm.transport.frame import (
    CONTINUES,
    END,
    HEADER_BYTES,
    SECURED,
    check_piece,
    pack_header,
    parse_header,
)
from diloco.errors import FrameError


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(251)), bytearray(100_001), memoryview(bytes(4096))])
def test_a_header_says_what_was_packed(payload: bytes) -> None:
    raw = pack_header(7, b"head", payload, rest=3 if payload else 0, stamp_ns=2**40)
    header = parse_header(raw)
    assert (header.kind, header.head_length, header.length, header.stamp_ns) == (7, 4, len(payload), 2**40)
    check_piece(header, raw, b"head", payload, secured=False)


def test_inside_tls_there_is_no_checksum() -> None:
    raw = pack_header(7, b"", b"payload", flags=SECURED)
    header = parse_header(raw)
    assert header.checksum == 0
    check_piece(header, raw, b"", b"payload", secured=True)


def test_a_peer_cannot_talk_us_out_of_the_checksum() -> None:
    raw = pack_header(7, b"", b"payload", flags=SECURED)
    with pytest.raises(FrameError, match="without checksum"):
        check_piece(parse_header(raw), raw, b"", b"payload", secured=False)


@pytest.mark.parametrize(("head", "payload"), [(b"hEad", b"payload"), (b"head", b"paYload")])
def test_damage_is_seen(head: bytes, payload: bytes) -> None:
    raw = pack_header(7, b"head", b"payload")
    with pytest.raises(FrameError, match="checksum"):
        check_piece(parse_header(raw), raw, head, payload, secured=False)


def test_damage_to_the_header_is_seen() -> None:
    raw = bytearray(pack_header(7, b"head", b"payload"))
    raw[3] ^= 1  # the kind
    with pytest.raises(FrameError, match="checksum"):
        check_piece(parse_header(raw), raw, b"head", b"payload", secured=False)


def changed(position: int, value: bytes) -> bytes:
    raw = bytearray(pack_header(7, b"head", b"payload"))
    raw[position : position + len(value)] = value
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "has"),
        (bytes(HEADER_BYTES), "no diloco frame"),
        (b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES), "no diloco frame"),
        (changed(2, b"\x09"), "version 9"),
        (changed(4, b"\xf0"), "flags"),
        (changed(8, (2**32 - 1).to_bytes(4, "little")), "head of"),
        (changed(12, (2**62).to_bytes(8, "little")), "at most"),
        (changed(20, (2**64 - 1).to_bytes(8, "little")), "at most"),
        (pack_header(7, b"", b"", rest=5), "never end"),
        (pack_header(7, b"head", b"payload", flags=CONTINUES), "no head"),
        (pack_header(END, b"", b"payload"), "end mark"),
    ],
)
def test_refused_with_a_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        parse_header(raw)
