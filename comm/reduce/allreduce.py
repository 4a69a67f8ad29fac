"""The pipelined butterfly: every member reduces one span of the vector for everybody.

Each member sends the chunks of its encoded contribution to the spans' owners. An owner adds up the contributions to a
chunk in the plan's order, encodes the mean once and sends those bytes to all. So each contribution and the result are
quantised once, the bytes are the same on all members, and each moves 2 (n-1)/n encoded vectors each way.

A stream goes one way: contributions first, then results. Contributions never wait for results, so nobody waits in a
circle; a slow owner holds its senders back, so that only a few chunks of each member lie in its memory.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diloco.comm.reduce.spans import ReducePlan, Span
from diloco.comm.reduce.window import Count, Stopped, Window
from diloco.comm.transport.transport import PeerAddress, Place, Stream, Transport
from diloco.errors import (
    CodecError,
    ContributionRefused,
    FrameError,
    PlanRefused,
    ReduceCancelled,
    ReduceFailed,
    StreamEnded,
    TransportError,
    TransportTimeout,
)

CONTRIBUTION, RESULT = 1, 2
CHUNK_NUMBER = struct.Struct("<I")
WINDOW = 2  # chunks of each member in memory
ACCEPT_SLICE_S = 0.1  # how soon a cancelled attempt stops waiting for streams


@dataclass
class Progress:
    """What has passed between this member and another one, and when it last did."""

    sent_chunks: int = 0
    received_chunks: int = 0
    last_at: float = 0.0  # time.monotonic()


class Reduction:
    """One attempt. `run()` blocks and returns the encoded mean; any thread may `cancel()` it or ask for `progress`."""

    def __init__(
        self,
        plan: ReducePlan,
        contribution: Tensor,
        transport: Transport,
        addresses: Mapping[str, PeerAddress],
        *,
        result: Tensor | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """`contribution` is this member's encoded vector, `result` room for the mean's; `patience_s` is the time for
        others to be reached and to appear."""
        _check_part(plan, transport.identity, addresses)
        assert contribution.numel() == plan.codec.size(plan.count) and contribution.dtype == torch.uint8
        self.plan = plan
        self.me = plan.members.index(transport.identity)
        self.others = [peer for peer in plan.members if peer != transport.identity]
        size = plan.result_codec.size(plan.count)
        self.result = contribution.new_empty(size) if result is None else result
        assert self.result.numel() == size
        self.progress = {peer: Progress() for peer in self.others}
        self._contribution = contribution
        self._transport, self._addresses, self._patience_s = transport, addresses, patience_s
        self._mine = plan.chunks(self.me)
        # [slot, member, bytes]: the chunks of one number lie together, this member's own among them
        self._slots = torch.empty(WINDOW, len(plan.members), self._largest_chunk(), dtype=torch.uint8)
        self._windows = {peer: Window(list(self._slots[:, plan.members.index(peer)])) for peer in self.others}
        self._reduced = Count()
        self._streams: list[Stream] = []
        self._heard: set[str] = set()  # members whose stream has come
        self._connecting: set[threading.Thread] = set()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> Tensor:
        """Once only: another attempt needs another channel."""
        threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in self._works()]
        try:
            for thread in threads:
                thread.start()
            self._guarded(self._reduce)
            for thread in threads:
                self._join(thread)
        except BaseException as error:  # Ctrl-C, or no more threads to be had
            self._fail(error)
            raise
        finally:
            self._transport.forget(self.plan.channel)
            self._close_streams()
        if self._error is not None:
            raise self._error
        return self.result

    def _works(self) -> list[Callable[[], None]]:
        """What is done besides reducing, each in a thread of its own."""
        return [*(partial(self._send_all_to, peer) for peer in self.others), *[self._receive] * len(self.others)]

    def _join(self, thread: threading.Thread) -> None:
        """Of a failed attempt, a thread that still connects is left behind: it closes what it gets by itself."""
        while thread.is_alive() and not (self._error is not None and thread in self._connecting):
            thread.join(ACCEPT_SLICE_S)

    def cancel(self, reason: str = "cancelled") -> None:
        self._fail(ReduceCancelled(f"{self.plan.channel}: {reason}"))

    def expected(self, peer: str) -> int:
        """How many chunks it will have sent."""
        return len(self._mine) + len(self.plan.chunks(self.plan.members.index(peer)))

    @property
    def bytes_sent(self) -> int:
        return sum(stream.bytes_sent for stream in self._streams)

    def _largest_chunk(self) -> int:
        return max((self._size(chunk) for chunk in self._mine), default=0)

    def _size(self, chunk: Span) -> int:
        return self.plan.codec.size(chunk.hi - chunk.lo)

    def _send_all_to(self, peer: str) -> None:
        with self._blaming(peer):
            self._send_to(peer)

    @contextmanager
    def _blaming(self, peer: str) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            raise ReduceFailed(f"{self.plan.channel}: {error}", hung_up=peer) from None

    def _send_to(self, peer: str) -> None:
        stream = self._connect(peer)
        contribution, result = _bytes(self._contribution), _bytes(self.result)
        for number, chunk in enumerate(self.plan.chunks(self.plan.members.index(peer))):
            stream.send(CONTRIBUTION, CHUNK_NUMBER.pack(number), contribution[self.plan.bytes_of(chunk)])
            self._sent(peer)
        for number, chunk in enumerate(self._mine):
            self._reduced.reach(number + 1)
            stream.send(RESULT, CHUNK_NUMBER.pack(number), result[self.plan.result_bytes_of(chunk)])
            self._sent(peer)
        stream.end()

    def _receive(self) -> None:
        stream = self._accept()
        with self._blaming(stream.peer):
            self._receive_from(stream)

    def _receive_from(self, stream: Stream) -> None:
        peer = stream.peer
        window, result = self._windows[peer], self.result
        for number, chunk in enumerate(self._mine):
            room = window.place(number, self._size(chunk))
            stream.receive(_expect(CONTRIBUTION, number, room))
            window.filled()
            self._received(peer)
        for number, chunk in enumerate(self.plan.chunks(self.plan.members.index(peer))):
            room = result[self.plan.result_bytes_of(chunk)]
            stream.receive(_expect(RESULT, number, room))
            self._refuse_bad_result(peer, chunk, room)
            self._received(peer)
        _expect_end(stream)

    def _reduce(self) -> None:
        for number, chunk in enumerate(self._mine):
            slot, room = self._slots[number % WINDOW], self.result[self.plan.result_bytes_of(chunk)]
            payloads = dict(zip(self.plan.members, slot[:, : self._size(chunk)], strict=True))
            own = payloads.pop(self.plan.members[self.me])
            for peer, payload in payloads.items():
                self._await_good(peer, number, payload, chunk)
            own.copy_(self._contribution[self.plan.bytes_of(chunk)])
            self._refuse_bad(self.plan.members[self.me], own, chunk)
            count, key, result = chunk.hi - chunk.lo, self.plan.key, self.plan.result_codec
            self.plan.codec.mean(slot, self.plan.shares, key, chunk.lo, count, room, result)
            self._refuse_bad_result(self.plan.members[self.me], chunk, room)
            for window in self._windows.values():
                window.free()
            self._reduced.add_one()

    def _await_good(self, peer: str, number: int, payload: Tensor, chunk: Span) -> None:
        self._windows[peer].wait_for(number)
        self._refuse_bad(peer, payload, chunk)

    def _refuse_bad(self, peer: str, payload: Tensor, chunk: Span) -> None:
        try:
            self.plan.codec.refuse_bad(payload, chunk.hi - chunk.lo)
        except CodecError as bad:
            raise ContributionRefused(peer, bad) from None

    def _refuse_bad_result(self, owner: str, chunk: Span, payload: Tensor) -> None:
        try:
            self.plan.result_codec.refuse_bad(payload, chunk.hi - chunk.lo)
        except CodecError as bad:
            raise ReduceFailed(f"{self.plan.channel}: the mean that {owner} worked out: {bad}", owner) from None

    def _connect(self, peer: str) -> Stream:
        me = threading.current_thread()
        self._connecting.add(me)
        try:
            address = self._addresses[peer]
            return self._keep(self._transport.connect(address, self.plan.channel, timeout_s=self._patience_s))
        finally:
            self._connecting.discard(me)

    def _accept(self) -> Stream:
        """A stream of a member that has none yet."""
        give_up_at = time.monotonic() + self._patience_s
        while self._error is None:
            try:
                stream = self._transport.accept(self.plan.channel, timeout_s=ACCEPT_SLICE_S)
            except TransportTimeout:
                if time.monotonic() > give_up_at:
                    missing = self._missing()
                    reason = f"{self.plan.channel}: {', '.join(missing)}: no stream came"
                    raise ReduceFailed(reason, hung_up=missing[0]) from None
            else:
                if self._claim(stream):
                    return self._keep(stream)
                stream.close()
        raise Stopped

    def _missing(self) -> list[str]:
        return [peer for peer in self.others if peer not in self._heard]

    def _claim(self, stream: Stream) -> bool:
        with self._lock:
            if stream.peer not in self._missing():
                return False
            self._heard.add(stream.peer)
        return True

    def _keep(self, stream: Stream) -> Stream:
        with self._lock:
            if self._error is None:
                self._streams.append(stream)
                return stream
        stream.close()
        raise Stopped

    def _sent(self, peer: str) -> None:
        self.progress[peer].sent_chunks += 1
        self.progress[peer].last_at = time.monotonic()

    def _received(self, peer: str) -> None:
        self.progress[peer].received_chunks += 1
        self.progress[peer].last_at = time.monotonic()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass  # whoever stopped it has said why
        except TransportError as error:
            self._fail(ReduceFailed(f"{self.plan.channel}: {error}"))
        except CodecError as error:
            self._fail(ReduceFailed(f"{self.plan.channel}: the mean cannot be encoded: {error}"))
        except BaseException as error:  # noqa: BLE001 -- a thread's outermost frame: run() raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first error counts: the others are its consequences."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._close_streams()
        self._reduced.stop()
        for window in self._windows.values():
            window.stop()

    def _close_streams(self) -> None:
        for stream in list(self._streams):
            stream.close()


def _check_part(plan: ReducePlan, identity: str, addresses: Mapping[str, PeerAddress]) -> None:
    if identity not in plan.members:
        raise PlanRefused(f"{plan.channel}: {identity} is not in it")
    if unknown := [peer for peer in plan.members if peer != identity and peer not in addresses]:
        raise PlanRefused(f"{plan.channel}: no address of {', '.join(unknown)}")


def _expect(kind: int, number: int, room: Tensor) -> Place:
    """Nothing but this chunk is let in, straight into its room."""

    def place(got: int, head: bytes, length: int) -> memoryview:
        if (got, head, length) != (kind, CHUNK_NUMBER.pack(number), len(room)):
            raise FrameError(f"frame of kind {got} with {length} bytes, chunk {number} of kind {kind} was due")
        return _bytes(room)

    return place


def _expect_end(stream: Stream) -> None:
    try:
        stream.receive()
    except StreamEnded:
        return
    raise FrameError(f"{stream.peer} sent more than its plan says")


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory, not a copy."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]
