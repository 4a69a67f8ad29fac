"""A donor serves what its library holds to whoever may read, and no stranger's request harms it."""

import os
import threading
from contextlib import suppress
from random import Random

import pytest
from items import MANIFEST, SMALL_CHUNK, STATE, holding
from swarm import GONE, NAME, SOON, greeted
from team import wait_until

from diloco.checkpoint.log.library import DIGEST_BYTES, MAX_CHUNKS, MAX_MANIFEST_BYTES, ItemManifest, Library
from diloco.checkpoint.transfer import donor
from diloco.checkpoint.transfer.donor import BUSY, BYTES, CHANNEL, CHUNK, DESCRIBE, NOT_HERE, READY, WHOLE, Donor
from diloco.checkpoint.transfer.fetch import Transfer, describe, request
from diloco.comm.peers import packing
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.errors import DonorBusy, ItemMissing, ManifestRefused, PeerLost, TransferFailed


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


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


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
