"""Peer records: what is signed comes back, anything else is refused with a reason that can be counted."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.record import CONTEXT, LIFETIME_LIMIT_S, RECORD_LIMIT, PeerRecord, authenticate, decode, encode
from diloco.errors import RecordRefused

NOW = 1_800_000_000.0
WORDS = st.text(st.characters(categories=["L", "N", "P"]), max_size=30)
NUMBERS = st.integers(0, 2**64 - 1)
DIGESTS = st.binary(min_size=32, max_size=32)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.load(tmp_path_factory.mktemp("peer") / "key")


@pytest.fixture
def record(peer: Identity) -> PeerRecord:
    return PeerRecord(
        run_id=b"r" * 32, public_key=peer.public_key, control=("/ip4/10.0.0.7/tcp/31337",),
        bulk=(("10.0.0.7", 31338), ("peer.example.org", 443)), certificate=bytes(range(256)), name="island-α",
        devices="8 x H200", mesh="fsdp 8", up_bits_per_s=10**9, down_bits_per_s=2 * 10**9, round=17,
        chain_digest=b"c" * 32, admission=b"a" * 206, sequence=3, expires_ms=int(NOW * 1000) + 30_500,
    )  # fmt: skip


RECORDS = st.builds(
    PeerRecord,
    run_id=DIGESTS,
    public_key=st.just(b""),
    control=st.lists(st.text("abc.:9", min_size=1, max_size=200).map("/dns4/{}".format), max_size=8).map(tuple),
    bulk=st.lists(st.tuples(WORDS, st.integers(0, 65535)), max_size=8).map(tuple),
    certificate=st.binary(max_size=2048),
    **dict.fromkeys(("name", "devices", "mesh"), WORDS),
    **dict.fromkeys(("up_bits_per_s", "down_bits_per_s", "round", "sequence"), NUMBERS),
    chain_digest=DIGESTS,
    admission=st.binary(max_size=256),
    expires_ms=st.integers(int(NOW * 1000) + 1, int((NOW + LIFETIME_LIMIT_S) * 1000)),
)


@given(drawn=RECORDS)
def test_what_is_encoded_is_decoded(peer: Identity, drawn: PeerRecord) -> None:
    written = replace(drawn, public_key=peer.public_key)
    assert decode(encode(written, peer), NOW) == written


def test_the_largest_record_fits(peer: Identity, record: PeerRecord) -> None:
    text = "x" * 128
    largest = replace(
        record,
        control=("/" + "a" * 254,) * 8,
        bulk=(("h" * 255, 65535),) * 8,
        certificate=bytes(2048),
        admission=bytes(256),
    )
    largest = replace(largest, name=text, devices=text, mesh=text)
    assert len(encode(largest, peer)) <= RECORD_LIMIT
    assert decode(encode(largest, peer), NOW) == largest


def test_a_record_expires(peer: Identity, record: PeerRecord) -> None:
    raw = encode(record, peer)
    assert decode(raw, NOW + 30.4) == record
    assert refusal(raw, NOW + 30.5) == "expired"
    assert authenticate(raw) == record


def test_a_record_may_not_live_for_ever(peer: Identity, record: PeerRecord) -> None:
    assert refusal(encode(replace(record, expires_ms=2**63), peer)) == "expiry too far"


def test_another_key_cannot_sign(peer: Identity, record: PeerRecord, tmp_path_factory: pytest.TempPathFactory) -> None:
    forger = Identity.load(tmp_path_factory.mktemp("forger") / "key")
    body = encode(record, peer)[:-64]
    assert refusal(body + forger.sign(CONTEXT + body)) == "bad signature"
    assert refusal(body + peer.sign(body)) == "bad signature"


def test_any_changed_bit_is_refused(peer: Identity, record: PeerRecord) -> None:
    raw = encode(record, peer)
    for position in range(len(raw)):
        for bit in range(8):
            changed = raw[:position] + bytes([raw[position] ^ 1 << bit]) + raw[position + 1 :]
            assert refusal(changed) in {"bad signature", "malformed", "expiry too far", "expired"}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [(b"", "malformed"), (b"\1", "malformed"), (b"\2" * 300, "malformed"), (bytes(RECORD_LIMIT + 1), "too long")],
)
def test_garbage_is_refused(raw: bytes, reason: str) -> None:
    assert refusal(raw) == reason


@pytest.mark.parametrize(
    "change",
    [
        {"certificate": bytes(2049)},
        {"name": "x" * 129},
        {"name": "\x1b[31m"},
        {"name": "\ud800"},
        {"control": ("not an address",)},
        {"control": ("/a",) * 9},
        {"bulk": (("host", 70_000),)},
        {"round": -1},
        {"chain_digest": b"short"},
        {"up_bits_per_s": 2**64},
    ],
)
def test_what_nobody_would_accept_is_not_encoded(peer: Identity, record: PeerRecord, change: dict[str, object]) -> None:
    with pytest.raises(RecordRefused, match="malformed"):
        encode(replace(record, **change), peer)  # type: ignore[arg-type]


def refusal(raw: bytes, now: float = NOW) -> str:
    with pytest.raises(RecordRefused) as caught:
        decode(raw, now)
    return caught.value.reason
