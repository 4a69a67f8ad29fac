"""Where the peers of a run find each other: signed, expiring records in hivemind's DHT, behind a blocking interface.

Everything of hivemind's runs on one thread with one asyncio loop; p2pd, its daemon, ends with this process.
"""

import fcntl
import os
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.loop import LoopThread
from diloco.comm.peers.record import LIFETIME_LIMIT_S, PeerRecord, decode, encode
from diloco.errors import DirectoryError, RecordRefused

if TYPE_CHECKING:
    from diloco.comm.peers.dht import NodeOptions

Result = TypeVar("Result")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0


class Directory:
    """Started by `Directory.start`. Safe to use from several threads."""

    def __init__(self, identity: Identity, run_id: bytes) -> None:
        self.identity, self.run_id = identity, run_id
        self.refusals: Counter[str] = Counter()  # by reason; what this node was asked to keep or was given to read
        self.addresses: tuple[str, ...] = ()
        self._sequences: dict[bytes, int] = {}
        self._lock = _lock(identity)
        self._thread = LoopThread("diloco-directory")
        self._node: Any = None

    @classmethod
    def start(cls, identity: Identity, run_id: bytes, **options: Any) -> "Directory":
        """`options` are those of `diloco.comm.peers.dht.NodeOptions`: bootstrap, listen_host, listen_port, …"""
        from diloco.comm.peers.dht import NodeOptions

        directory = cls(identity, run_id)
        try:
            directory._open(NodeOptions(**options))
        except BaseException:
            directory.close()
            raise
        return directory

    @property
    def p2p(self) -> Any:
        """hivemind's P2P on this directory's loop, for streams between peers."""
        return self._node.p2p

    @property
    def thread(self) -> LoopThread:
        return self._thread

    def publish(self, record: PeerRecord, expires_s: float) -> PeerRecord:
        """Tell the run about this peer; returns the record as published, with its run, key, number and expiry."""
        if not 0 < expires_s <= LIFETIME_LIMIT_S:
            raise DirectoryError(f"a record cannot be valid for {expires_s} s: at most {LIFETIME_LIMIT_S:.0f}")
        now_ms = int(time.time() * 1000)
        record = replace(
            record,
            run_id=self.run_id,
            public_key=self.identity.public_key,
            sequence=now_ms,  # rises across restarts too
            expires_ms=now_ms + int(expires_s * 1000),
        )
        stored = self.call(self._store(encode(record, self.identity), record.expires_at))
        # hivemind's answer is that of the slowest replica alone: one that refuses does not undo the others.
        if not stored and self.peers().get(record.public_key) != record:
            raise DirectoryError(
                "the record was not stored: no peer took it, or an earlier one of this identity expires later."
                " Publish with a later expiry"
            )
        return record

    def peers(self) -> dict[bytes, PeerRecord]:
        """Every peer with a valid record, this one included. Bad records are left out and counted in `refusals`."""
        entries = self.call(self._find())
        found: dict[bytes, PeerRecord] = {}
        for subkey, value in entries.items():
            try:
                found[subkey] = self._read(subkey, value)
            except RecordRefused as refused:
                self.refusals[refused.reason] += 1
        return found

    def reach(self, address: str) -> bool:
        """Whether a peer answers at this multiaddr. From then on the two know each other's records."""
        from diloco.comm.peers.dht import reach

        try:
            return self.call(reach(self._node, address))
        except DirectoryError:
            return False

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float = CALL_TIMEOUT_S) -> Result:
        """Run this on the directory's loop and wait for it; whatever the network does wrong is a DirectoryError."""
        from diloco.comm.peers.dht import FAILURES

        if self._thread.alive and not self.p2p.running:
            work.close()
            raise DirectoryError("the network daemon p2pd has ended: start the directory again")
        try:
            return self._thread.call(work, timeout_s)
        except FAILURES as error:
            raise DirectoryError(f"the network failed: {error}. Try again") from error

    def close(self) -> None:
        """End the node, its daemon and the thread. Safe to call twice."""
        self._thread.stop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, options: "NodeOptions") -> None:
        from diloco.comm.peers.dht import FAILURES, close_node, open_node

        try:
            opening = open_node(self.identity, self.run_id, options, self.refusals)
            node = self._node = self._thread.call(opening, START_TIMEOUT_S)
        except FAILURES as error:
            raise DirectoryError(_why_not_open(options, error)) from error
        self._thread.at_end(lambda: close_node(node))
        self.addresses = tuple(str(address) for address in self.call(self.p2p.get_visible_maddrs(latest=True)))

    async def _store(self, value: bytes, expires_at: float) -> bool:
        from diloco.comm.peers.dht import dht_key

        key, subkey = dht_key(self.run_id), self.identity.public_key
        return bool(await self._node.store(key, value, expires_at, subkey=subkey))

    async def _find(self) -> dict[bytes, object]:
        from diloco.comm.peers.dht import dht_key

        found = await self._node.get(dht_key(self.run_id), latest=True)
        return {} if found is None else {subkey: entry.value for subkey, entry in found.value.items()}

    def _read(self, subkey: bytes, value: object) -> PeerRecord:
        from diloco.comm.peers.dht import authenticate_entry

        authenticate_entry(subkey, value, self.run_id)
        assert isinstance(value, bytes)
        record = decode(value, time.time())
        if record.sequence < self._sequences.get(subkey, 0):
            raise RecordRefused("stale", "a newer record of this peer was seen before")
        self._sequences[subkey] = record.sequence
        return record


def _lock(identity: Identity) -> int:
    """Two processes with one libp2p identity confuse every peer that meets them."""
    descriptor = os.open(identity.path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DirectoryError(
            f"another process uses the identity {identity.path}: give each peer a key file of its own"
        ) from None
    return descriptor


def _why_not_open(options: "NodeOptions", error: BaseException) -> str:
    if options.bootstrap and "failed to connect to bootstrap peers" in str(error):
        return (
            f"nobody answers at {', '.join(options.bootstrap)}: if the run has ended or moved, ask for a new ticket; "
            "if it goes on, look for a firewall between here and there"
        )
    where = ", ".join(options.bootstrap) or f"{options.listen_host}:{options.listen_port}"
    return f"cannot start at {where}: {error}. Clocks must agree within 3 s"
