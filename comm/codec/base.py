"""The interface of every codec: vectors to bytes of an exact size and back, sums, and checks of bytes from peers.

A vector is cut into *pages* of 32768 values at absolute positions, a page into *units* that are encoded together, each
to the same number of bytes. The bytes depend only on the values, the position and the key, so however a vector is cut
into spans and chunks of whole pages, the bytes are the same. Only the last page of a vector may be short; its last
unit is filled up with zeros.

Decoding uses individually rounded fp32 operations in a fixed order, so that ARM, x86 and CUDA agree bit for bit. So
does encoding, unless a codec says otherwise.
"""

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from diloco.comm.codec.noise import PAGE, NoiseKey, add_noise
from diloco.comm.codec.rooms import room_for
from diloco.errors import CodecError

REFUSED = "the vector holds NaN or infinity, or numbers beyond {}: it was not encoded"
NOT_DECODED = "the bytes hold NaN or infinity: nothing was decoded"
FEEDBACK_COST = 0.005  # of the loss, for codecs that need feedback, which want another outer optimizer too
SQUARES_ABOVE = 1e-15  # norms of pages below this lose squares among fp32's denormals
STRETCH = 32 * PAGE  # values that a thread encodes at a time, of a vector that comes in parts
CHECKED_AT_ONCE = 4096 * PAGE  # values on a GPU: 128 MB of answers at most
SQUARED_PAGES, SQUARED_PAGES_ON_GPU = 16, 512  # decoded at a time for their norm: 2 MB, and 64 MB
TINY = 2.0**-100  # a block below this becomes zero: its scale would come near the denormals
TINY_BITS = int(torch.tensor(TINY).view(torch.int32))


@dataclass(frozen=True)
class Noise:
    """Describe the rounding noise of consecutive pages: its key, and the index of the first page."""

    key: NoiseKey
    first_page: int

    def add_to(self, values: Tensor) -> Tensor:
        """Add the noise to fp32 values in place, and return them."""
        return add_noise(values, self.key, self.first_page)

    def whole_numbers(self, like: Tensor, below: int) -> Tensor:
        """Return the noise as int32 in [0, below), in the shape of `like`."""
        return self.add_to(torch.zeros_like(like)).mul_(below).to(torch.int32)


class Codec(ABC):
    """Encode vectors as bytes, decode them, and declare everything that others need to know of the codec.

    Configuration, planner, benchmarks and documents read what stands here. The tests demand of every codec that values
    up to 2.9e38 are encoded (a codec with a smaller `largest` says so) and NaN and infinity refused; that a mean loses
    nothing on average, so a `closed` codec rounds by the key's noise; and that decoding is the same everywhere.
    `Blockwise` (dense.py) and `Grouped` (chunks.py) do most of the work for codecs with scales.
    """

    name: str
    about: str  # one line for people
    unit: int  # values that are encoded together; a page is a whole number of units
    needs_feedback = False  # biased: what it leaves out is lost unless error feedback sends it later
    largest = 2.9e38  # that can be encoded
    closed = True  # a mean of such vectors can travel in the same codec
    outer: Mapping[str, object] = {}  # settings of the outer optimizer that it was published with, if any
    planned = False  # True: the planner may propose it unasked
    loss_cost = 0.0  # share of the loss that it is expected to add, for the planner
    cpu_ns: tuple[float, float]  # to encode and to decode a value, by `diloco bench codec` on 2 ARM cores

    @property
    @abstractmethod
    def unit_bytes(self) -> int:
        """Return the bytes of one encoded unit: a multiple of 4, because scales are read where they lie."""

    @property
    def bits_per_value(self) -> float:
        """Return the bits that a value takes on average in a whole page, scales included."""
        return 8 * self.size(PAGE) / PAGE

    def result_codec(self, members: int) -> str:
        """Name the codec in which the mean of `members` contributions travels: int8 unless this one is closed."""
        return self.name if self.closed else "int8"

    def size(self, count: int) -> int:
        """Return the exact number of bytes that `count` values are encoded to."""
        return -(-count // self.unit) * self.unit_bytes

    def encode(
        self, values: Tensor, key: NoiseKey, start: int = 0, *, out: Tensor | None = None, defer: bool = False
    ) -> Tensor:
        """Encode fp32 values that begin at absolute position `start`, where a page begins, and return the bytes.

        Values with NaN or infinity raise CodecError, a check that has to wait for a GPU. With `defer` nothing waits:
        the bytes (uint8) then hold NaN where the values do, and the caller calls `refuse_bad` before it uses them.
        """
        assert start % PAGE == 0 and values.dtype == torch.float32 and values.ndim == 1
        if values.requires_grad or not values.is_contiguous():
            values = values.detach().contiguous()
        count = values.numel()
        size = self.size(count)
        payload = torch.empty(size, dtype=torch.uint8, device=values.device) if out is None else out
        assert payload.numel() == size
        if count:
            self._fill(payload, values, Noise(key, start // PAGE))
        if not defer:
            self.refuse_bad(payload, count, REFUSED.format(self.largest))
        return payload

    def encode_parts(self, parts: Iterable[Tensor], count: int, key: NoiseKey) -> Tensor:
        """Encode `count` values that come in parts of any lengths. No more than a stretch of them lies in memory. On a
        GPU they are checked last, many at once, because each check waits for it."""
        payload: Tensor | None = None
        for start, values in stretches(parts, count):
            if payload is None:
                payload = room_for(self.size(count), values.device)
            defer = values.device.type != "cpu"
            self.encode(values, key, start, out=payload[self.bytes_of(start, len(values))], defer=defer)
        if payload is None:
            return torch.empty(0, dtype=torch.uint8)
        for start in range(0, count, CHECKED_AT_ONCE) if payload.device.type != "cpu" else ():
            size = min(CHECKED_AT_ONCE, count - start)
            self.refuse_bad(payload[self.bytes_of(start, size)], size, REFUSED.format(self.largest))
        return payload

    def bytes_of(self, start: int, count: int) -> slice:
        """Return where values lie in a payload that begin at `start`, where a page begins."""
        first = start // PAGE * self.size(PAGE)
        return slice(first, first + self.size(count))

    def decode(self, payload: Tensor, count: int, *, out: Tensor | None = None, checked: bool = False) -> Tensor:
        """Return the values that `size(count)` bytes encode.

        Bytes that `check` refuses raise CodecError; those that are `checked` have passed it.
        """
        values = torch.empty(count, device=payload.device) if out is None else out
        assert len(values) == count and values.is_contiguous()
        values = values.detach()
        if not checked:
            self.check(payload, count)
        if count:
            self._add(payload, values, 1.0, fresh=True)
        return values

    def decode_part(self, payload: Tensor, lo: int, hi: int, count: int) -> Tensor:
        """Return the values from `lo` to `hi` of the `count` that a payload encodes: only their pages are decoded."""
        first, end = lo // PAGE * PAGE, min(-(-hi // PAGE) * PAGE, count)
        return self.decode(payload[self.bytes_of(first, end - first)], end - first)[lo - first : hi - first]

    def accumulate(self, payload: Tensor, into: Tensor, share: float = 1.0) -> None:
        """Add the decoded values to `into`, with each scale times `share` (as fp32) in place of the scale."""
        self.check(payload, len(into))
        into = into.detach()
        assert into.is_contiguous()
        if len(into):
            self._add(payload, into, share, fresh=False)

    def mean(
        self, payloads: Tensor, shares: Sequence[float], key: NoiseKey, start: int, count: int, out: Tensor,
        result: "Codec | None" = None,
    ) -> None:  # fmt: skip
        """Encode the sum of what the rows of `payloads` encode, each times its share, added up in their order.

        `result` encodes the sum; None means this codec. A row may be longer than its payload. The caller has called
        `refuse_bad` on each row, and calls it on the result.
        """
        result = result or self
        if not count or (result is self and self._mean_fused(payloads, shares, key, start // PAGE, count, out)):
            return
        total = torch.zeros(count, device=payloads.device)
        for payload, share in zip(payloads, shares, strict=True):
            self._add(payload[: self.size(count)], total, share, fresh=False)
        result.encode(total, key, start, out=out, defer=True)

    def _mean_fused(
        self, payloads: Tensor, shares: Sequence[float], key: NoiseKey, first_page: int, count: int, out: Tensor
    ) -> bool:
        """Compute the mean in one kernel and return True, or return False where there is no such kernel."""
        return False

    def check(self, payload: Tensor, count: int) -> None:
        """Raise CodecError unless these are as many bytes as `count` values take, and `refuse_bad` finds them good."""
        if payload.dtype != torch.uint8 or payload.numel() != self.size(count):
            raise CodecError(f"{self.name}: {count} values take {self.size(count)} bytes, not {payload.numel()}")
        self.refuse_bad(payload, count)

    def refuse_bad(self, payload: Tensor, count: int, what_then: str = NOT_DECODED) -> None:
        """Raise CodecError unless all `count` values are finite: bytes from peers may hold anything.

        `what_then` ends the error's message.
        """
        if not self._is_finite(payload, count):
            raise CodecError(f"{self.name}: {what_then}")

    def sum_of_squares(self, payload: Tensor, count: int) -> float:
        """Return the squared norm of what a payload encodes that has passed `refuse_bad`; pages are decoded in turn. A
        GPU is waited for once."""
        group = SQUARED_PAGES if payload.device.type == "cpu" else SQUARED_PAGES_ON_GPU
        room, found, total = torch.empty(min(group * PAGE, count), device=payload.device), list[Tensor](), 0.0

        def norms(pages: int, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
            self._add(payload[self.bytes_of(lo, hi - lo)], room[: hi - lo], 1.0, fresh=True)
            return torch.linalg.vector_norm(room[: hi - lo].view(pages, -1), dim=1, dtype=dtype).double()

        for cut in cuts(count, group):
            each = norms(*cut, torch.float32)  # a page is short enough for that
            usual = ((each > SQUARES_ABOVE) & torch.isfinite(each)).all()
            found.append(torch.stack((each.square().sum(), usual)))
        told = torch.stack(found).tolist() if found else []
        for cut, (squares, is_usual) in zip(cuts(count, group), told, strict=True):
            total += squares if is_usual else float(norms(*cut, torch.float64).square().sum())  # squares beyond fp32
        return total

    def norm(self, payload: Tensor, count: int) -> float:
        """Return the norm of what a payload encodes that has passed `refuse_bad`: what an offer says of it."""
        return math.sqrt(self.sum_of_squares(payload, count))

    @abstractmethod
    def bound(self, rows: Tensor) -> Tensor:
        """Return the largest error that each value may have after decoding; fp32 [units, unit] in and out."""

    @abstractmethod
    def _is_finite(self, payload: Tensor, count: int) -> bool: ...

    @abstractmethod
    def _fill(self, payload: Tensor, values: Tensor, noise: Noise) -> None:
        """Encode one or more values into `payload`; what is not finite stays so."""

    @abstractmethod
    def _add(self, payload: Tensor, into: Tensor, share: float, *, fresh: bool) -> None:
        """Add what a payload that has passed `refuse_bad` encodes, times `share`; `fresh` memory is taken for zeros."""


def stretches(parts: Iterable[Tensor], count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield `count` values again that come in parts of any lengths: whole pages together, and where they begin. What is
    yielded lies in memory that is used again."""
    start = filled = 0
    room: Tensor | None = None
    for part in parts:
        if len(part) == count and not filled:  # it is all there is
            yield 0, part
            return
        if room is None:
            room = torch.empty(min(count, STRETCH * max(1, torch.get_num_threads())), device=part.device)
        while len(part):
            more = min(len(part), len(room) - filled, count - start - filled)
            assert more, "more values than were due"
            room[filled : filled + more].copy_(part[:more])
            part, filled = part[more:], filled + more
            if filled == len(room) or start + filled == count:
                yield start, room[:filled]
                start, filled = start + filled, 0
    assert start == count, "fewer values than were due"


def cuts(count: int, group: int) -> Iterator[tuple[int, int, int]]:
    """Yield (pages, lo, hi) for whole pages, up to `group` together, and then for the short last one, if any."""
    whole = count // PAGE
    for page in range(0, whole, group):
        pages = min(group, whole - page)
        yield pages, page * PAGE, (page + pages) * PAGE
    if whole * PAGE < count:
        yield 1, whole * PAGE, count


def whole_units(values: Tensor, unit: int) -> Tensor:
    """Return the values as [units, unit], the last unit filled up with zeros; a view where nothing is missing."""
    if missing := -len(values) % unit:
        values = torch.cat((values, values.new_zeros(missing)))
    return values.view(-1, unit)


@cache
def compiled_module(name: str, compiler: str) -> ModuleType | None:
    """Import a module of kernels and make it ready to run; return None if its compiler is not installed."""
    if importlib.util.find_spec(compiler) is None:
        return None
    kernels = importlib.import_module(f"diloco.comm.codec.{name}")
    if hasattr(kernels, "prepare"):
        kernels.prepare()
    return kernels
