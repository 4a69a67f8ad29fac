"""Where the peers of a run find each other: signed, expiring records in hivemind's DHT, behind a blocking interface.

All of hivemind runs on one thread with one asyncio loop; p2pd, its daemon, ends with this process. Import this late:
hivemind takes seconds and brings torch along.
"""

import asyncio
import fcntl
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar

from diloco.comm.peers import dht
from diloco.comm.peers.admission import Admission
from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.noticeboard import Noticeboard
from diloco.comm.peers.record import LIFETIME_LIMIT_S, PeerRecord, encode
from diloco.errors import DirectoryError, RecordRefused

Result = TypeVar("Result")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


class Directory:
    """Publish this peer's record and find those of the others.

    Started by `Directory.start`. Safe to use from several threads.
    """

    def __init__(self, identity: Identity, admission: Admission, board: Noticeboard | None = None) -> None:
        self.identity, self.run_id, self._admission = identity, admission.invite.run_id, admission
        self.board = board or Noticeboard(self.run_id)
        self.refusals: Counter[str] = Counter()  # by reason; what this node was asked to keep or was given to read
        self.addresses: tuple[str, ...] = ()
        self._lock = lock_identity(identity)
        self.thread = LoopThread("diloco-directory")
        self._node: Any = None
        self._options = dht.NodeOptions()
        self._after_reopening: list[Callable[[], Coroutine[Any, Any, None]]] = []

    @classmethod
    def start(
        cls, identity: Identity, admission: Admission, board: Noticeboard | None = None, **options: Any
    ) -> "Directory":
        """Start a directory and its node, in the run that the admission lets this identity into.

        `options` are those of `diloco.comm.peers.dht.NodeOptions`: bootstrap, listen_host, listen_port, …
        """
        directory, node = cls(identity, admission, board), dht.NodeOptions(**options)
        try:
            directory._open(node)
        except BaseException:
            directory.close()
            raise
        return directory

    @property
    def p2p(self) -> Any:
        """Return hivemind's P2P on this directory's loop, for streams between peers; another one after `reopen`."""
        return self._node.p2p

    @property
    def refusal(self) -> str:
        """Return why another peer did not let this one in, as that one says; "" where none has refused."""
        return "".join(filter(str.isprintable, self.p2p.refusal))[:200]  # no control characters on a terminal

    @property
    def running(self) -> bool:
        """Tell whether p2pd is alive; if not, `reopen` starts it again."""
        return bool(self.p2p.running)

    def after_reopening(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have this run on the loop after each `reopen`, to serve streams on the new p2pd."""
        self._after_reopening.append(work)

    def reopen(self) -> None:
        """Start p2pd and the node again after p2pd has ended, with the same key and at the same port.

        If the port cannot be had any more, at another one. The new node knows nobody until `reach` finds somebody.
        """
        self.thread.at_end = None
        with suppress(DirectoryError, *dht.FAILURES):  # of something dead, nothing better can be expected
            self.thread.call(dht.close_node(self._node), CLOSE_TIMEOUT_S)
        options = replace(self._options, bootstrap=())
        try:
            self._open(options)
        except DirectoryError:
            if options.announce or options.fixed:  # a router forwards that port, or a firewall lets it through
                raise
            self._open(replace(options, listen_port=0))
        for work in self._after_reopening:
            self.call(work())

    def publish(self, record: PeerRecord, expires_s: float) -> PeerRecord:
        """Sign this peer's record, put it on the board and store it in the run's DHT, valid for `expires_s` seconds.

        Returns the record as published, with its run, key, admission, number and expiry. Where the DHT does not take
        it, DirectoryError is raised, and it stays on the board.
        """
        if not 0 < expires_s <= LIFETIME_LIMIT_S:
            raise DirectoryError(f"a record cannot be valid for {expires_s} s: at most {LIFETIME_LIMIT_S:.0f}")
        RUN_CLOCK.settle()
        now_ms = int(RUN_CLOCK.now() * 1000)
        record = replace(
            record,
            run_id=self.run_id,
            public_key=self.identity.public_key,
            admission=self._admission.pack(),
            sequence=now_ms,  # rises across restarts too
            expires_ms=now_ms + int(expires_s * 1000),
        )
        key, value = dht.dht_key(self.run_id), encode(record, self.identity)
        self.board.take(value)
        stored = self.call(self._node.store(key, value, record.expires_at, subkey=record.public_key))
        # hivemind's answer is that of the slowest replica alone: one that refuses does not undo the others.
        if not stored and self.peers().get(record.public_key) != record:
            raise DirectoryError(
                "the record was not stored: no peer took it, or an earlier one of this identity expires later."
                " The island tries again by itself"
            )
        return record

    def peers(self, *, ask_others: bool = True) -> dict[bytes, PeerRecord]:
        """Return every peer with a valid record by its public key, this one included.

        Bad records are left out and counted in `refusals`, the others are put on the board. Without `ask_others` it is
        what this node has been told: of few peers, all that is new, and of many, what this one is to keep.
        """
        entries = self.call(self._node.get(dht.dht_key(self.run_id), latest=ask_others))
        found: dict[bytes, PeerRecord] = {}
        for subkey, entry in entries.value.items() if entries is not None else ():
            try:
                found[subkey] = self.board.take(entry.value, subkey)
            except RecordRefused as refused:
                self.refusals[refused.reason] += 1
        return found

    def reach(self, places: Mapping[str, Sequence[str]]) -> set[str]:
        """Return which of these peers answer at their multiaddrs, all asked at once.

        From then on they and this one know each other's records.
        """

        async def reach_all() -> list[bool]:
            return await asyncio.gather(*(dht.reach(self._node, peer, where) for peer, where in places.items()))

        return {peer for peer, answers in zip(places, self.call(reach_all()), strict=True) if answers}

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float = CALL_TIMEOUT_S) -> Result:
        """Run a coroutine on the directory's loop and wait for it.

        Whatever fails in the network is a DirectoryError.
        """
        if self.thread.alive and not self.p2p.running:
            work.close()
            raise DirectoryError("the network daemon p2pd has ended: an island starts it again by itself")
        try:
            return self.thread.call(work, timeout_s)
        except dht.FAILURES as error:
            raise DirectoryError(f"the network failed: {error}. Try again") from error

    def close(self) -> None:
        """End the node, its daemon and the thread. Safe to call twice."""
        self.thread.stop()
        self._lock.close()

    def _open(self, options: dht.NodeOptions) -> None:
        try:
            opening = dht.open_node(self.identity, self._admission, options, self.refusals, self.board.whereabouts)
            self._node = self.thread.call(opening, START_TIMEOUT_S)
        except dht.FAILURES as error:
            raise DirectoryError(_why_not_open(options, error)) from error
        self.thread.at_end = lambda: dht.close_node(self._node)
        self.addresses = tuple(map(str, self.thread.call(self.p2p.get_visible_maddrs(), CALL_TIMEOUT_S)))
        self._options = replace(options, listen_port=_port_of(self.addresses) or options.listen_port)


def lock_identity(identity: Identity) -> BinaryIO:
    """Lock the key file: two processes with one libp2p identity confuse every peer that meets them."""
    file = open(identity.path, "rb")  # noqa: SIM115 -- it is held open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise DirectoryError(
            f"another process uses the identity {identity.path}: give each peer a key file of its own"
        ) from None
    return file


def _port_of(addresses: Sequence[str]) -> int:
    """Return the TCP port of the first multiaddr that has one; 0 if none has."""
    ports = (int(parts[4]) for address in addresses if len(parts := address.split("/")) > 4 and parts[3] == "tcp")
    return next(ports, 0)


def _why_not_open(options: dht.NodeOptions, error: BaseException) -> str:
    if isinstance(error, dht.NotLetIn):
        said = "".join(filter(str.isprintable, str(error)))[:200]  # by others: no control characters on a terminal
        return f"nobody lets this peer in at {', '.join(options.bootstrap)}: {said}"
    if options.bootstrap and "failed to connect to bootstrap peers" in str(error):
        return (
            f"nobody answers at {', '.join(options.bootstrap)}: if the run has ended or moved, ask for a new ticket; "
            "if it goes on, look for a firewall between here and there"
        )
    where = ", ".join(options.bootstrap) or f"{options.listen_host}:{options.listen_port}"
    if "local time must be within" in str(error):
        return f"cannot start at {where}: this machine's clock is more than a day from the run's. Set the clock"
    return f"cannot start at {where}: {error}"


class LoopThread:
    """Run one asyncio loop on one thread, for ordinary blocking code. A call never outlives the loop it waits for."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        self.at_end: Callable[[], Awaitable[None]] | None = None  # to be run on the loop, whatever ends it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Tell whether the loop still takes calls; False as soon as it is being closed."""
        return self._thread.is_alive() and not self._ended.done()

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Run a coroutine on the loop and wait for it; after `timeout_s` it is cancelled.

        Not for the loop's own thread, which would wait for itself.
        """
        assert threading.current_thread() is not self._thread
        try:
            if not self.alive:
                raise RuntimeError("loop ended")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise self._gone() from None
        try:
            either: list[Future[Any]] = [future, self._ended]
            wait(either, timeout_s, FIRST_COMPLETED)
            if future.done() and not future.cancelled():
                return future.result()
        finally:
            future.cancel()
        if not self.alive:
            raise self._gone()
        raise DirectoryError(f"the network did not answer within {timeout_s:.0f} s. It may still; try again")

    def stop(self) -> None:
        """End every task and the thread. Safe to call twice."""
        if self.alive:
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _gone(self) -> DirectoryError:
        return DirectoryError("the network thread has ended and takes no more calls: start the directory again")

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self.loop)
            self.loop.run_forever()
        except BaseException:  # the thread's outermost frame: callers learn of it from `_ended`
            log.exception("the network thread failed")
        finally:
            self._ended.set_result(None)
            self._drain()

    def _drain(self) -> None:
        if self.at_end is not None:
            try:
                self.loop.run_until_complete(asyncio.wait_for(self.at_end(), CLOSE_TIMEOUT_S))
            except Exception:  # still the outermost frame: the tasks must be ended, too
                log.exception("closing the network failed in part")
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
