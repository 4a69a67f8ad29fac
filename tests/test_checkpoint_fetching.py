"""A whole state from peers: it goes on where it broke, from donors that are spared."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from islands import SMALL, TestIsland
from items import MANIFEST, SMALL_CHUNK, STATE, holding
from team import wait_until

from diloco.bench.bare import DIGEST, BareConfig
from diloco.checkpoint.log.library import Item, Library, usual_chunk_bytes
from diloco.checkpoint.log.store import PartialDownload, Store
from diloco.checkpoint.transfer.donor import Donor
from diloco.checkpoint.transfer.fetch import MAX_WORKERS, Transfer
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.elastic.protocol.record import Head
from diloco.elastic.protocol.wire import encode
from diloco.elastic.runtime.applier import Applier
from diloco.elastic.runtime.fetching import FetchedState, StateManifest, fetch_state
from diloco.errors import TransferFailed

COUNT = 2_000_000  # two vectors of 16 chunks
CHUNK = usual_chunk_bytes(4 * COUNT)
SIZES = {"parameters": COUNT, "momentum": COUNT}
VECTORS = {name: torch.randn(COUNT) for name in SIZES}


class Until(Library):
    """A library that fails when `left`, which others count down too, is used up."""

    def __init__(self, library: Library, left: list[None]) -> None:
        super().__init__()
        self._library, self._left = library, left

    def get(self, name: str) -> Item | None:
        if name.startswith("state/"):
            self._left.pop()
        return self._library.get(name)


class Donors:
    def __init__(self) -> None:
        self.network, self.stack = MemoryNetwork(), ExitStack()
        self.me = self.network.transport("me")
        self.appliers: dict[str, Applier] = {}

    def add(self, name: str, left: list[None] | None = None) -> Callable[[], None]:
        """One that holds the state; what ends it."""
        state = SMALL.beginning(("a",)).state
        applier = self.appliers[name] = Applier(BareConfig(COUNT).run, state, VECTORS, Store(), lambda *_: None)
        transport = self.network.transport(name)
        donor = Donor(transport, applier.library if left is None else Until(applier.library, left))
        self.stack.callback(transport.close)
        self.stack.callback(donor.close)

        def end() -> None:
            donor.close()
            self.network.peers.pop(name).close()
            del self.appliers[name]

        return end

    def fetch(self, begun: PartialDownload | None = None) -> FetchedState:
        addresses = {name: PeerAddress(name) for name in self.appliers}
        return fetch_state(self.me, next(iter(addresses)), addresses, DIGEST, SIZES, begun)


@pytest.fixture
def donors() -> Iterator[Donors]:
    found = Donors()
    yield found
    found.stack.close()
    found.me.close()


def is_right(snapshot: FetchedState) -> bool:
    found = snapshot.vectors()
    return all(torch.equal(found[name], vector) for name, vector in VECTORS.items())


def broken(donors: Donors, folder: Path) -> None:
    """All donors are lost after two descriptions and 20 of 32 chunks."""
    left = [None] * 22
    ends = [donors.add(name, left) for name in ("a", "b")]
    with pytest.raises(TransferFailed):
        donors.fetch(PartialDownload(folder))
    for end in ends:
        end()


def kept_in(folder: Path) -> int:
    """Bytes of whole chunks."""
    found = 0
    for name, vector in VECTORS.items():
        path, right = folder / f"{name}.part", vector.numpy().tobytes()
        raw = path.read_bytes() if path.exists() else b""
        cuts = [slice(at, at + CHUNK) for at in range(0, len(right), CHUNK)]
        found += sum(len(right[cut]) for cut in cuts if raw[cut] == right[cut])
    return found


def test_a_download_goes_on_where_it_stopped(donors, tmp_path):
    broken(donors, tmp_path / "download")
    kept = kept_in(tmp_path / "download")
    assert kept > 8 * CHUNK
    donors.add("c")
    donors.appliers["c"].replica.pin()
    snapshot = donors.fetch(PartialDownload(tmp_path / "download"))  # as after a restart
    assert is_right(snapshot)
    assert sum(snapshot.donors.values()) == 8 * COUNT - kept
    assert not (tmp_path / "download").exists()


def test_what_was_kept_of_it_is_checked(donors, tmp_path):
    broken(donors, tmp_path / "download")
    for path in (tmp_path / "download").glob("*.part"):
        raw = bytearray(path.read_bytes())
        raw[100] ^= 1
        path.write_bytes(raw)
    donors.add("c")
    assert is_right(donors.fetch(PartialDownload(tmp_path / "download")))


@pytest.mark.parametrize("how", ["stale", "torn"])
def test_a_download_that_nobody_can_go_on_with_begins_anew(donors, tmp_path, how):
    broken(donors, tmp_path / "download")
    state = replace(SMALL.beginning(("a",)).state, head=Head(0, 0, "0" * 64))
    past = encode(StateManifest(state, tuple(SIZES.items()), DIGEST))
    (tmp_path / "download" / "about").write_bytes(past if how == "stale" else past[:20])
    donors.add("c")
    snapshot = donors.fetch(PartialDownload(tmp_path / "download"))
    assert is_right(snapshot) and sum(snapshot.donors.values()) == 8 * COUNT


def test_a_disk_that_refuses_costs_only_what_it_would_have_kept(donors, tmp_path):
    (tmp_path / "download").write_text("in the way")
    donors.add("a")
    assert is_right(donors.fetch(PartialDownload(tmp_path / "download")))


def test_a_file_that_gives_other_bytes_back_or_none_is_a_failed_fetch(donors, tmp_path):
    donors.add("a")
    snapshot = donors.fetch(PartialDownload(tmp_path / "download"))
    room = snapshot.rooms["momentum"]
    right, room[:4] = bytes(room[:4]), memoryview(b"1234")
    with pytest.raises(TransferFailed, match="with other bytes"):
        snapshot.vectors()
    room[:4] = memoryview(right)
    assert is_right(snapshot)
    os.truncate(room._file.fileno(), 100)
    with pytest.raises(TransferFailed, match="cannot be read back"):
        snapshot.vectors()


def test_files_of_an_earlier_download_that_stay_are_not_written_to(donors, tmp_path, monkeypatch):
    download, file = PartialDownload(tmp_path / "download"), tmp_path / "download" / "momentum.part"
    download.start(b"earlier")
    file.write_bytes(b"still read")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as where an open file cannot be removed
    donors.add("a")
    assert is_right(donors.fetch(download)) and file.read_bytes() == b"still read"


def test_newcomers_burden_some_donors_and_not_always_the_same(donors):
    for number in range(30):
        donors.add(f"donor-{number}")

    def burdened() -> set[str]:
        return {
            name
            for name, applier in donors.appliers.items()
            if any(n.startswith("state/") for n in applier.library.names())
        }

    first = donors.fetch()
    assert is_right(first) and burdened() <= set(first.donors) and 1 < len(burdened()) <= MAX_WORKERS
    for _ in range(8):
        donors.fetch()
    assert len(burdened()) > 2 * MAX_WORKERS


def test_donors_that_have_moved_on_are_passed_over(donors):
    for name in ("a", "b", "c"):
        donors.add(name)
    donors.appliers["b"].replica.version = "0" * 64
    snapshot = donors.fetch()
    assert is_right(snapshot) and snapshot.donors["b"] == 0


def test_chunks_make_way_for_rounds(monkeypatch):
    monkeypatch.setattr("diloco.checkpoint.transfer.donor.WAIT_FACTOR", 1e9)
    monkeypatch.setattr("diloco.checkpoint.transfer.donor.MAX_WAIT_S", 1e9)
    network, hurried = MemoryNetwork(), threading.Event()
    hurried.set()
    donor = Donor(network.transport("a"), holding(STATE), in_a_hurry=hurried.is_set)
    out = bytearray(len(STATE))
    transfer = Transfer(MANIFEST, {"a": PeerAddress("a")}, network.transport("me"), memoryview(out))
    thread = threading.Thread(target=transfer.run)
    thread.start()
    wait_until(lambda: transfer.bytes_here == SMALL_CHUNK)
    thread.join(0.5)
    assert transfer.bytes_here == SMALL_CHUNK
    hurried.clear()
    thread.join(10)
    assert out == STATE
    donor.close()


def test_an_island_is_in_a_hurry_while_a_round_is_under_way():
    driver = TestIsland(MemoryNetwork().transport("A"), SMALL.beginning(("A",))).driver
    driver.close()
    assert not driver.donor._in_a_hurry()
    driver._attempts[None] = None  # type: ignore[index, assignment]
    assert driver.donor._in_a_hurry()
