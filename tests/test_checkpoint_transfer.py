"""Items come whole and right from whoever has them, however their donors die, lie, stall or refuse."""

import threading
import time
from contextlib import suppress
from hashlib import sha256

import pytest
from items import MANIFEST, SMALL_CHUNK, STATE, holding
from swarm import NAME, SOON, Countdown, Swarm
from team import wait_until

from diloco.checkpoint.log.library import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Item,
    ItemManifest,
    Library,
    usual_chunk_bytes,
)
from diloco.checkpoint.transfer.donor import BUSY, BYTES, CHANNEL, NOT_HERE, READY
from diloco.checkpoint.transfer.fetch import MAX_ASKED, ChunkBoard, Transfer
from diloco.comm.transport import frame
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import Piece
from diloco.errors import ItemMissing, PeerLost, TransferFailed, WrongBytes


def test_three_donors_give_the_whole_of_it(swarm):
    counted, seen = threading.Barrier(3), []
    for name in "abc":
        swarm.watched(name, Countdown(1, lambda: counted.wait(SOON)))  # so that each has been asked at least once
    transfer = swarm.transfer()
    transfer.run(lambda here, size: seen.append((here, size)))
    taken = transfer.taken
    assert transfer.out == STATE
    assert set(taken) == {"a", "b", "c"} and sum(taken.values()) == len(STATE) and min(taken.values()) > 0
    assert seen == sorted(seen) and seen[-1] == (len(STATE), len(STATE))


@pytest.mark.parametrize("size", [0, 1, SMALL_CHUNK, 3 * SMALL_CHUNK])
def test_small_and_even_sizes(swarm, size):
    swarm.donor("a", holding(STATE[:size]))
    transfer = swarm.fetch(swarm.describe("a"))
    assert transfer.taken == {"a": size} and transfer.out == STATE[:size]


def test_a_faster_donor_gives_more(swarm):
    most = 2 * len(MANIFEST.digests) // 3  # had the slow one gone on at half, it could give as much of the rest
    fast, requests = threading.Event(), Countdown(most, then=lambda: fast.set())
    swarm.watched("fast", requests)
    swarm.watched("slow", lambda: fast.wait(SOON))
    transfer = swarm.fetch()
    assert transfer.out == STATE and transfer.taken["fast"] > transfer.taken["slow"]


def test_a_donor_that_dies_midway_costs_nothing_but_what_was_under_way(swarm):
    died = threading.Event()

    def die() -> None:
        wait_until(lambda: transfer.taken["mortal"] > 0)
        swarm.transports["mortal"].close()
        died.set()

    swarm.watched("mortal", Countdown(3, then=die))
    swarm.watched("other", lambda: died.wait(SOON))
    transfer = swarm.transfer()
    transfer.run()
    assert transfer.out == STATE
    assert 0 < transfer.taken["mortal"] <= 2 * SMALL_CHUNK and sum(transfer.taken.values()) == len(STATE)
    assert set(transfer.failures) == {"mortal"}


def rotten(data: bytes) -> Library:
    """It held STATE when its digests were worked out."""
    library = holding(memory := bytearray(STATE))
    assert library.get("state").description() == MANIFEST
    memory[:] = data
    return library


def test_a_donor_of_wrong_bytes_is_named_and_none_of_them_is_kept(swarm, caplog):
    lied = threading.Event()
    swarm.donor("liar", rotten(STATE[:5] + bytes([STATE[5] ^ 1]) + STATE[6:]))
    swarm.watched("other", lambda: lied.wait(SOON))
    transfer = swarm.transfer()
    transfer.run(lambda here, size: lied.set() if "liar" in transfer.failures else None)
    assert transfer.out == STATE
    assert transfer.failures == {"liar": "liar sent wrong bytes for chunk 0"}
    assert "not fetched from liar any more" in caplog.text


def test_a_lone_liar_gives_nothing(swarm):
    swarm.donor("liar", rotten(b"\x01" + bytes(len(STATE) - 1)))
    transfer = swarm.transfer()
    with pytest.raises(TransferFailed, match="liar sent wrong bytes") as failed:
        transfer.run()
    assert set(failed.value.failures) == {"liar"} and not any(transfer.out)


def test_a_donor_that_is_given_up_is_hung_up_on_at_once(swarm):
    """Rather than at the end: what it was asked for in advance would fill our link."""
    hung_up = threading.Event()

    def how(stream: Stream) -> None:
        stream.send(READY)
        stream.receive(timeout_s=SOON)
        stream.send(BYTES, b"", bytes(SMALL_CHUNK))
        with suppress(PeerLost):
            while True:
                stream.receive(timeout_s=SOON)
        hung_up.set()

    swarm.by_hand("liar", how)
    swarm.watched("other", lambda: hung_up.wait(SOON))
    assert swarm.fetch().out == STATE and hung_up.is_set()


def silent(stream: Stream) -> None:
    """Takes the stream and says nothing."""


def ready_then_silent(stream: Stream) -> None:
    stream.send(READY)


def half_a_chunk(stream: Stream) -> None:
    stream.send(READY)
    stream.receive(timeout_s=SOON)
    stream.carrier.send(Piece(BYTES, b"", memoryview(bytes(100)), rest=SMALL_CHUNK - 100), None)


STALLS = [silent, ready_then_silent, half_a_chunk]


@pytest.mark.parametrize("how", STALLS)
def test_a_donor_that_stalls_is_given_up_after_the_patience(swarm, how):
    swarm.by_hand("stalls", how)
    transfer = swarm.transfer(patience_s=0.2)
    with pytest.raises(TransferFailed, match=r"stalls has sent next to nothing for 0\.2 s"):
        transfer.run()
    assert not transfer.have


@pytest.mark.parametrize("how", STALLS)
def test_others_do_not_wait_for_a_donor_that_stalls(swarm, how):
    """Its chunks are taken over at the end, long before its patience is over."""
    swarm.by_hand("stalls", how)
    swarm.donor("other")
    transfer = swarm.fetch(patience_s=3600)
    assert transfer.out == STATE
    assert transfer.taken == {"stalls": 0, "other": len(STATE)} and not transfer.failures


@pytest.mark.parametrize("question", [Swarm.request, Swarm.describe])
@pytest.mark.parametrize("how", STALLS)
def test_small_questions_end_in_time(swarm, how, question):
    swarm.by_hand("stalls", how)
    with pytest.raises(TransferFailed, match=r"'state' of stalls: .*within 0\.2 s"):
        question(swarm, "stalls", timeout_s=0.2)


def test_a_chunk_that_two_donors_send_is_taken_once(swarm):
    """Four donors by hand, asked for one chunk each."""
    data = STATE[: 4 * SMALL_CHUNK]
    manifest = Item("state", data, SMALL_CHUNK).description()
    transports = [swarm.peer(name) for name in "abcd"]
    transfer = swarm.transfer(manifest)
    thread = threading.Thread(target=transfer.run)
    thread.start()
    streams = [transport.accept(CHANNEL, timeout_s=SOON) for transport in transports]
    for stream in streams:
        stream.send(READY)
    holders = {asked_for(stream): stream for stream in streams}
    fast = streams[0]
    give(fast, data, next(number for number, stream in holders.items() if stream is fast))
    give(fast, data, late := asked_for(fast))
    taken_over = asked_for(fast)
    slow = holders[late]
    give(slow, data, late)  # too late
    give(slow, data, asked_for(slow))  # so that has been dealt with, and it is of use again
    give(fast, data, taken_over)
    thread.join(SOON)
    assert not thread.is_alive() and transfer.out == data
    assert sorted(transfer.taken.values()) == [0, 0, SMALL_CHUNK, 3 * SMALL_CHUNK] and transfer.taken["a"] > SMALL_CHUNK


def asked_for(stream: Stream) -> int:
    return int.from_bytes(stream.receive(timeout_s=SOON).head[len(NAME) :][:4], "big")


def give(stream: Stream, data: bytes, number: int) -> None:
    stream.send(BYTES, b"", data[number * SMALL_CHUNK :][:SMALL_CHUNK])


def test_an_error_in_the_callers_own_code_ends_the_fetch_which_keeps_what_it_has(swarm):
    ended = threading.Event()
    swarm.watched("a", Countdown(4, then=lambda: ended.wait(SOON)))
    transfer = swarm.transfer()

    def on_progress(here: int, size: int) -> None:
        wait_until(lambda: transfer.have == {0, 1, 2})
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transfer.run(on_progress)
    ended.set()
    assert transfer.out[: 3 * SMALL_CHUNK] == STATE[: 3 * SMALL_CHUNK] and not any(transfer.out[3 * SMALL_CHUNK :])


def test_a_fetch_goes_on_from_what_it_has(swarm):
    asked, count = Countdown(0), len(MANIFEST.digests)
    swarm.watched("a", asked)
    out, have = bytearray(STATE), set(range(0, count, 2))
    missing = set(range(count)) - have
    for number in missing:
        out[MANIFEST.chunk(number)] = bytes(SMALL_CHUNK)
    transfer = Transfer(MANIFEST, swarm.addresses, swarm.me, memoryview(out), have)
    transfer.run()
    assert out == STATE and have == set(range(count))
    assert asked.count == len(missing) and transfer.taken == {"a": len(missing) * SMALL_CHUNK}
    Transfer(MANIFEST, {}, swarm.me, memoryview(out), have).run()  # nothing to do, nobody needed


def test_not_here(swarm):
    swarm.donor("empty", Library())
    swarm.donor("another", holding(STATE[::-1]))  # of that name, but not this one: no liar, it does not have it
    with pytest.raises(ItemMissing, match="'state': empty does not have it"):
        swarm.request("empty")
    with pytest.raises(ItemMissing):
        swarm.describe("empty")
    with pytest.raises(TransferFailed) as failed:
        swarm.fetch()
    assert failed.value.failures == {name: f"'state': {name} does not have it" for name in ("empty", "another")}
    swarm.donor("has it")
    assert swarm.fetch().out == STATE


def test_nobody_to_ask_and_nobody_there(swarm):
    out = memoryview(bytearray(len(STATE)))
    with pytest.raises(TransferFailed, match="nobody to ask"):
        Transfer(MANIFEST, {}, swarm.me, out).run()
    with pytest.raises(TransferFailed, match="ghost is not there") as failed:
        Transfer(MANIFEST, {"ghost": PeerAddress("ghost")}, swarm.me, out).run()
    assert set(failed.value.failures) == {"ghost"}
    with pytest.raises(ValueError, match="needs"):
        Transfer(MANIFEST, {}, swarm.me, out[1:])


def test_spare_donors_step_in_for_every_one_that_fails(swarm):
    """Twelve that have nothing, more than are asked at a time, and one that has it: a single chunk."""
    for number in range(12):
        swarm.donor(f"empty {number}", Library())
    swarm.donor("last", holding(b"tiny"))
    transfer = swarm.fetch(swarm.describe("last"))
    assert transfer.out == b"tiny" and transfer.taken["last"] == 4


@pytest.mark.parametrize(
    "payload, match",
    [
        (bytes(MAX_MANIFEST_BYTES + 1), "at most"),
        (b"", "missing"),
        (b"junk" * 99, "'state' of a"),
        (ItemManifest("other", 0, CHUNK_BYTES, ()).encode(), "describes 'other'"),
    ],
)
def test_descriptions_are_not_believed(swarm, payload, match):
    swarm.answering("a", BYTES, b"", payload)
    with pytest.raises(TransferFailed, match=match):
        swarm.describe("a")


@pytest.mark.parametrize(
    "kind, size, match",
    [
        (BYTES, SMALL_CHUNK + 1, "a chunk of 4096 was asked for"),
        (BYTES, 0, "a chunk of 4096 was asked for"),
        (NOT_HERE, SMALL_CHUNK, "a chunk of 4096 was asked for"),
        (99, 0, "a answers with a frame of kind 99"),
        (BUSY, 0, "a serves as many as it can"),
    ],
)
def test_an_answer_that_is_no_chunk_ends_its_sender(swarm, kind, size, match):
    swarm.answering("a", kind, b"", bytes(size))
    with pytest.raises(TransferFailed, match=match) as failed:
        swarm.fetch()
    assert set(failed.value.failures) == {"a"}


def test_an_answer_that_is_not_what_its_digest_says(swarm):
    swarm.answering("a", BYTES, sha256(b"one").digest(), b"two")
    with pytest.raises(WrongBytes, match="a sent"):
        swarm.request("a")


def test_the_end_is_shared_and_what_is_given_back_is_asked_for_again():
    board = ChunkBoard(range(40), workers=2)
    slow = [board.take("slow", asked) for asked in range(MAX_ASKED)]
    assert slow == list(range(MAX_ASKED)) and board.take("slow", MAX_ASKED) is None  # not too far ahead
    while (number := board.take("fast", 0)) not in slow:
        assert board.deliver(number)
    assert number == 0 and board.take("third", 0) == 1  # each of what is late from one other only
    assert board.deliver(0) and not board.deliver(0)
    board.give_back("slow")
    assert board.take("third", 0) == 2  # 1 is still the third's; these are missing again
    assert not board.done
    for _ in range(1, MAX_ASKED):
        board.take("fast", 0)
    assert all(board.deliver(number) for number in range(1, MAX_ASKED)) and board.done


def test_a_small_item_has_parts_for_several_donors():
    sizes = {0: 1 << 14, 20_000: 1 << 14, 250_000: 1 << 14, 1 << 21: 1 << 17, 1 << 30: 1 << 20}
    assert {size: usual_chunk_bytes(size) for size in sizes} == sizes


def test_a_donor_on_a_slow_link_is_not_given_up_while_a_chunk_comes(swarm):
    """A whole one takes longer than the patience, no part of it does."""
    item = Item("state", bytes(range(256)) * 512, 1 << 17)

    def slowly(stream: Stream) -> None:
        stream.send(READY)
        stream.receive(timeout_s=SOON)
        whole = frame.pack_header(BYTES, b"", item.chunk(0)) + bytes(item.chunk(0))
        for start in range(0, len(whole), 1 << 15):
            stream.carrier.wire.write(memoryview(whole)[start : start + (1 << 15)], None)
            time.sleep(0.8)

    swarm.by_hand("slow", slowly)
    assert swarm.fetch(item.description(), patience_s=2.0).out == item.data
