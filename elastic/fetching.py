"""Getting what others have: the bytes of a result, the records this island missed, or a whole state.

All of it runs in threads of its own; nobody waits for it. What comes from peers is checked against digests that the
protocol has agreed on.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from diloco.checkpoint.asking import ask, describe
from diloco.checkpoint.library import Parcel
from diloco.checkpoint.log import Entry, payload_name
from diloco.checkpoint.replica import vector_name, vectors_digest
from diloco.checkpoint.transfer import fetch
from diloco.comm.frame import Buffer
from diloco.comm.transport import PeerAddress, Transport
from diloco.elastic.record import EMPTY, Record
from diloco.elastic.state import RunState
from diloco.elastic.wire import decode, encode
from diloco.errors import ItemMissing, TransferFailed

SMALL_BYTES = 8 << 20
ASK_S = 10.0
REPIN_S = 30.0


@dataclass(frozen=True)
class Manifest:
    """What a state consists of."""

    state: RunState
    sizes: tuple[tuple[str, int], ...]  # elements of each vector
    genesis: str


@dataclass(frozen=True)
class Snapshot:
    state: RunState
    vectors: dict[str, Tensor]
    donors: dict[str, int]  # bytes from each


def fetch_bytes(transport: Transport, donors: Mapping[str, PeerAddress], digest: str, size: int) -> Tensor:
    """A result by its digest, from whoever has it."""
    if digest == EMPTY and size == 0:
        return torch.empty(0, dtype=torch.uint8)
    name = payload_name(digest)
    parcel = _describe_any(transport, donors, name)
    if parcel.size != size:
        raise TransferFailed(f"{name}: {parcel.size} bytes, {size} were due")
    room = torch.empty(size, dtype=torch.uint8)
    view = memoryview(room.numpy())  # type: ignore[arg-type]
    fetch(parcel, donors, transport, view)
    if hashlib.sha256(view).hexdigest() != digest:
        raise TransferFailed(f"{name}: the bytes are not those that were agreed on")
    return room


def _describe_any(transport: Transport, donors: Mapping[str, PeerAddress], name: str) -> Parcel:
    reasons = []
    for address in donors.values():
        try:
            return describe(transport, address, name, ASK_S)
        except TransferFailed as failed:
            reasons.append(str(failed))
    raise TransferFailed("; ".join(reasons) or f"{name}: nobody to ask")


def fetch_missed(
    transport: Transport,
    peer: str,
    others: Mapping[str, PeerAddress],
    since: str,
    result_bytes: Callable[[Record], int],
    *,
    at_most: int,
    known: Callable[[Record], bool] = lambda record: False,
) -> Iterator[tuple[Record, Tensor]]:
    """What this peer has after `since`, up to what is known, one after the other; nothing where it does not know that,
    no longer has the bytes, or they are more than `at_most`."""
    try:
        raw = ask(transport, others[peer], f"after/{since}", limit=SMALL_BYTES, timeout_s=ASK_S)
    except ItemMissing:
        return
    records = list(takewhile(lambda record: not known(record), decode(tuple[Record, ...], raw)))
    if sum(result_bytes(record) for record in records) <= at_most:
        for record in records:
            yield record, fetch_bytes(transport, others, record.payload, result_bytes(record))


def fetch_state(
    transport: Transport, peer: str, others: Mapping[str, PeerAddress], genesis: str, sizes: Mapping[str, int]
) -> Snapshot:
    """The present state of this peer, taken from all who have the same one."""
    manifest = decode(Manifest, ask(transport, others[peer], "manifest", limit=SMALL_BYTES, timeout_s=ASK_S))
    if manifest.genesis != genesis or dict(manifest.sizes) != dict(sizes):
        raise TransferFailed(f"{peer} has the state of another run")
    version = manifest.state.head.digest
    donors = {peer: others[peer]} | _pinned(transport, peer, others, version)
    digest = ask(transport, others[peer], f"digest/{version}", limit=200, timeout_s=6 * ASK_S).decode()
    vectors, taken = {}, dict.fromkeys(donors, 0)
    for name, count in manifest.sizes:
        vectors[name], given = _fetch_vector(transport, donors, version, name, count)
        for donor, size in given.items():
            taken[donor] += size
    if vectors_digest(vectors) != digest:
        raise TransferFailed(f"the state of {peer} is not what its digest says")
    return Snapshot(manifest.state, vectors, taken)


def _pinned(transport: Transport, peer: str, others: Mapping[str, PeerAddress], version: str) -> dict[str, PeerAddress]:
    found = {}
    for other, address in others.items():
        if other != peer:
            try:
                ask(transport, address, f"pin/{version}", limit=200, timeout_s=ASK_S)
            except TransferFailed:
                continue  # it has moved on, or is busy: the others give
            found[other] = address
    return found


def _fetch_vector(
    transport: Transport, donors: Mapping[str, PeerAddress], version: str, name: str, count: int
) -> tuple[Tensor, dict[str, int]]:
    item = vector_name(version, name)
    vector = torch.empty(count)
    parcel = _describe_any(transport, donors, item)
    if parcel.size != 4 * count:
        raise TransferFailed(f"{item}: {parcel.size} bytes, {4 * count} were due")
    room = memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]
    given = fetch(parcel, donors, transport, room, on_progress=_Keep(transport, donors, version))
    return vector, given


class _Keep:
    """Donors drop a copy that nobody has asked for in a while: a slow fetch asks now and then."""

    def __init__(self, transport: Transport, donors: Mapping[str, PeerAddress], version: str) -> None:
        self._transport, self._donors, self._version = transport, donors, version
        self._asked = time.monotonic()

    def __call__(self, *_: object) -> None:
        if time.monotonic() - self._asked > REPIN_S:
            self._asked = time.monotonic()
            _pinned(self._transport, "", self._donors, self._version)


def tensor_of(data: Buffer) -> Tensor:
    """A copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def entry_of(record: Record) -> Entry:
    key = record.proposal.key
    return Entry(key.round, record.digest, key.parent, encode(record), record.payload)
