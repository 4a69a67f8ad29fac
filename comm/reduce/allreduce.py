"""The pipelined butterfly: every member reduces one span of the vector for all of them.

Each member sends the chunks of its encoded contribution to the spans' owners. An owner adds up the contributions to a
chunk in the plan's order, encodes the mean once and sends those bytes to all. So each contribution and the result are
quantised once, the bytes are the same on all members, and each moves 2 (n-1)/n encoded vectors each way.

A stream goes one way: contributions first, then results. Contributions never wait for results, so no members wait in a
circle. With a `PageStore` an owner keeps all that it receives, one encoded vector's worth, and the next attempt sends
only what is missing: then each stream begins with what its sender lacks. Without one, a slow owner holds its senders
back, so that only a few chunks of each member lie in its memory.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod

import torch
from torch import Tensor

from diloco import errors
from diloco.comm.codec.base import Codec
from diloco.comm.codec.noise import PAGE
from diloco.comm.codec.rooms import CPU, room_for
from diloco.comm.codec.streams import beside_training
from diloco.comm.reduce.pages import (
    MAX_RANGES,
    RANGE,
    KeptPages,
    PageStore,
    copy_parts,
    joined,
    overlap,
    pack_spans,
    unpack_spans,
    whole_pages,
    without,
)
from diloco.comm.reduce.spans import ReducePlan, Span
from diloco.comm.reduce.waiting import Count, Progress, Stopped, Window, reach_together
from diloco.comm.transport.transport import Addresses, BufferFor, Stream, Transport

CONTRIBUTION, RESULT, LACKING = 1, 2, 3
CHUNK_NUMBER = struct.Struct("<I")
ROUNDING_MARGIN = 1 + 2**-10  # of norms: squares are added up in another order here
WINDOW = 2  # chunks of each member in memory, where none are kept
TOGETHER = 8  # chunks whose mean a GPU works out at once
MOMENT_S = 0.03  # that it waits for so many: a fast link brings them in less
ACCEPT_SLICE_S = 0.1  # how soon a cancelled attempt stops waiting for streams


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
        pages: PageStore | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Take this member's encoded vector as `contribution`, and `result` as room for the encoded mean, if any.

        `patience_s` is the time for others to be reached and to appear; `pages` has those of earlier attempts. What
        travels lies on the host; means are worked out on `device`.
        """
        _check_part(plan, transport.identity, addresses)
        assert contribution.numel() == plan.codec.size(plan.count) and contribution.dtype == torch.uint8
        self.plan = plan
        self.me = transport.identity
        self.others = [peer for peer in plan.present if peer != self.me]
        size = plan.result_codec.size(plan.count)
        self.result = room_for(size, near=device) if result is None else result
        assert self.result.numel() == size
        self.progress = {peer: Progress() for peer in self.others}
        self._contribution, self._device = contribution, device
        self._transport, self._addresses, self._patience_s = transport, addresses, patience_s
        self._chunks = {owner: plan.chunks(number) for number, owner in enumerate(plan.members)}
        self._pages = pages if plan.names else None
        self._age = pages.age if pages is not None else 0
        self._slots = torch.empty(0, dtype=torch.uint8)
        self._windows: dict[str, Window] = {}
        self._lacks: dict[str, list[Span]] = {}  # where it resumes: of each contribution, and of the mean (me)
        self._wanted: dict[tuple[str, int], list[Span]] = {}  # and what others lack of ours
        self._came: dict[str, int] = {}  # bytes, by peer
        self._got: dict[str, list[Span]] = {peer: [] for peer in plan.members}  # of each contribution, and the mean
        self.kept: dict[str, KeptPages] = {}  # after a failure: what has come of each member
        norms = zip(plan.members, plan.norms, strict=False)
        self._norms = {peer: norm for peer, norm in norms if peer != self.me}
        self._squares = dict.fromkeys(plan.members, 0.0)  # of what came of each contribution
        self._told = {peer: Count() for peer in self.others}
        self._reduced, self._arrived = Count(), Count()
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
        with nullcontext() if self._pages is None else self._pages.turn:  # of an earlier attempt that was cancelled
            return self._run(threads)

    def _run(self, threads: list[threading.Thread]) -> Tensor:
        try:
            self._make_room()
            if self.plan.resumes:
                self._resume()
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
            self._keep_pages()
        self.kept = {peer: self._kept_of(peer) for peer in self.plan.members} if self._error is not None else {}
        if self._error is not None:
            raise self._error
        return self.result

    def _make_room(self) -> None:
        """Get memory for the contributions to this member's span, when no earlier attempt writes to it any more."""
        own, members = self._contributions(self.me), self.plan.members
        largest = max((self._size(chunk) for chunk in own), default=0)
        # [slot, member, bytes]: the chunks of one number lie together, this member's own among them
        shape = (min(WINDOW, len(own)) if self._pages is None else len(own), len(members), largest)
        room = room_for(prod(shape)) if self._pages is None else self._pages.room(prod(shape), self._device)
        with self._lock:
            self._slots = room.view(shape)
            self._windows = {peer: Window(list(self._slots[:, members.index(peer)])) for peer in self.others}
            if self._error is not None:  # cancelled before it began
                self._stop_windows()

    def _stop_windows(self) -> None:
        for window in self._windows.values():
            window.stop()

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
        contributions = sum(len(self._lacking(peer, chunk)) for chunk in self._contributions(self.me))
        return contributions + sum(len(self._lacking(self.me, chunk)) for chunk in self._results(peer))

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

    @property
    def bytes_received(self) -> int:
        """Return the bytes of contributions and results that have come in this attempt so far."""
        return sum(list(self._came.values()))

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
            if self.plan.resumes:
                self._send_lacking(stream, peer)
                self._told[peer].reach(1)
            for number, chunk in enumerate(self._contributions(peer)):
                for part in self._wanted_by(peer, chunk, CONTRIBUTION):
                    stream.send(CONTRIBUTION, CHUNK_NUMBER.pack(number), contribution[self.plan.bytes_of(part)])
                    self.progress[peer].sent()
            for number, chunk in enumerate(self._results(self.me)):
                if self.scatters:
                    self._reduced.reach(number + 1)
                for part in self._wanted_by(peer, chunk, RESULT):
                    stream.send(RESULT, CHUNK_NUMBER.pack(number), result[self.plan.result_bytes_of(part)])
                    self.progress[peer].sent()
            stream.end()

    def _receive(self) -> None:
        stream = self._accept()
        peer, window = stream.peer, self._windows[stream.peer]
        with self._blaming(peer):
            if self.plan.resumes:
                self._hear_lacking(stream)
            for number, chunk in enumerate(self._contributions(self.me)):
                room = window.place(number, self._size(chunk))
                for part in self._lacking(peer, chunk):
                    where = _bytes_within(chunk, part, self.plan.codec)
                    self._receive_part(stream, CONTRIBUTION, number, part, room[where])
                window.filled.add()
            for number, chunk in enumerate(self._results(peer)):
                for part in self._lacking(self.me, chunk):
                    room = self.result[self.plan.result_bytes_of(part)]
                    self._receive_part(stream, RESULT, number, part, room)
            _expect_end(stream)

    def _receive_part(self, stream: Stream, kind: int, number: int, part: Span, room: Tensor) -> None:
        """Receive a part of a chunk, and note what has come; of one that breaks off, that is its first pages."""
        codec = self.plan.codec if kind == CONTRIBUTION else self.plan.result_codec
        got = self._got[stream.peer if kind == CONTRIBUTION else self.me]
        try:
            stream.receive(_expect(kind, number, room))
        except errors.TransportError:
            got.append(whole_pages(part, stream.arrived, codec))
            raise
        if kind == RESULT:
            self._refuse_bad_result(stream.peer, part, room)
        self._note(got, part)
        self._came[stream.peer] = self._came.get(stream.peer, 0) + room.numel()  # by one thread each
        self.progress[stream.peer].received()

    def _reduce(self) -> None:
        own, number = self._contributions(self.me), 0
        while number < len(own):
            if not self._lacking(self.me, own[number]):  # it was worked out before
                self._reduced.add()
                number += 1
                continue
            for peer in self.others:
                self._windows[peer].filled.reach(number + 1)
            if (enough := min(number + self._at_once, len(own))) > number + 1:
                reach_together([window.filled for window in self._windows.values()], enough, MOMENT_S)
            chunks = self._together(own, number)
            self._reduce_chunks(number, chunks)
            for part in (part for chunk in chunks for part in self._lacking(self.me, chunk)):
                self._note(self._got[self.me], part)
            for count in (*(window.freed for window in self._windows.values()), self._reduced):
                count.add(len(chunks))
            number += len(chunks)

    @property
    def _at_once(self) -> int:
        """How many chunks' mean is worked out at once, at most. A few large steps on a GPU wait less for Python's other
        threads than many small ones, and hold up training less."""
        alone = self._device.type == "cpu" or self._pages is None or self.plan.resumes
        return 1 if alone else TOGETHER

    def _together(self, own: list[Span], number: int) -> list[Span]:
        """Return the chunks from one on whose mean is worked out at once: those that have come by now, follow each
        other and are as long."""
        here = min((window.filled.value for window in self._windows.values()), default=len(own))
        here, last, length = min(here, number + self._at_once), number + 1, own[number].hi - own[number].lo
        while last < here and own[last] == Span(own[last - 1].hi, own[last - 1].hi + length):
            last += 1
        return own[number:last]

    def _reduce_chunks(self, number: int, chunks: list[Span]) -> None:
        at, whole, moves = number % len(self._slots), Span(chunks[0].lo, chunks[-1].hi), self._device.type != "cpu"
        slots, room = self._slots[at : at + len(chunks)], self.result[self.plan.result_bytes_of(whole)]
        members, shares, size = self.plan.members, self.plan.shares, self._size(chunks[0])
        own = self._contribution[self.plan.bytes_of(whole)]
        if not moves:
            slots[:, members.index(self.me), :size].copy_(own.view(len(chunks), size))
        if self.plan.is_in_hole(whole):
            rows = [members.index(member) for member in self.plan.present]
            members, shares, slots = self.plan.present, self.plan.shares_in_hole, slots[:, rows]
        count, key, result = whole.hi - whole.lo, self.plan.key, self.plan.result_codec
        with beside_training(self._device):
            payloads, mean = slots[0], room
            if moves:  # [member, bytes], as on a CPU
                payloads = slots.to(self._device)[:, :, :size].transpose(0, 1).reshape(len(members), -1)
                payloads[members.index(self.me)].copy_(own)
                mean = torch.empty_like(room, device=self._device)
            for member, payload in zip(members, payloads[:, : self._size(whole)], strict=True):
                self._refuse_bad(member, payload, whole)
            self.plan.codec.mean(payloads, shares, key, whole.lo, count, mean, result)
            if moves:
                room.copy_(mean)
        self._refuse_bad_result(self.me, whole, room)

    def _note(self, got: list[Span], part: Span) -> None:
        """Note that a part of a contribution, or of the mean, is here."""
        got.append(part)
        if got is self._got[self.me]:
            self._arrived.add()

    def arriving(self) -> Iterator[Tensor]:
        """Yield the encoded mean from its beginning on, stretch by stretch as each is complete, for another thread than
        that of `run`; raise Stopped if the attempt fails."""
        got, ends, at, seen = self._got[self.me], dict[int, int](), self.plan.start, 0
        while at < self.plan.start + self.plan.count:
            self._arrived.reach(seen + 1)
            new, first = got[seen:], at
            ends |= {part.lo: part.hi for part in new if part.lo < part.hi}  # of a broken stream no page may be whole
            seen += len(new)
            while at in ends:
                at = ends[at]
            if first < at:
                yield self.result[self.plan.result_bytes_of(Span(first, at))]

    # what an earlier attempt has left

    def _resume(self) -> None:
        """Take over the pages that an earlier attempt has received, and find out what is still lacking."""
        plan, store, own = self.plan, self._pages or PageStore(), self._contributions(self.me)
        kept = store.take(plan.result_name)
        lacking = list[Span]()
        for chunk in (chunk for chunks in self._chunks.values() for chunk in chunks):
            room = self.result[plan.result_bytes_of(chunk)]
            # in a hole, an earlier attempt may have left means with the lost member
            there = [] if plan.is_in_hole(chunk) else kept
            copied = [part for part in copy_parts(there, chunk, plan.result_codec, room) if self._is_good(part)]
            for part in copied:
                self._note(self._got[self.me], part)
            lacking += without(chunk, copied)
        self._lacks[self.me] = joined(lacking)
        for peer in (peer for peer in plan.members if peer != self.me):
            place, lacking = plan.members.index(peer), []
            kept = store.take(plan.names[place]) if plan.names else []
            for number, chunk in enumerate(own):
                if self._lacking(self.me, chunk):
                    copied = copy_parts(kept, chunk, plan.codec, self._slots[number % len(self._slots), place])
                    self._got[peer] += copied
                    lacking += without(chunk, copied)
                    if lacking and peer == plan.lost and not plan.is_in_hole(chunk):
                        raise errors.ReduceFailed(f"{plan.channel}: pages of {peer} are not here any more")
                    lacking = [] if peer == plan.lost else lacking
            self._lacks[peer] = joined(lacking)

    def _is_good(self, part: Span) -> bool:
        """Return whether a part of the mean that was kept is finite: the end of one that broke off was not checked."""
        try:
            self.plan.result_codec.refuse_bad(self.result[self.plan.result_bytes_of(part)], part.hi - part.lo)
        except errors.CodecError:
            return False
        return True

    def _lacking(self, name: str, chunk: Span) -> list[Span]:
        """Return what is still to come of a chunk: of a member's contribution, or with this one's name of the mean."""
        return overlap(self._lacks[name], chunk) if name in self._lacks else [chunk]

    def _wanted_by(self, peer: str, chunk: Span, kind: int) -> list[Span]:
        """Return the parts of a chunk that this peer lacks."""
        return overlap(self._wanted[peer, kind], chunk) if self.plan.resumes else [chunk]

    def _send_lacking(self, stream: Stream, peer: str) -> None:
        contribution = pack_spans(self._lacks[peer])
        head = CHUNK_NUMBER.pack(len(contribution))
        stream.send(LACKING, head, contribution + pack_spans(self._lacks[self.me]))

    def _hear_lacking(self, stream: Stream) -> None:
        """Take in what a peer lacks. What it says costs nobody else anything: it is sent no chunk twice."""

        def place(kind: int, head: bytes, length: int) -> memoryview:
            if kind != LACKING or len(head) != CHUNK_NUMBER.size or length > 2 * MAX_RANGES * RANGE.size:
                raise errors.FrameError(f"frame of kind {kind} with {length} bytes, what {stream.peer} lacks was due")
            return memoryview(bytearray(length))

        frame = stream.receive(place)
        (split,) = CHUNK_NUMBER.unpack(frame.head)
        for kind, raw in ((CONTRIBUTION, frame.payload[:split]), (RESULT, frame.payload[split:])):
            self._wanted[stream.peer, kind] = unpack_spans(bytes(raw), self.plan.count)
        self._told[stream.peer].add()

    def _keep_pages(self) -> None:
        """Hand what has come to the store, where an attempt that follows this one finds it."""
        if (store := self._pages) is None:
            return
        plan = self.plan
        for part in self._got[self.me]:
            if not plan.is_in_hole(part):  # that mean has another name
                store.keep(plan.result_name, part, self.result[plan.result_bytes_of(part)], age=self._age)
        for peer in self.others:
            place, got = plan.members.index(peer), joined(self._got[peer])
            for number, chunk in enumerate(self._contributions(self.me)):
                for part in overlap(got, chunk):
                    payload = self._slots[number, place, _bytes_within(chunk, part, plan.codec)]
                    store.keep(plan.names[place], part, payload, age=self._age)

    def _kept_of(self, peer: str) -> KeptPages:
        """Return what has come of a member: of the means that it was to send, and of its contribution."""
        means, chunks = joined(self._got[self.me]), self._chunks[peer]
        needed = (part for chunk in self._contributions(self.me) for part in without(chunk, means))
        whole = peer == self.me or not any(without(part, self._got[peer]) for part in needed)
        return KeptPages(joined(chunks), joined(part for chunk in chunks for part in overlap(means, chunk)), whole)

    def _refuse_bad(self, peer: str, payload: Tensor, chunk: Span) -> None:
        """Refuse what is not finite, or larger than its offer says, before it is added."""
        codec, count = self.plan.codec, chunk.hi - chunk.lo
        try:
            codec.refuse_bad(payload, count)
        except errors.CodecError as bad:
            raise errors.ContributionRefused(peer, bad) from None
        if peer in self._norms:
            self._squares[peer] += codec.sum_of_squares(payload, count)
            if self._squares[peer] > (self._norms[peer] * ROUNDING_MARGIN) ** 2:
                reason = f"its norm is above {self._norms[peer]:.6g}, which its offer names: nothing was added"
                raise errors.ContributionRefused(peer, reason)

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
        self._arrived.stop()
        self._close_streams()
        self._reduced.stop()
        for told in self._told.values():
            told.stop()
        self._stop_windows()

    def _close_streams(self) -> None:
        for stream in list(self._streams):
            stream.close()


def _check_part(plan: ReducePlan, identity: str, addresses: Addresses) -> None:
    if identity not in plan.members:
        raise errors.PlanRefused(f"{plan.channel}: {identity} is not in it")
    if unknown := [peer for peer in plan.present if peer != identity and peer not in addresses]:
        raise errors.PlanRefused(f"{plan.channel}: no address of {', '.join(unknown)}")


def _expect(kind: int, number: int, room: Tensor) -> BufferFor:
    """Return a function that lets in nothing but this chunk, straight into its room."""

    def place(got: int, head: bytes, length: int) -> memoryview:
        if (got, head, length) != (kind, CHUNK_NUMBER.pack(number), len(room)):
            raise errors.FrameError(f"frame of kind {got} with {length} bytes, chunk {number} of kind {kind} was due")
        return _bytes(room)

    return place


def _bytes_within(chunk: Span, part: Span, codec: Codec) -> slice:
    """Return where a part of a chunk lies in the chunk's bytes."""
    first = (part.lo - chunk.lo) // PAGE * codec.size(PAGE)
    return slice(first, first + codec.size(part.hi - part.lo))


def _expect_end(stream: Stream) -> None:
    try:
        stream.receive()
    except errors.StreamEnded:
        return
    raise errors.FrameError(f"{stream.peer} sent more than its plan says")


def _bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's memory, not a copy."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]
