"""The plan of an all-reduce: who reduces which part of a vector. Pure: one member makes it, the same for all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from diloco.comm.codec.base import Codec
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import codec_named
from diloco.errors import CodecError, PlanRefused

CHUNKS = 2  # of the largest span: enough that results flow while contributions still come
USUAL_CHUNK_PAGES = 96  # three million values at most: by then what a frame costs is small beside its bytes
MAX_CHUNK_PAGES = 256
MAX_MEMBERS = 1024
MAX_CHUNKS_BYTES = 1 << 30  # of all members together, each once
MAX_TOTAL_WEIGHT = 2**53  # shares are exact quotients of whole numbers up to here


@dataclass(frozen=True)
class Span:
    """Describe the values [lo, hi) of a vector. lo begins a page; so does hi, unless the vector ends there."""

    lo: int
    hi: int


class Coded:
    """Name the codec of a plan's contributions, and that of their mean; without a name, it travels as they do."""

    codec_name: str
    result_codec_name: str

    @property
    def codec(self) -> Codec:
        """Return the codec of contributions; raise CodecError if there is none of that name."""
        return codec_named(self.codec_name)

    @property
    def result_codec(self) -> Codec:
        """Return the codec of the mean: that of contributions where no other is named."""
        return codec_named(self.result_codec_name or self.codec_name)


@dataclass(frozen=True)
class ReducePlan(Coded):
    """Describe one attempt at a mean. Every member holds the same plan; a peer that is not in it takes no part."""

    channel: str  # names the attempt: frames of another one never get in
    members: tuple[str, ...]  # identities, in the order in which contributions are added up
    weights: tuple[int, ...]  # whole numbers: tokens
    spans: tuple[Span, ...]  # together the whole vector; one for each member, in order, unless `owners` says whose
    codec_name: str
    key: NoiseKey  # for rounding the result
    chunk_pages: int = USUAL_CHUNK_PAGES
    result_codec_name: str = ""  # how the mean travels; empty: as contributions do
    start: int = 0  # where the first span begins: the vector may be a part of a longer one
    owners: tuple[int, ...] = ()  # of the spans, by their places among the members; empty: one span each, in order
    names: tuple[str, ...] = ()  # of the members' contributions: equal names mean equal bytes; empty: none is kept
    result_name: str = ""  # of their mean
    resumes: bool = False  # members may hold pages of an earlier attempt, and say first what they lack
    lost: str = ""  # a member that is gone: of its contribution, the others hold all pages but those of the hole
    hole: tuple[Span, ...] = ()  # where the mean is over the others; each is one of `spans`
    norms: tuple[float, ...] = ()  # that contributions have, as their offers say; empty: nobody says

    def __post_init__(self) -> None:
        if reason := _what_is_wrong(self):
            raise PlanRefused(f"{self.channel}: {reason}")

    @property
    def count(self) -> int:
        """Return the number of values of the vector, all spans together."""
        return self.spans[-1].hi - self.start

    @property
    def present(self) -> tuple[str, ...]:
        """Return the members that take part in the exchange: all, but for one that was lost."""
        return tuple(member for member in self.members if member != self.lost)

    @cached_property
    def shares_in_hole(self) -> tuple[float, ...]:
        """Return the shares of those present where the lost member does not count."""
        weights = [weight for member, weight in zip(self.members, self.weights, strict=True) if member != self.lost]
        return tuple(weight / sum(weights) for weight in weights)

    def is_in_hole(self, chunk: Span) -> bool:
        """Return whether the mean of a chunk is over the members that are present."""
        return any(span.lo <= chunk.lo < span.hi for span in self.hole)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Return each member's weight divided by the sum of all weights."""
        total = sum(self.weights)
        return tuple(weight / total for weight in self.weights)

    def chunks(self, member: int) -> list[Span]:
        """Return the pieces of a member's span, in the order in which they travel."""
        owners, step = self.owners or range(len(self.members)), self.chunk_pages * PAGE
        owned = [span for span, owner in zip(self.spans, owners, strict=True) if owner == member]
        return [Span(lo, min(lo + step, span.hi)) for span in owned for lo in range(span.lo, span.hi, step)]

    def bytes_of(self, chunk: Span) -> slice:
        """Return where the chunk lies in an encoded contribution."""
        return _bytes_of(chunk, self.codec, self.start)

    def result_bytes_of(self, chunk: Span) -> slice:
        """Return where the chunk lies in the encoded mean."""
        return _bytes_of(chunk, self.result_codec, self.start)


def _bytes_of(chunk: Span, codec: Codec, start: int) -> slice:
    first = (chunk.lo - start) // PAGE * codec.size(PAGE)
    return slice(first, first + codec.size(chunk.hi - chunk.lo))


def spans_by_bandwidth(count: int, bytes_per_s: Sequence[float]) -> tuple[Span, ...]:
    """Divide a vector into spans such that all members finish together, or as nearly as their links allow."""
    pages, shares = -(-count // PAGE), _shares(bytes_per_s)
    edges, total = [0], 0.0
    for share in shares:
        total += share
        edges.append(round(total * pages))
    edges[-1] = pages
    return tuple(Span(min(lo * PAGE, count), min(hi * PAGE, count)) for lo, hi in pairwise(edges))


def spans_after_losses(
    count: int, first: Sequence[tuple[str, float]], members: Sequence[str], bytes_per_s: Sequence[float]
) -> tuple[tuple[Span, ...], tuple[int, ...]]:
    """Return spans and their owners after members were lost: the others keep theirs and divide those of the lost.

    `first` are the members of the first attempt, with the rates of their links.
    """
    spans, owners = list[Span](), list[int]()
    for (name, _), span in zip(first, spans_by_bandwidth(count, [rate for _, rate in first]), strict=True):
        if name in members:
            spans.append(span)
            owners.append(members.index(name))
            continue
        for owner, part in enumerate(spans_by_bandwidth(span.hi - span.lo, bytes_per_s)):
            spans.append(Span(span.lo + part.lo, span.lo + part.hi))
            owners.append(owner)
    return tuple(spans), tuple(owners)


def spans_after_salvage(
    count: int, first: Sequence[tuple[str, float]], lost: str, owners: Sequence[tuple[int, int, int]],
    hole: Sequence[tuple[int, int]],
) -> tuple[tuple[Span, ...], tuple[int, ...], tuple[Span, ...]]:  # fmt: skip
    """Return spans, their owners and the hole, after a member was lost whose contribution still counts.

    `owners` has the lost one's pages [lo, hi) with the place of their owner among the others; each of these ranges lies
    in the hole, or outside of it.
    """
    spans, whose, names = list[Span](), list[int](), [name for name, _ in first]
    for name, span in zip(names, spans_by_bandwidth(count, [rate for _, rate in first]), strict=True):
        if name != lost:
            spans.append(span)
            whose.append(names.index(name))
            continue
        for lo, hi, place in owners:
            spans.append(Span(min(lo * PAGE, count), min(hi * PAGE, count)))
            whose.append(place + (place >= names.index(lost)))
    in_hole = [(lo, hi) for lo, hi, _ in owners if any(begin <= lo and hi <= end for begin, end in hole)]
    return tuple(spans), tuple(whose), tuple(Span(lo * PAGE, min(hi * PAGE, count)) for lo, hi in in_hole)


def chunk_pages_for(spans: Sequence[Span]) -> int:
    """Return how many pages a chunk has: half of the largest span, but no more than 96."""
    largest = max(-(-(span.hi - span.lo) // PAGE) for span in spans)
    return min(max(-(-largest // CHUNKS), 1), USUAL_CHUNK_PAGES)


def _shares(bytes_per_s: Sequence[float]) -> list[float]:
    """Return each member's share of the vector.

    A member with share s moves 1 + (n - 2) s vectors each way. Those too slow even with s = 0 own nothing.
    """
    n = len(bytes_per_s)
    if n <= 2:
        return [rate / sum(bytes_per_s) for rate in bytes_per_s]
    active = sorted(range(n), key=lambda i: bytes_per_s[i])
    while True:
        time = (n - 2 + len(active)) / sum(bytes_per_s[i] for i in active)
        if time * bytes_per_s[active[0]] >= 1:
            break
        active.pop(0)
    owners = set(active)
    return [(time * bytes_per_s[i] - 1) / (n - 2) if i in owners else 0.0 for i in range(n)]


def _what_is_wrong(plan: ReducePlan) -> str:
    """Return why a plan is refused, or nothing. Plans come from peers: nothing in them is believed."""
    n = len(plan.members)
    if not 0 < n <= MAX_MEMBERS or len(set(plan.members)) != n:
        return f"a plan has 1 to {MAX_MEMBERS} members, each once"
    if len(plan.weights) != n or len(plan.spans) != (len(plan.owners) or n):
        return "each member has one weight, and each span one owner"
    if not all(0 <= owner < n for owner in plan.owners) or len(plan.names) not in (0, n):
        return "owners are members, and each contribution has a name"
    if len(plan.norms) not in (0, n) or not all(0 <= norm < math.inf for norm in plan.norms):
        return "each contribution has a norm"
    if plan.lost and (plan.lost not in plan.members or not plan.names or not plan.resumes or n < 3):
        return "a lost member was one, and the others have kept its pages"
    if not all(isinstance(weight, int) for weight in plan.weights):
        return "weights are whole numbers"
    if min(plan.weights) < 0 or not 0 < sum(plan.weights) <= MAX_TOTAL_WEIGHT:
        return "weights are whole numbers, not negative, not all zero, below 2^53 together"
    try:
        largest = max(codec.size(PAGE) for codec in (plan.codec, plan.result_codec))
    except CodecError as unknown:
        return str(unknown)
    if plan.result_codec.needs_feedback:
        return f"the mean cannot travel as {plan.result_codec.name}: nobody feeds back what that loses"
    if not 0 < plan.chunk_pages <= MAX_CHUNK_PAGES:
        return f"a chunk has 1 to {MAX_CHUNK_PAGES} pages"
    if n * plan.chunk_pages * largest > MAX_CHUNKS_BYTES:
        return f"a chunk of each member takes more than {MAX_CHUNKS_BYTES} bytes"
    return _what_is_wrong_with(plan.spans, plan.start)


def _what_is_wrong_with(spans: Sequence[Span], start: int) -> str:
    if start < 0 or start % PAGE:
        return "the first span begins where a page begins"
    edges = [start, *(span.hi for span in spans)]
    if any(span.lo != lo or span.hi < lo for span, lo in zip(spans, edges, strict=False)):
        return f"spans follow each other from {start} on"
    if any(span.lo % PAGE and span.lo != edges[-1] for span in spans):
        return "a span begins where a page begins"
    return ""
