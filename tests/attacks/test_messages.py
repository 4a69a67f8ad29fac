"""Control messages that are made to swell, or to carry numbers that nobody can compute with."""

import lzma
import time
import tracemalloc
from hashlib import sha256
from random import Random

import pytest
from islands import at_round, introduce, team, wait_for
from liars import Liar

from diloco.elastic.protocol import wire
from diloco.elastic.protocol.messages import Begin, Goodbye, Held, Promise
from diloco.elastic.protocol.record import Ballot, Contribution, Grant, Key, Offer, Proposal, Record, Settings
from diloco.elastic.protocol.wire import MAX_INTEGER, PACKED, decode, decode_message, dump, encode_message, to_plain
from diloco.elastic.runtime import mailbox
from diloco.errors import MessageRefused

MANY = tuple(f"12D3KooW{sha256(bytes([n % 256, n // 256])).hexdigest()[:44]}" for n in range(1000))
PADDING = b" " * (64 << 20)
BOMBS = {
    "nothing but spaces": PADDING,
    "a message and spaces": b'["Goodbye",["x"]]' + PADDING,
    "a begin and spaces": b'["Begin",[' + PADDING,
    "a long text": b'["Goodbye",["' + b"x" * (64 << 20) + b'"]]',
}
SWELLING = {
    "empty lists": b'["Goodbye",[' + b"[]," * 300_000 + b"0]]",
    "objects": b'["Goodbye",[' + b"{}," * 300_000 + b"0]]",
    "depth": b'["Goodbye",' + b"[" * 900_000,
    "depth and width": b'["Goodbye",' + b"[1," * 300_000,
    "an integer without end": b'["Goodbye",[' + b"9" * 900_000 + b"]]",
    "a begin of empty lists": b'["Begin",[' + b"[]," * 2_700_000 + b"0]]",
}


def refused_within(raw: bytes, memory: int, seconds: float) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(MessageRefused):
            decode_message(raw)
        assert time.process_time() - started < seconds
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_what_swells_when_it_is_unpacked_is_refused_before_it_has(bomb):
    packed = PACKED + lzma.compress(bomb, preset=0)
    assert len(packed) < 20_000
    refused_within(packed, memory=2 << 20, seconds=1.0)


def test_a_dictionary_that_takes_much_memory_is_not_made():
    large = lzma.compress(encode_message(Goodbye()), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    refused_within(PACKED + large, memory=1 << 20, seconds=1.0)


@pytest.mark.parametrize("raw", SWELLING.values(), ids=SWELLING)
def test_what_swells_when_it_is_parsed_is_refused(raw):
    refused_within(raw, memory=32 << 20, seconds=5.0)


@pytest.mark.parametrize("number", [2**62, -(2**62), 2**53 + 1, 10**400])
def test_integers_end_where_floats_are_exact(number):
    raw = dump(to_plain(Offer(0, 0, 1, 7654321, ()))).replace(b"7654321", str(number).encode())
    with pytest.raises(MessageRefused):
        decode(Offer, raw)
    assert decode(Offer, dump(to_plain(Offer(0, 0, 1, MAX_INTEGER, ())))).tokens == MAX_INTEGER


def test_a_begin_and_a_promise_of_a_thousand_islands_are_within_their_limits():
    chance, begins = Random(1), range(10**10, 2 * 10**10, 10**6)
    samples = [tuple((lo, lo + chance.randrange(10**5)) for lo in sorted(chance.sample(begins, 16))) for _ in MANY]
    offers = [Offer(0, 7, 8, chance.randrange(10**6), each, chance.random()) for each in samples]
    parts = tuple(Contribution(name, offer, offer.tokens) for name, offer in zip(MANY, offers, strict=True))
    grants = tuple(Grant(f"{name}#1790000000000", each) for name, each in zip(MANY, samples, strict=True))
    key = Key(9, "d" * 64)
    proposal = Proposal(key, 0, parts, MANY, (), grants, Settings(), 50, answered=MANY)
    rates = (12_500_000,) * len(MANY)
    begin = Begin(key, Ballot(3, MANY[0], 1), proposal, MANY, rates, first=tuple(zip(MANY, rates, strict=True)))
    promise = Promise(key, 3, 1, 8, Held(Ballot(2, MANY[1], 0), Record(proposal, "e" * 64)))
    for message in (begin, promise):
        raw = dump([type(message).__name__, to_plain(message)])
        assert len(raw) > wire.MAX_MESSAGE and 3 * len(raw) < wire.MAX_MESSAGES[type(message).__name__]
        packed = encode_message(message)
        assert 4 * len(raw) < wire.MAX_RATIO * len(packed)
        assert decode_message(packed) == message


def test_the_bytes_of_a_banned_peer_are_not_unpacked(monkeypatch):
    seen = []

    def watched(raw: bytes):
        seen.append(raw)
        return decode_message(raw)

    monkeypatch.setattr(mailbox, "decode_message", watched)
    with team(("A", "B")) as (network, islands):
        introduce(islands)
        at_round(islands, 2)
        liar = Liar(network, islands)
        liar.say(b"garbage")
        wait_for(lambda: all("Z" in [n.peer for n in i.notes if n.kind == "excluded"] for i in islands), islands)
        again = Liar(network, islands)
        again.say(b"more garbage")
        at_round(islands, max(island.state.head.round for island in islands) + 2)
        assert b"garbage" in seen and b"more garbage" not in seen
