"""The pipelined butterfly: every member reduces one span of the vector for all of them.

Each member sends the chunks of its encoded contribution to the spans' owners. An owner adds up the contributions to a
chunk in the plan's order, encodes the mean once and sends those bytes to all. So each contribution and the result are
quantised once, the bytes are the same on all members, and each moves 2 (n-1)/n encoded vectors each way.

A stream goes one way: contributions first, then results. Contributions never wait for results, so no members wait in a
circle; a slow owner holds its senders back, so that only a few chunks of each member lie in its memory.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diloco import errors
from diloco.comm.reduce.spans import ReducePlan, Span
from diloco.comm.transport.transport import Addresses, BufferFor, Stream, Transport

CONTRIBUTION, RESULT = 1, 2
CHUNK_NUMBER = struct.Struct("<I")
WINDOW = 2  # chunks of each member in memory
ACCEPT_SLICE_S = 0.1  # how soon a cancelled attempt stops waiting for streams


@dataclass
class Progress:
    """Count the chunks that have passed between this member and another one, and note when the last one did."""

    sent_chunks: int = 0
    received_chunks: int = 0
    last_at: float = 0.0  # time.monotonic()

    def sent(self) -> None:  # each counter has one thread that writes it
        """Count one more chunk to the other member. Only the thread that sends to it calls this."""
        self.sent_chunks, self.last_at = self.sent_chunks + 1, time.monotonic()

    def received(self) -> None:
        """Count one more chunk from the other member. Only the thread that receives from it calls this."""
        self.received_chunks, self.last_at = self.received_chunks + 1, time.monotonic()


# How the threads of one all-reduce wait for each other. Whatever stops the attempt wakes all of them.


class Stopped(Exception):
    """Signal to a waiting thread that the attempt is over; the attempt's error says why."""


class Count:
    """Hold a number that only rises, and let threads wait for a value of it."""

    def __init__(self) -> None:
        self._value = 0
        self._stopped = False
        self._changed = threading.Condition()

    def add_one(self) -> None:
        """Increase the number and wake all threads that wait."""
        with self._changed:
            self._value += 1
            self._changed.notify_all()

    def reach(self, value: int) -> None:
        """Wait until the number is at least `value`; raise Stopped once the attempt is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._value >= value or self._stopped)
            if self._stopped:
                raise Stopped

    def stop(self) -> None:
        """Make every wait raise Stopped, those that have begun and those to come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Window:
    """Hold the chunks of one member that wait to be added, in a ring of buffers."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self.filled, self.freed = Count(), Count()

    def place(self, number: int, size: int) -> Tensor:
        """Return room for chunk `number`, once the chunk that was in it has been added."""
        self.freed.reach(number - len(self._buffers) + 1)
        return self._buffers[number % len(self._buffers)][:size]

    def stop(self) -> None:
        """Wake the threads that fill the ring and that empty it, with Stopped."""
        self.filled.stop()
        self.freed.stop()


class Reduction:
    """Run one attempt at an all-reduce.

    `run()` blocks and returns the encoded mean; any thread may `cancel()` it or ask for `progress`.
    """

    scatters = True  # contributions go to the owners of spans
    gathers = True  # owners send the means to all

    def __init__(
        self,
        plan: ReducePlan,
        contribution: Tensor,
        transport: Transport,
        addresses: Addresses,
        *,
        result: Tensor | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """Take this member's encoded vector as `contribution`, and `result` as room for the encoded mean, if any.

        `patience_s` is the time for others to be reached and to appear.
        """
        _check_part(plan, transport.identity, addresses)
        assert contribution.numel() == plan.codec.size(plan.count) and contribution.dtype == torch.uint8
        self.plan = plan
        self.me = transport.identity
        self.others = [peer for peer in plan.members if peer != self.me]
        size = plan.result_codec.size(plan.count)
        self.result = contribution.new_empty(size) if result is None else result
        assert self.result.numel() == size
        self.progress = {peer: Progress() for peer in self.others}
        self._contribution = contribution
        self._transport, self._addresses, self._patience_s = transport, addresses, patience_s
        self._chunks = {owner: plan.chunks(number) for number, owner in enumerate(plan.members)}
        largest = max((self._size(chunk) for chunk in self._contributions(self.me)), default=0)
        # [slot, member, bytes]: the chunks of one number lie together, this member's own among them
        self._slots = torch.empty(WINDOW, len(plan.members), largest, dtype=torch.uint8)
        self._windows = {peer: Window(list(self._slots[:, plan.members.index(peer)])) for peer in self.others}
        self._reduced = Count()
        self._streams: list[Stream] = []
        self._awaited = list(self.others)  # members whose stream has not come
        self._connecting: set[threading.Thread] = set()
        self.began = time.monotonic()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> Tensor:
        """Carry out the attempt and return the encoded mean, once only: another attempt needs another channel."""
        works = [*(partial(self._send_to, peer) for peer in self.others), *[self._receive] * len(self.others)]
        threads = [threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in works]
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

    def _join(self, thread: threading.Thread) -> None:
        """Wait for a thread.

        One of a failed attempt that still connects is left behind: it closes what it gets by itself.
        """
        while thread.is_alive() and not (self._error is not None and thread in self._connecting):
            thread.join(ACCEPT_SLICE_S)

    @property
    def level(self) -> "Reduction":
        """Return the reduction at work, for the interface of `TwoLevelReduction`: here there is only this one."""
        return self

    def cancel(self, reason: str = "cancelled") -> None:
        """Give the attempt up: `run()` raises ReduceCancelled, unless the attempt has failed before."""
        self._fail(errors.ReduceCancelled(f"{self.plan.channel}: {reason}"))

    def expected(self, peer: str) -> int:
        """Return how many chunks this peer will have sent to this member by the end."""
        return len(self._contributions(self.me)) + len(self._results(peer))

    def _contributions(self, owner: str) -> list[Span]:
        """Return the chunks that all other members send to this owner."""
        return self._chunks[owner] if self.scatters else []

    def _results(self, owner: str) -> list[Span]:
        """Return the chunks that this owner sends to all other members."""
        return self._chunks[owner] if self.gathers else []

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that went out on all streams of this attempt so far."""
        return sum(stream.bytes_sent for stream in self._streams)

    def _size(self, chunk: Span) -> int:
        return self.plan.codec.size(chunk.hi - chunk.lo)

    @contextmanager
    def _blaming(self, peer: str) -> Iterator[None]:
        try:
            yield
        except errors.TransportError as error:
            raise errors.ReduceFailed(f"{self.plan.channel}: {error}", hung_up=peer) from None

    def _send_to(self, peer: str) -> None:
        contribution, result = _bytes(self._contribution), _bytes(self.result)
        with self._blaming(peer):
            stream = self._connect(peer)
            for number, chunk in enumerate(self._contributions(peer)):
                stream.send(CONTRIBUTION, CHUNK_NUMBER.pack(number), contribution[self.plan.bytes_of(chunk)])
                self.progress[peer].sent()
            for number, chunk in enumerate(self._results(self.me)):
                if self.scatters:
                    self._reduced.reach(number + 1)
                stream.send(RESULT, CHUNK_NUMBER.pack(number), result[self.plan.result_bytes_of(chunk)])
                self.progress[peer].sent()
            stream.end()

    def _receive(self) -> None:
        stream = self._accept()
        peer, window = stream.peer, self._windows[stream.peer]
        with self._blaming(peer):
            for number, chunk in enumerate(self._contributions(self.me)):
                room = window.place(number, self._size(chunk))
                stream.receive(_expect(CONTRIBUTION, number, room))
                window.filled.add_one()
                self.progress[peer].received()
            for number, chunk in enumerate(self._results(peer)):
                room = self.result[self.plan.result_bytes_of(chunk)]
                stream.receive(_expect(RESULT, number, room))
                self._refuse_bad_result(peer, chunk, room)
                self.progress[peer].received()
            _expect_end(stream)

    def _reduce(self) -> None:
        for number, chunk in enumerate(self._contributions(self.me)):
            slot, room = self._slots[number % WINDOW], self.result[self.plan.result_bytes_of(chunk)]
            payloads = dict(zip(self.plan.members, slot[:, : self._size(chunk)], strict=True))
            own = payloads.pop(self.me)
            for peer, payload in payloads.items():
                self._windows[peer].filled.reach(number + 1)
                self._refuse_bad(peer, payload, chunk)
            own.copy_(self._contribution[self.plan.bytes_of(chunk)])
            self._refuse_bad(self.me, own, chunk)
            count, key, result = chunk.hi - chunk.lo, self.plan.key, self.plan.result_codec
            self.plan.codec.mean(slot, self.plan.shares, key, chunk.lo, count, room, result)
            self._refuse_bad_result(self.me, chunk, room)
            for window in self._windows.values():
                window.freed.add_one()
            self._reduced.add_one()

    def _refuse_bad(self, peer: str, payload: Tensor, chunk: Span) -> None:
        try:
            self.plan.codec.refuse_bad(payload, chunk.hi - chunk.lo)
        except errors.CodecError as bad:
            raise errors.ContributionRefused(peer, bad) from None

    def _refuse_bad_result(self, owner: str, chunk: Span, payload: Tensor) -> None:
        try:
            self.plan.result_codec.refuse_bad(payload, chunk.hi - chunk.lo)
        except errors.CodecError as bad:
            raise errors.ReduceFailed(f"{self.plan.channel}: the mean that {owner} worked out: {bad}", owner) from None

    def _connect(self, peer: str) -> Stream:
        me = threading.current_thread()
        self._connecting.add(me)
        try:
            address = self._addresses[peer]
            return self._keep(self._transport.connect(address, self.plan.channel, timeout_s=self._patience_s))
        finally:
            self._connecting.discard(me)

    def _accept(self) -> Stream:
        """Wait for a stream of a member that has none yet."""
        give_up_at = time.monotonic() + self._patience_s
        while self._error is None:
            try:
                stream = self._transport.accept(self.plan.channel, timeout_s=ACCEPT_SLICE_S)
            except errors.TransportTimeout:
                if time.monotonic() > give_up_at:
                    missing = list(self._awaited)
                    reason = f"{self.plan.channel}: {', '.join(missing)}: no stream came"
                    raise errors.ReduceFailed(reason, hung_up=missing[0]) from None
                continue
            with self._lock:
                if awaited := stream.peer in self._awaited:
                    self._awaited.remove(stream.peer)
            if awaited:
                return self._keep(stream)
            stream.close()
        raise Stopped

    def _keep(self, stream: Stream) -> Stream:
        with self._lock:
            if self._error is None:
                self._streams.append(stream)
                return stream
        stream.close()
        raise Stopped

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass  # whoever stopped it has said why
        except errors.TransportError as error:
            self._fail(errors.ReduceFailed(f"{self.plan.channel}: {error}"))
        except errors.CodecError as error:
            self._fail(errors.ReduceFailed(f"{self.plan.channel}: the mean cannot be encoded: {error}"))
        except BaseException as error:  # noqa: BLE001 -- a thread's outermost frame: run() raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Record the error and stop all threads. The first error counts: the others are its consequences."""
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


def _check_part(plan: ReducePlan, identity: str, addresses: Addresses) -> None:
    if identity not in plan.members:
        raise errors.PlanRefused(f"{plan.channel}: {identity} is not in it")
    if unknown := [peer for peer in plan.members if peer != identity and peer not in addresses]:
        raise errors.PlanRefused(f"{plan.channel}: no address of {', '.join(unknown)}")


def _expect(kind: int, number: int, room: Tensor) -> BufferFor:
    """Return a function that lets in nothing but this chunk, straight into its room."""

    def place(got: int, head: bytes, length: int) -> memoryview:
        if (got, head, length) != (kind, CHUNK_NUMBER.pack(number), len(room)):
            raise errors.FrameError(f"frame of kind {got} with {length} bytes, chunk {number} of kind {kind} was due")
        return _bytes(room)

    return place


def _expect_end(stream: Stream) -> None:
    try:
        stream.receive()
    except errors.StreamEnded:
        return
    raise errors.FrameError(f"{stream.peer} sent more than its plan says")


def _bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's memory, not a copy."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]
