"""Every decoder of outside bytes against mutated input: our own errors or a sound value, and little memory.

`DILOCO_FUZZ=100000` sets how many inputs each decoder gets; `make prove` does.
"""

import os
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tape import Tape

from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.record import PeerRecord, decode, encode
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport import frame
from diloco.comm.transport.frame import SECURED, pack_header
from diloco.comm.transport.transport import Stream
from diloco.comm.transport.wire import WireCarrier
from diloco.errors import CodecError, RecordRefused, StreamEnded, TicketError, TransportError

INPUTS = int(os.environ.get("DILOCO_FUZZ", "10000"))
NOW = 1_800_000_000.0
MAX_PAYLOAD = 64 * 1024
TELLING = (0, 1, 0x7F, 0x80, 0xFF)


def mutate(raw: bytes, chance: Random) -> bytes:
    mutated = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 8])):
        place, length = chance.randrange(len(mutated) + 1), chance.randrange(1, 40)
        match chance.randrange(6):
            case 0:
                mutated[place : place + 1] = chance.randbytes(1)
            case 1:
                mutated[place : place + chance.choice([1, 2, 4, 8])] = bytes([chance.choice(TELLING)]) * 4
            case 2:
                del mutated[place : place + length]
            case 3:
                mutated[place:place] = chance.randbytes(length)
            case 4:
                mutated[place:place] = mutated[place : place + length]
            case _:
                del mutated[place:]
    return bytes(mutated)


def feed(raw: bytes, decoder: Callable[[bytes], object], allowed: type[Exception]) -> bool:
    """Whether the decoder took it; anything but a value or the allowed error fails the test."""
    try:
        decoder(raw)
    except allowed:
        return False
    return True


def fuzz(samples: list[bytes], decoder: Callable[[bytes], object], allowed: type[Exception], memory: int) -> int:
    """How many inputs were taken. Memory is measured on some only: measuring is slow."""
    for sample in samples:
        assert feed(sample, decoder, allowed), "what was not touched must pass"
    chance = Random(7)
    inputs = [mutate(chance.choice(samples), chance) for _ in range(min(INPUTS, 2000))]
    tracemalloc.start()
    taken = sum(feed(raw, decoder, allowed) for raw in inputs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < memory
    for _ in range(INPUTS - len(inputs)):
        taken += feed(mutate(chance.choice(samples), chance), decoder, allowed)
    return taken


def frames(chance: Random, *, secure: bool) -> bytes:
    raw = bytearray()
    for _ in range(chance.randrange(1, 5)):
        head, payload = chance.randbytes(chance.randrange(9)), chance.randbytes(chance.choice([0, 1, 99, 5000]))
        flags = SECURED if secure else 0
        raw += pack_header(chance.randrange(254), head, payload, flags=flags) + head + payload
    return bytes(raw + pack_header(255, b"", b"", flags=SECURED if secure else 0))


@pytest.mark.parametrize("secure", [False, True])
def test_frames(secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MAX_HEAD", 256)
    monkeypatch.setattr(frame, "MAX_PAYLOAD", MAX_PAYLOAD)

    def read_all(raw: bytes) -> None:
        stream = Stream(WireCarrier(Tape(raw, secure=secure)))
        try:
            while True:
                assert len(stream.receive().payload) <= MAX_PAYLOAD
        except StreamEnded:
            return

    chance = Random(1)
    samples = [frames(chance, secure=secure) for _ in range(20)]
    taken = fuzz(samples, read_all, TransportError, memory=8 * MAX_PAYLOAD)
    assert taken > (INPUTS // 20 if secure else 0)  # inside TLS nothing else looks at the payload


def test_tickets(tmp_path) -> None:
    owner = Identity.load(tmp_path / "key")
    address = "/ip4/10.0.0.7/tcp/31337/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    tickets = [
        Ticket.issue(owner, [address] * n, now=NOW, lifetime_s=60, peer=p) for n in (0, 2) for p in (None, b"p" * 32)
    ]
    samples = [ticket.render().encode() for ticket in tickets]
    fuzz(samples, lambda raw: Ticket.parse(raw.decode("latin-1"), NOW), TicketError, memory=256 * 1024)


def test_records(tmp_path) -> None:
    peer = Identity.load(tmp_path / "key")
    record = PeerRecord(
        run_id=b"r" * 32, public_key=peer.public_key, control=("/ip4/10.0.0.7/tcp/31337",), bulk=(("10.0.0.7", 31338),),
        certificate=bytes(256), name="α", devices="8 x H200", mesh="fsdp 8", up_bits_per_s=1, down_bits_per_s=2,
        round=3,
        chain_digest=b"c" * 32, admission=b"a" * 206, sequence=4, expires_ms=int(NOW * 1000) + 30_500,
    )  # fmt: skip
    fuzz([encode(record, peer)], lambda raw: decode(raw, NOW), RecordRefused, memory=256 * 1024)


@pytest.mark.parametrize("name", CODECS)
def test_codec_payloads(name: str) -> None:
    codec, count = CODECS[name], 700
    key = NoiseKey(1, 0, "a")
    samples = [bytes(codec.encode(torch.randn(count) * 10.0**power, key).numpy()) for power in (-30, -3, 0, 37)]
    total = torch.zeros(count)

    def add(raw: bytes) -> None:
        total.zero_()
        try:
            codec.accumulate(torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8), total, share=0.5)
        except CodecError:
            assert not total.any(), "refused, and yet something was added"
            raise
        assert torch.isfinite(total).all()

    assert fuzz(samples, add, CodecError, memory=1024 * 1024) > INPUTS // 50


@given(st.binary(max_size=300))
def test_noise_is_no_frame(raw: bytes) -> None:
    with pytest.raises(TransportError):
        Stream(WireCarrier(Tape(raw))).receive()
