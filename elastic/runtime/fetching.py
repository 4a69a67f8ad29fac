"""Fetching what other islands have: the bytes of a result, the records this island missed, or a whole state.

All of it runs on threads of its own, and nobody waits for it. What comes from peers is checked against digests that the
protocol has agreed on.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import compress, takewhile
from random import sample
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.log.library import ItemManifest, payload_name
from diloco.checkpoint.log.replica import vector_name
from diloco.checkpoint.log.room import Room, bytes_of, fill
from diloco.checkpoint.log.store import PartialDownload
from diloco.checkpoint.transfer.fetch import MAX_WORKERS, Transfer, describe, request
from diloco.comm.codec.rooms import mapped, room_for
from diloco.comm.transport.frame import Buffer
from diloco.comm.transport.transport import Addresses, PeerAddress, Transport
from diloco.elastic.protocol.record import EMPTY, Head, LoggedRecord, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode, encode
from diloco.errors import ItemMissing, MessageRefused, TransferFailed

SMALL_BYTES = 8 << 20
ASK_S = 10.0
REPIN_S = 30.0
MAX_DONORS = 2 * MAX_WORKERS  # half of them step in for others

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Report = Callable[[int, int, Mapping[str, int]], None]  # bytes that are there, of how many, and from each donor


@dataclass(frozen=True)
class StateManifest:
    """Describe a state that can be fetched: what is agreed on, the sizes of its vectors, and its run."""

    state: RunState
    sizes: tuple[tuple[str, int], ...]  # elements of each vector
    genesis: str

    @property
    def version(self) -> str:
        """Return the digest of the head that the state belongs to."""
        return self.state.head.digest


@dataclass(frozen=True)
class FetchedState:
    """Hold a state that was fetched from peers: the bytes of its vectors, and how much each donor gave."""

    state: RunState
    rooms: Mapping[str, Room]  # in memory, or in files: copied into vectors with `fill`
    check: str  # of all vectors, as `check_of` finds it
    donors: dict[str, int]  # bytes from each

    def vectors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return new vectors with its values; raise TransferFailed if the disk does not give back what it was given."""
        found = {name: torch.empty(len(room) // 4, device=device) for name, room in self.rooms.items()}
        try:
            right = fill(found, self.rooms) == self.check
        except OSError as error:
            raise TransferFailed(f"a fetched state cannot be read back: {error}") from None
        if not right:
            raise TransferFailed("a fetched state was read back from the disk with other bytes")
        return found

    def of(self, owner: str) -> "FetchedState":
        """Return this state if its run is `owner`'s and only they amended it; otherwise raise TransferFailed."""
        if not self.state.is_of(owner):
            raise TransferFailed("the state that a peer gave was amended by somebody else than the run's owner")
        return self


def fetch_bytes(transport: Transport, donors: Addresses, digest: str, size: int) -> Tensor:
    """Fetch a result of `size` bytes by its digest, from whoever has it; raise TransferFailed if nobody does."""
    if digest == EMPTY and size == 0:
        return torch.empty(0, dtype=torch.uint8)
    name = payload_name(digest)
    item = _describe(transport, donors, name, size)
    room = room_for(size)
    view = memoryview(room.numpy())  # type: ignore[arg-type]
    Transfer(item, donors, transport, view).run()
    if hashlib.sha256(view).hexdigest() != digest:
        raise TransferFailed(f"{name}: the bytes are not those that were agreed on")
    return room


def _describe(transport: Transport, donors: Addresses, name: str, size: int) -> ItemManifest:
    item = _any_of(transport, donors, name, partial(describe, timeout_s=ASK_S))
    if item.size != size:
        raise TransferFailed(f"{name}: {item.size} bytes, {size} were due")
    return item


def _any_of(transport: Transport, donors: Addresses, name: str, how: Callable[..., Answer]) -> Answer:
    """Return the answer of the first donor that gives one."""
    reasons = []
    for address in donors.values():
        try:
            return how(transport, address, name)
        except TransferFailed as failed:
            reasons.append(str(failed))
    raise TransferFailed("; ".join(reasons) or f"{name}: nobody to ask")


def fetch_missed(
    transport: Transport,
    peer: str,
    others: Addresses,
    since: str,
    result_bytes: Callable[[Record], int],
    *,
    at_most: int,
    known: Callable[[str], bool] = lambda digest: False,
) -> Iterator[tuple[LoggedRecord, Tensor]]:
    """Yield the records that a peer has after `since`, each with its result, up to the first that is known here.

    Yields nothing if the peer does not know `since`, no longer has the bytes, or they are more than `at_most`.
    """
    try:
        raw = request(transport, others[peer], f"after/{since}", limit=SMALL_BYTES, timeout_s=ASK_S)
    except ItemMissing:
        return
    given = decode(tuple[LoggedRecord, ...], raw)
    missed = list(takewhile(lambda logged: not known(logged.record.digest), given))
    if not missed or sum(result_bytes(logged.record) for logged in missed) > at_most:
        return
    with ThreadPoolExecutor(min(len(missed), len(others), MAX_DONORS)) as pool:
        order = [_from(others, place) for place in range(len(missed))]

        def fetch(logged: LoggedRecord, donors: Addresses) -> Tensor:
            return fetch_bytes(transport, donors, logged.record.payload, result_bytes(logged.record))

        yield from zip(missed, pool.map(fetch, missed, order), strict=True)


def check_contains(transport: Transport, peer: PeerAddress, earlier: tuple[int, str], head: Head) -> None:
    """Raise MessageRefused unless a peer's history up to its head contains an earlier head: (round, digest).

    A peer that no longer has the records in between cannot show it: then it is believed.
    """
    round_number, digest = earlier
    if not round_number or (round_number, digest) == (head.round, head.digest):
        return
    if round_number < head.round:
        try:
            raw = request(transport, peer, f"after/{digest}", limit=SMALL_BYTES, timeout_s=ASK_S)
        except ItemMissing:
            log.warning("the run's history since the ticket was printed (round %d) cannot be checked", round_number)
            return
        link, found = digest, set[str]()
        for logged in decode(tuple[LoggedRecord, ...], raw):
            if logged.record.proposal.key.parent != link:
                break
            link = logged.record.digest
            found.add(link)
        if head.digest in found:
            return
    raise MessageRefused(
        f"round {round_number} of the ticket ({digest[:12]}) is not in the history up to round {head.round} "
        f"({head.digest[:12]}) that a peer gives: somebody has another history of this run; ask the owner for a ticket"
    )


def _from(donors: Addresses, place: int) -> Addresses:
    """Return the donors beginning with another one each time: each has a part of its uplink to give."""
    names = list(donors)
    shift = place % len(names)
    return {name: donors[name] for name in names[shift:] + names[:shift]}


def fetch_state(
    transport: Transport,
    peer: str,
    others: Addresses,
    genesis: str,
    sizes: Mapping[str, int],
    download: PartialDownload | None = None,
    report: Report = lambda done, total, donors: None,
) -> FetchedState:
    """Fetch a peer's present state, from several peers that have the same one.

    A download that has begun earlier is continued instead if any peer still has that state. `report` is told how many
    bytes are there, of how many, and how many each donor gave, as they come.
    """
    others = {peer: others[peer]} | dict(others)  # it is asked first
    raw, donors = _resume(transport, others, download)
    if not donors:
        raw = request(transport, others[peer], "manifest", limit=SMALL_BYTES, timeout_s=ASK_S)
    manifest = decode(StateManifest, raw)
    if manifest.genesis != genesis or dict(manifest.sizes) != sizes:
        raise TransferFailed(f"{peer} has the state of another run")
    if not donors:
        # not the same for each newcomer, so that they share the load; who has another version by now is passed over
        donors = {other: others[other] for other in (peer, *sample(sorted(others), min(len(others), MAX_DONORS)))}
        if download is not None:
            download.start(raw)
    try:
        snapshot = _Fetch(transport, donors, manifest, download, report).run()
    except OSError as error:
        if download is not None:
            download.end()
        raise TransferFailed(f"what had come of the state cannot be read: {error}") from None
    if download is not None:  # all of it has come: right or wrong, there is nothing to go on with
        download.end()
    if snapshot is None:
        raise TransferFailed(f"the state of {next(iter(donors))} is not what its digest says")
    return snapshot


def _resume(transport: Transport, others: Addresses, download: PartialDownload | None) -> tuple[bytes, Addresses]:
    """Return the manifest of a download begun earlier, and the peers that still have that version."""
    raw = (download.about if download is not None else None) or b""
    try:
        version = decode(StateManifest, raw).version
    except MessageRefused:  # there is nothing, or it is torn
        return b"", {}
    with ThreadPoolExecutor(min(len(others), MAX_DONORS)) as pool:
        have_it = pool.map(lambda address: _has(transport, address, version), others.values())
        return raw, dict(compress(others.items(), have_it))


def _has(transport: Transport, address: PeerAddress, version: str) -> bool:
    """Return whether a peer still has a version. Where it has moved on or is busy, others give the state."""
    try:
        request(transport, address, f"pin/{version}", limit=200, timeout_s=ASK_S)
    except TransferFailed:
        return False
    return True


class _Fetch:
    """Fetch one state. Digests, at the donors and here, are computed while bytes are on their way."""

    def __init__(
        self, transport: Transport, donors: Addresses, manifest: StateManifest, download: PartialDownload | None,
        report: Report,
    ) -> None:  # fmt: skip
        self._transport, self._donors, self._manifest, self._download = transport, donors, manifest, download
        self._taken = dict.fromkeys(donors, 0)
        self._report, self._there = report, 0  # bytes of the vectors that are complete
        self._total = sum(4 * count for _, count in manifest.sizes)
        self._asked = time.monotonic()
        self._found, self._check = hashlib.sha256(), xxhash.xxh3_64()  # of all vectors

    def run(self) -> FetchedState | None:
        """Return the state, or None if its vectors are not what its digest says."""
        sizes, version = sorted(self._manifest.sizes), self._manifest.version
        pool = ThreadPoolExecutor(2)
        try:
            items = [
                pool.submit(_describe, self._transport, self._donors, vector_name(version, name), 4 * count)
                for name, count in sizes
            ]
            ask_long = partial(request, limit=200, timeout_s=6 * ASK_S)  # it may have to be worked out
            digest = pool.submit(_any_of, self._transport, self._donors, f"digest/{version}", ask_long)
            rooms = {name: self._fetch(name, item.result()) for (name, _), item in zip(sizes, items, strict=True)}
            right = self._found.hexdigest() == digest.result().decode()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return FetchedState(self._manifest.state, rooms, self._check.hexdigest(), self._taken) if right else None

    def _room(self, name: str, item: ItemManifest) -> tuple[Room, set[int]]:
        return self._download.room(name, item) if self._download is not None else (bytes_of(mapped(item.size)), set())

    def _fetch(self, name: str, item: ItemManifest) -> Room:
        room, have = self._room(name, item)
        hashed, told = 0, 0

        def on_progress(*_: object) -> None:
            nonlocal hashed, told
            if self._download is not None:
                come = sum(transfer.taken.values())
                self._download.bytes_come += come - told
                told = come
            while hashed in have:
                chunk = room[item.chunk(hashed)]
                self._found.update(chunk)
                self._check.update(chunk)
                hashed += 1
            self._pin_again()
            here = min(item.size, len(have) * item.chunk_bytes)
            given = {donor: size + transfer.taken[donor] for donor, size in self._taken.items()}
            self._report(self._there + here, self._total, given)

        transfer = Transfer(item, self._donors, self._transport, room, have)
        transfer.run(on_progress)
        self._there += item.size
        for donor, size in transfer.taken.items():
            self._taken[donor] += size
        return room

    def _pin_again(self) -> None:
        """Ask for the version now and then during a slow fetch: donors drop copies that nobody asks for."""
        if time.monotonic() - self._asked > REPIN_S:
            self._asked = time.monotonic()
            for address in self._donors.values():
                _has(self._transport, address, self._manifest.version)


def tensor_of(data: Buffer) -> Tensor:
    """Copy bytes into a uint8 tensor."""
    room = room_for(len(data))
    memoryview(room.numpy())[:] = memoryview(data)  # type: ignore[arg-type]
    return room


def entry_of(logged: LoggedRecord) -> Entry:
    """Return a record as the log stores it: encoded, with its round, its digests and its parent's."""
    record, key = logged.record, logged.record.proposal.key
    return Entry(key.round, record.digest, key.parent, encode(logged), record.payload)
