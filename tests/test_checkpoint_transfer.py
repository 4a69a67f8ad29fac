"""Items come whole and right from whoever has them, however their donors die, lie, stall or refuse."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from random import Random

import pytest
from items import MANIFEST, SMALL_CHUNK, STATE, holding
from team import wait_until

from diloco.checkpoint.log.library import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    MAX_CHUNKS,
    MAX_MANIFEST_BYTES,
    Item,
    ItemManifest,
    Library,
)
from diloco.checkpoint.transfer import donor
from diloco.checkpoint.transfer.donor import BUSY, BYTES, CHANNEL, CHUNK, DESCRIBE, NOT_HERE, READY, WHOLE, Donor
from diloco.checkpoint.transfer.fetch import MAX_ASKED, ChunkBoard, Transfer, describe, request
from diloco.comm.peers import packing
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.memory import MemoryNetwork, MemoryTransport
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.comm.transport.wire import Piece
from diloco.errors import DonorBusy, ItemMissing, ManifestRefused, PeerLost, TransferFailed, TransportError, WrongBytes

SOON = 20.0
GONE = "gives nothing to others any more"  # what a donor says that has failed


class Swarm:
    """A taker `me` and any number of donors on one network in memory."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.me = self.network.transport("me")
        self.transports: dict[str, MemoryTransport] = {}
        self.donors: dict[str, Donor] = {}

    def peer(self, name: str) -> MemoryTransport:
        self.transports[name] = self.network.transport(name)
        return self.transports[name]

    def donor(self, name: str, library: Library | None = None, **options: object) -> Donor:
        self.donors[name] = Donor(self.peer(name), library or holding(STATE), **options)  # type: ignore[arg-type]
        return self.donors[name]

    def watched(self, name: str, on_request: Callable[[], object]) -> None:
        """A donor of STATE that does something before each answer."""
        item = Item("state", STATE, SMALL_CHUNK)

        class Watched(Library):
            def get(self, name: str) -> Item | None:
                on_request()
                return item

        self.donor(name, Watched())

    @property
    def addresses(self) -> dict[str, PeerAddress]:
        return {name: PeerAddress(name) for name in self.transports}

    def stream(self, to: str, channel: str = CHANNEL) -> Stream:
        return self.me.connect(PeerAddress(to), channel, timeout_s=SOON)

    def transfer(self, manifest: ItemManifest = MANIFEST, patience_s: float = 30.0) -> Transfer:
        """Into memory of its own."""
        return Transfer(manifest, self.addresses, self.me, memoryview(bytearray(manifest.size)), patience_s=patience_s)

    def fetch(self, manifest: ItemManifest = MANIFEST, patience_s: float = 30.0) -> Transfer:
        transfer = self.transfer(manifest, patience_s)
        transfer.run()
        return transfer

    def request(self, donor: str, name: str = "state", limit: int = SMALL_CHUNK, timeout_s: float = SOON) -> bytes:
        return request(self.me, PeerAddress(donor), name, limit=limit, timeout_s=timeout_s)

    def describe(self, donor: str, name: str = "state", timeout_s: float = SOON) -> ItemManifest:
        return describe(self.me, PeerAddress(donor), name, timeout_s)

    def by_hand(self, name: str, how: Callable[[Stream], None]) -> None:
        """Something else than a donor: it does this with every stream."""
        transport = self.peer(name)

        def accept() -> None:
            with suppress(TransportError):
                while True:
                    how(transport.accept(CHANNEL, timeout_s=SOON))

        threading.Thread(target=accept).start()

    def answering(self, name: str, kind: int, head: bytes, payload: bytes) -> None:
        """This, whatever the first question on a stream is."""

        def how(stream: Stream) -> None:
            stream.send(READY)
            stream.receive(timeout_s=SOON)
            stream.send(kind, head, payload)

        self.by_hand(name, how)

    def close(self) -> None:
        for source in self.donors.values():
            source.close()
        for transport in [self.me, *self.transports.values()]:
            transport.close()


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    threads = threading.active_count()
    swarm = Swarm()
    yield swarm
    swarm.close()
    wait_until(lambda: threading.active_count() <= threads)  # whatever happened, no thread is left


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


def test_over_tls_nothing_stays_open():
    names, here = ("me", "a", "b"), "127.0.0.1"
    transports = {name: DirectTransport(name, here) for name in names}
    addresses = {name: transport.address(here) for name, transport in transports.items()}
    for transport in transports.values():
        transport.allow(addresses.values())
    me = transports.pop("me")
    donors = [Donor(transport, holding(STATE)) for transport in transports.values()]
    addresses.pop("me")
    threads, files = threading.active_count(), open_files()

    out = bytearray(len(STATE))
    manifest = describe(me, addresses["a"], "state", SOON)
    assert request(me, addresses["b"], "state", limit=len(STATE), timeout_s=SOON) == STATE
    transfer = Transfer(manifest, addresses, me, memoryview(out))
    transfer.run()
    assert out == STATE and sum(transfer.taken.values()) == len(STATE)
    wait_until(lambda: threading.active_count() <= threads and open_files() <= files)

    for source in donors:
        source.close()
    with pytest.raises(TransferFailed, match="'state' of a"):
        request(me, addresses["a"], "state", limit=1, timeout_s=SOON)  # refused at once, not after the time
    for transport in [me, *transports.values()]:
        transport.close()


def test_a_faster_donor_gives_more(swarm):
    fast, requests = threading.Event(), Countdown(len(MANIFEST.digests) // 2, then=lambda: fast.set())
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
    with pytest.raises(TransferFailed, match=r"stalls has completed no answer for 0\.2 s"):
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


def test_the_library_changes_under_its_donor(swarm):
    made = []
    library = Library(on_missing=lambda name: made.append(name) or (b"made" if name == "manifest" else None))
    swarm.donor("a", library)
    for data in (bytearray(b"one"), b"two"):
        library.put("x", data)
        assert swarm.request("a", "x") == data
    assert library.names() == ["x"]
    library.drop("x")
    with pytest.raises(ItemMissing):
        swarm.request("a", "x")
    assert swarm.request("a", "manifest") == b"made" and swarm.describe("a", "manifest").size == 4
    assert made == ["x", "manifest", "manifest"] and library.names() == []


def test_an_on_missing_that_fails_ends_one_stream_only(swarm, caplog):
    def on_missing(name: str) -> bytes:
        return {"good": b"yes"}[name]

    swarm.donor("a", Library(on_missing))
    with pytest.raises(TransferFailed):
        swarm.request("a", "bad")
    assert swarm.request("a", "good") == b"yes"
    assert "me could not be served" in caplog.text and GONE not in caplog.text


@pytest.mark.parametrize(
    "size, limit, match",
    [(101, 100, "at most 100 were asked for"), (donor.MAX_WHOLE_BYTES + 1, 1 << 30, "fetch it by chunks")],
)
def test_an_answer_beyond_its_limit_is_not_let_in(swarm, size, limit, match):
    swarm.donor("a", holding(bytes(size)))
    with pytest.raises(TransferFailed, match=match):
        swarm.request("a", limit=limit)


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


NAME = packing.text("state", 255)


@pytest.mark.parametrize(
    "kind, head, payload",
    [
        (99, NAME, b""),
        (READY, b"", b""),
        (WHOLE, NAME, b"payload"),
        (WHOLE, b"", b""),
        (WHOLE, NAME + b"more", b""),
        (DESCRIBE, b"\xff" * 60, b""),
        (DESCRIBE, packing.integer(2, 2) + b"\n\n", b""),
        (DESCRIBE, bytes(60_000), b""),
        (CHUNK, NAME, b""),
        (CHUNK, NAME + bytes(3 + DIGEST_BYTES), b""),
    ],
)
def test_a_bad_request_ends_its_own_stream_only(swarm, caplog, kind, head, payload):
    swarm.donor("a")
    good, bad = greeted(swarm.stream("a")), greeted(swarm.stream("a"))
    bad.send(kind, head, payload)
    with pytest.raises(PeerLost):
        bad.receive(timeout_s=SOON)
    wait_until(lambda: "me asks for what is no request" in caplog.text)
    good.send(CHUNK, NAME + packing.integer(0, 4) + MANIFEST.digests[0])
    assert good.receive(timeout_s=SOON).payload == STATE[:SMALL_CHUNK]
    good.send(CHUNK, NAME + packing.integer(2**32 - 1, 4) + MANIFEST.digests[0])
    assert good.receive(timeout_s=SOON).kind == NOT_HERE
    assert GONE not in caplog.text
    good.close()


def greeted(stream: Stream) -> Stream:
    assert stream.receive(timeout_s=SOON).kind == READY
    return stream


def test_a_peer_has_a_few_streams_and_all_peers_some(swarm, monkeypatch):
    monkeypatch.setattr(donor, "MAX_STREAMS", 3)
    monkeypatch.setattr(donor, "MAX_STREAMS_OF_ONE", 2)
    swarm.donor("a")
    other = swarm.network.transport("other")
    mine = [greeted(swarm.stream("a")) for _ in range(2)]
    assert swarm.stream("a").receive(timeout_s=SOON).kind == BUSY  # of one
    greeted(other.connect(PeerAddress("a"), CHANNEL, timeout_s=SOON))
    assert other.connect(PeerAddress("a"), CHANNEL, timeout_s=SOON).receive(timeout_s=SOON).kind == BUSY  # altogether
    with pytest.raises(DonorBusy, match="a serves as many as it can"):
        swarm.request("a", timeout_s=0.5)
    mine[0].close()
    wait_until(lambda: swarm.stream("a").receive(timeout_s=SOON).kind == READY)
    other.close()


def test_a_fetch_waits_for_a_donor_that_is_busy(swarm, caplog, monkeypatch):
    caplog.set_level("INFO", logger=donor.__name__)
    monkeypatch.setattr(donor, "MAX_STREAMS", 1)
    swarm.donor("a")
    other = swarm.network.transport("other")
    holder = greeted(other.connect(PeerAddress("a"), CHANNEL, timeout_s=SOON))

    def on_progress(here: int, size: int) -> None:
        if "a is too busy for me" in caplog.text:
            holder.close()

    transfer = swarm.transfer()
    transfer.run(on_progress)
    assert transfer.out == STATE and transfer.taken == {"a": len(STATE)}
    assert "a is too busy for me" in caplog.text
    other.close()


def test_who_may_not_read_gets_nothing(swarm):
    readers = {"me"}
    swarm.donor("a", may_read=lambda peer: peer in readers)
    stream = greeted(swarm.stream("a"))
    readers.clear()
    stream.send(WHOLE, NAME)  # it had been let in; this one is answered
    assert stream.receive(timeout_s=SOON).kind == BYTES
    assert stream.receive(timeout_s=SOON).kind == donor.REFUSED
    with pytest.raises(TransferFailed, match="a gives us nothing"):
        swarm.request("a")
    with pytest.raises(TransferFailed, match="a gives us nothing"):
        swarm.fetch()


def test_a_donor_that_accepts_nobody_any_more_says_so(swarm, caplog):
    class Broken:
        identity = "broken"

        def accept(self, channel: str, *, timeout_s: float | None) -> Stream:
            raise OSError("no more descriptors")

        def forget(self, channel: str) -> None:
            pass

    donor = Donor(Broken(), Library())  # type: ignore[arg-type]
    wait_until(lambda: f"broken {GONE}" in caplog.text and "no more descriptors" in caplog.text)
    donor.close()


def test_closing_a_transport_is_no_failure_and_closing_a_donor_ends_its_streams(swarm, caplog):
    closed, cut = swarm.donor("closed"), swarm.donor("cut")
    streams = [greeted(swarm.stream(name)) for name in ("closed", "cut")]
    closed.close()
    swarm.transports["cut"].close()
    for stream in streams:
        with pytest.raises(PeerLost):
            stream.receive(timeout_s=SOON)
    cut.close()
    assert GONE not in caplog.text
    with pytest.raises(TransferFailed, match="nobody listens to 'fetch' any more"):
        swarm.request("closed")


def test_manifests_survive_the_way_and_nonsense_does_not():
    raw = MANIFEST.encode()
    assert ItemManifest.decode(raw) == MANIFEST
    digests, random = MANIFEST.digests, Random(3)
    for bad in (
        lambda: ItemManifest("state", len(STATE), SMALL_CHUNK, digests[1:]),
        lambda: ItemManifest("state", len(STATE), SMALL_CHUNK, (*digests[1:], b"short")),
        lambda: ItemManifest("state", -1, SMALL_CHUNK, ()),
        lambda: ItemManifest("state", 0, 0, ()),
        lambda: ItemManifest("state", 0, 1 << 30, ()),
        lambda: ItemManifest("n" * 256, 0, SMALL_CHUNK, ()),
        lambda: ItemManifest("\x1b[2J", 0, SMALL_CHUNK, ()),
        lambda: Library().put("state", STATE, chunk_bytes=7),
        lambda: ItemManifest.decode(raw + b"more"),
        lambda: ItemManifest.decode(NAME + b"\xff" * 12),
        *(lambda cut=cut: ItemManifest.decode(raw[:cut]) for cut in range(0, len(raw), 13)),
    ):
        with pytest.raises(ManifestRefused):
            bad()
    with pytest.raises(ManifestRefused, match="are no 131072 chunks"):
        ItemManifest("state", MAX_CHUNKS * SMALL_CHUNK + 1, SMALL_CHUNK, ())
    with pytest.raises(ManifestRefused, match="at most"):
        ItemManifest.decode(bytes(MAX_MANIFEST_BYTES + 1))
    for _ in range(500):
        with suppress(ManifestRefused):
            ItemManifest.decode(random.randbytes(random.randrange(80)))


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


class Countdown:
    """Counts its calls; at the given one it does something."""

    def __init__(self, calls: int, then: Callable[[], object] = lambda: None) -> None:
        self.calls, self.then, self.count = calls, then, 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.count += 1
            due = self.count == self.calls
        if due:
            self.then()


def open_files() -> int:
    return len(os.listdir("/dev/fd"))
