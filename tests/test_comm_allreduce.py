"""The butterfly gives everybody the same bytes, whatever the spans, chunks, timing and transport; and fails cleanly."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

import pytest
import torch
from golden import REDUCED, RESULT_KEY, digest, reduced_digest
from groups import SOON, Group, direct_group, encoded, jittery, memory_group, names, wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.comm.codec.base import whole_units
from diloco.comm.codec.chunks import CHUNK
from diloco.comm.codec.noise import PAGE
from diloco.comm.codec.registry import CODECS
from diloco.comm.reduce.allreduce import CHUNK_NUMBER, CONTRIBUTION, RESULT, WINDOW, Reduction
from diloco.comm.reduce.spans import ReducePlan, Span, spans_by_bandwidth
from diloco.comm.reduce.waiting import Count, Stopped, reach_together
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.errors import ContributionRefused, PlanRefused, ReduceCancelled, ReduceFailed

KINDS: dict[str, Callable[[int], Group]] = {
    "memory": memory_group,
    "direct": direct_group,
    "jittery": lambda size: wrapped(memory_group(size), jittery),
    "pooled": lambda size: wrapped(direct_group(size), PooledTransport),
}


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(size: int = 4, kind: str = "memory") -> Group:
        groups.append(KINDS[kind](size))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def by_hand(plan: ReducePlan, contributions: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(plan.count)
    for name, weight in zip(plan.members, plan.weights, strict=True):
        plan.codec.accumulate(contributions[name], total, weight / sum(plan.weights))
    return plan.result_codec.encode(total, plan.key)


@pytest.mark.parametrize("codec, kind", [*((codec, "memory") for codec in CODECS), *(("int8", kind) for kind in KINDS)])
def test_bytes_do_not_depend_on_spans_chunks_arrival_or_transport(make, codec, kind):
    group, count = make(4, kind), 23 * PAGE + 77
    contributions, digests = encoded(group, count, codec), set()
    for number, (rates, chunk_pages) in enumerate([([1, 1, 1, 1], 8), ([1, 2, 3, 9], 1), ([0.01, 1, 1, 1], 3)]):
        spans = spans_by_bandwidth(count, rates)
        plan = group.plan(count, codec, spans=spans, chunk_pages=chunk_pages, channel=f"reduce/{number}")
        digests.add(digest(group.reduce(plan, contributions)))
    assert digests == {REDUCED[codec]}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_the_mean_has_the_same_bits_on_every_platform(codec, device):
    assert reduced_digest(codec, device) == REDUCED[codec]


@pytest.mark.parametrize(
    ("size", "count"),
    [(size, count) for size in (1, 2, 5) for count in (0, 1, PAGE, 3 * PAGE + 1)] + [(16, 40 * PAGE)],
)
def test_the_result_is_the_encoded_weighted_mean(make, size, count):
    group = make(size)
    plan, contributions = group.plan(count, "int4", chunk_pages=1), encoded(group, count, "int4")
    assert torch.equal(group.reduce(plan, contributions), by_hand(plan, contributions))


def test_a_mean_of_sparse_vectors_keeps_the_places_of_all(make):
    group, count = make(4), 9 * PAGE + 5000
    plan, contributions = group.plan(count, "sparse", weights=(1, 1, 1, 1)), encoded(group, count, "sparse")
    mean = plan.result_codec.decode(group.reduce(plan, contributions), count)
    decoded = [plan.codec.decode(contributions[name], count) for name in plan.members]
    exact = sum(decoded) / 4
    assert plan.result_codec.name == "union:256"
    assert ((mean - exact).abs() <= plan.result_codec.bound(whole_units(exact, CHUNK)).flatten()[:count]).all()
    assert not mean[exact == 0].any()


def same_place_64_times(payload: Tensor) -> None:
    payload.view(-1, 120)[50, 8:104] = 7


def no_number(payload: Tensor) -> None:
    payload.view(9, -1).view(torch.float32)[7, 0] = float("nan")


@pytest.mark.parametrize(("codec", "damage"), [("sparse", same_place_64_times), ("int8", no_number)])
def test_a_damaged_contribution_names_its_sender(make, codec, damage):
    group, count = make(3), 9 * PAGE
    contributions = encoded(group, count, codec)
    damage(contributions["m01"])
    group.begin(group.plan(count, codec), contributions)
    refused = [outcome for outcome in group.finish().values() if isinstance(outcome, ContributionRefused)]
    assert refused and {error.peer for error in refused} == {"m01"}, "somebody reduces that page"


def test_progress_counts_every_chunk(make):
    group, count = make(3), 12 * PAGE
    group.reduce(group.plan(count, "int8", chunk_pages=2), encoded(group, count, "int8"))
    for reduction in group.reductions.values():
        for progress in reduction.progress.values():
            assert (progress.sent_chunks, progress.received_chunks) == (4, 4)  # 2 of contributions, 2 of results
            assert progress.last_at > 0


def test_a_slow_owner_holds_its_senders_back(make):
    """m01 never comes, so m00 can add nothing of m02's: it must not pile up what m02 sends."""
    group, count = make(3), 60 * PAGE
    plan, contributions = group.plan(count, "fp32", chunk_pages=1), encoded(group, count, "fp32")
    group.begin(plan, contributions, members=("m00", "m02"))
    owner = group.reductions["m00"]
    until(lambda: owner.progress["m02"].received_chunks == WINDOW)
    time.sleep(0.2)
    assert owner.progress["m02"].received_chunks == WINDOW
    for reduction in group.reductions.values():
        reduction.cancel()
    assert all(isinstance(outcome, ReduceFailed) for outcome in group.finish().values())


@pytest.mark.parametrize("kind", ["memory", "direct", "pooled"])
def test_cancelling_at_any_moment_leaves_nothing_behind_and_the_next_attempt_succeeds(make, kind):
    group, count, random = make(3, kind), 30 * PAGE, Random(1)
    contributions = encoded(group, count, "int8")
    expected = by_hand(group.plan(count, "int8"), contributions)
    group.reduce(group.plan(count, "int8", channel="first"), contributions)  # connections and caches exist now
    threads_before, files_before, attempts = threading.active_count(), open_files(), []
    for attempt in range(25):
        group.begin(group.plan(count, "int8", chunk_pages=1, channel=f"attempt {attempt}"), contributions)
        time.sleep(random.random() * 0.03)
        group.reductions[random.choice(names(3))].cancel("enough")
        assert all(isinstance(o, ReduceFailed) or torch.equal(o, expected) for o in group.finish().values())
        attempts += [weakref.ref(reduction) for reduction in group.reductions.values()]
        group.reductions, group.outcomes = {}, {}
    assert torch.equal(group.reduce(group.plan(count, "int8", channel="last"), contributions), expected)
    until(lambda: threading.active_count() <= threads_before)
    until(lambda: open_files() <= files_before)
    group.reductions = {}
    gc.collect()
    assert not [attempt for attempt in attempts if attempt() is not None], "buffers of dead attempts are kept"


def test_cancel_says_so(make):
    group = make(2)
    plan, contributions = group.plan(PAGE, "int8"), encoded(group, PAGE, "int8")
    alone = Reduction(plan, contributions["m00"], group.transports["m00"], group.addresses)
    threading.Timer(0.1, alone.cancel, ["the round is over"]).start()
    with pytest.raises(ReduceCancelled, match=r"reduce/1: the round is over"):
        alone.run()


@pytest.mark.parametrize("kind", ["memory", "direct", "pooled"])
def test_a_member_that_dies_ends_the_attempt_for_all_and_the_next_goes_on_without_it(make, kind):
    group, count = make(4, kind), 40 * PAGE
    contributions, plan = encoded(group, count, "int8"), group.plan(count, "int8", chunk_pages=1)
    dying = group.transports.pop("m03")
    group.begin(plan, contributions, members=names(3))
    streams = [dying.connect(group.addresses[name], plan.channel, timeout_s=SOON) for name in names(3)]
    for member, stream in enumerate(streams):
        chunk = plan.bytes_of(plan.chunks(member)[0])
        stream.send(CONTRIBUTION, CHUNK_NUMBER.pack(0), contributions["m03"][chunk].numpy())
    until(lambda: all(group.reductions[name].progress["m03"].received_chunks for name in names(3)))
    dying.close()
    assert all(isinstance(outcome, ReduceFailed) for outcome in group.finish().values())
    plan = group.plan(count, "int8", channel="reduce/2")
    assert torch.equal(group.reduce(plan, contributions), by_hand(plan, contributions))


def test_a_member_that_never_comes_is_named(make):
    group = make(3)
    plan, contributions = group.plan(PAGE, "int8"), encoded(group, PAGE, "int8")
    here = Reduction(plan, contributions["m00"], group.transports["m00"], group.addresses, patience_s=0.3)
    with pytest.raises(ReduceFailed, match=r"m01, m02: no stream"):
        here.run()


@pytest.mark.parametrize(
    "kind, number, size",
    [(RESULT, 0, PAGE), (CONTRIBUTION, 1, PAGE), (CONTRIBUTION, 0, PAGE + 1), (9, 0, PAGE), (CONTRIBUTION, 0, 0)],
)
def test_frames_that_are_not_due_end_the_attempt(make, kind, number, size):
    group, count = make(2), 8 * PAGE
    plan, contributions = group.plan(count, "fp32", chunk_pages=1), encoded(group, count, "fp32")
    honest = Reduction(plan, contributions["m00"], group.transports["m00"], group.addresses)
    stream = group.transports["m01"].connect(group.addresses["m00"], plan.channel, timeout_s=SOON)
    stream.send(kind, CHUNK_NUMBER.pack(number), bytes(4 * size))
    with pytest.raises(ReduceFailed, match="m01"):
        honest.run()


class Slow:
    """A transport whose connections take their time."""

    def __init__(self, transport: Transport, connect_s: float) -> None:
        self.transport, self.identity, self.connect_s = transport, transport.identity, connect_s

    def connect(self, peer: PeerAddress, channel: str, *, timeout_s: float) -> Stream:
        time.sleep(self.connect_s)
        return self.transport.connect(peer, channel, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> object:
        return getattr(self.transport, name)


def test_nobody_is_done_before_everybody_has_been_sent_the_result(make):
    """m02 owns nothing, so nothing makes the others wait for it."""
    group, count = make(3), 4 * PAGE
    plan = group.plan(count, "int8", spans=spans_by_bandwidth(count, [1.0, 1.0, 0.0]))
    assert plan.chunks(2) == []
    group.transports["m00"] = Slow(group.transports["m00"], connect_s=0.3)  # type: ignore[assignment]
    contributions = encoded(group, count, "int8")
    expected = by_hand(plan, contributions)
    group.begin(plan, contributions)
    until(lambda: "m00" in group.outcomes)
    group.reductions["m00"].result.zero_()  # its owner may use the memory again
    assert torch.equal(group.finish()["m02"], expected)


def test_a_mean_that_is_no_number_is_refused_and_its_owner_named(make):
    group, count = make(2), 2 * PAGE
    plan, contributions = group.plan(count, "int8"), encoded(group, count, "int8")
    honest = Reduction(plan, contributions["m00"], group.transports["m00"], group.addresses)
    liar = group.transports["m01"].connect(group.addresses["m00"], plan.channel, timeout_s=SOON)
    (mine,), (theirs,) = plan.chunks(0), plan.chunks(1)
    liar.send(CONTRIBUTION, CHUNK_NUMBER.pack(0), contributions["m01"][plan.bytes_of(mine)].numpy())
    liar.send(RESULT, CHUNK_NUMBER.pack(0), b"\xff" * len(contributions["m01"][plan.bytes_of(theirs)]))
    with pytest.raises(ReduceFailed, match="the mean that m01 worked out") as failed:
        honest.run()
    assert failed.value.peer == "m01"


def test_a_plan_without_me_or_without_an_address_is_refused(make):
    group = make(2)
    plan, contributions = group.plan(PAGE, "int8"), encoded(group, PAGE, "int8")
    stranger = memory_group(3).transports["m02"]
    with pytest.raises(PlanRefused, match="m02 is not in it"):
        Reduction(plan, contributions["m00"], stranger, group.addresses)
    with pytest.raises(PlanRefused, match="no address of m01"):
        Reduction(plan, contributions["m00"], group.transports["m00"], {})


def test_a_stranger_is_turned_away(make):
    group, count = make(3), 8 * PAGE
    plan = group.plan(count, "int8", members=("m00", "m01"), weights=(1, 1), spans=spans_by_bandwidth(count, [1, 1]))
    contributions = encoded(group, count, "int8")
    stream = group.transports["m02"].connect(group.addresses["m00"], plan.channel, timeout_s=SOON)
    stream.send(CONTRIBUTION, CHUNK_NUMBER.pack(0), b"nonsense")
    assert torch.equal(group.reduce(plan, contributions), by_hand(plan, contributions))


def test_a_plan_from_elsewhere_is_checked(make):
    group = make(2)
    for changes in (
        {"members": ("m00", "m00")}, {"members": ("m00",)}, {"weights": (1, -1)}, {"weights": (0, 0)},
        {"weights": (2**53, 1)}, {"codec_name": "int3"}, {"chunk_pages": 0}, {"chunk_pages": 10**9},
        {"result_codec_name": "union:5"}, {"result_codec_name": "sparse"},
        {"codec_name": "dct", "result_codec_name": ""},
        {"spans": (Span(0, PAGE), Span(PAGE + 256, 3 * PAGE))}, {"spans": (Span(0, 100), Span(100, 3 * PAGE))},
        {"spans": (Span(0, 3 * PAGE), Span(3 * PAGE, PAGE))}, {"spans": (Span(PAGE, PAGE), Span(PAGE, 3 * PAGE))},
        {"spans": (Span(0, 3 * PAGE),)},
    ):  # fmt: skip
        with pytest.raises(PlanRefused, match="reduce/1"):
            group.plan(3 * PAGE, "int8", **changes)


@given(
    count=st.integers(0, 100 * PAGE), rates=st.lists(st.floats(1e3, 1e9), min_size=1, max_size=20),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_spans_cover_the_vector_and_nobody_finishes_much_later_than_needed(count, rates):
    spans = spans_by_bandwidth(count, rates)
    ReducePlan("c", tuple(map(str, range(len(rates)))), (1,) * len(rates), spans, "int8", RESULT_KEY)  # valid
    assert spans[-1].hi == count
    n, size = len(rates), max(count, 1)
    times = [(size + (n - 2) * (span.hi - span.lo)) / rate for span, rate in zip(spans, rates, strict=True) if n > 1]
    if n > 2 and count:
        best = max((2 * n - 2) * size / sum(rates), size / min(rates))  # no plan beats these
        rounding = (n - 2) * (PAGE + -count % PAGE) / min(rates)  # a short last page counts as a whole one
        assert max(times) <= best * (1 + 1e-9) + rounding or max(times) <= water_level(size, rates) + rounding


def water_level(size: int, rates: list[float]) -> float:
    """By bisection, in another way than the code: the least time in which the links can own the whole vector."""
    n = len(rates)
    lo, hi = 0.0, (2 * n - 2) * size / min(rates)
    for _ in range(200):
        middle = (lo + hi) / 2
        owned = sum(max(0.0, (middle * rate - size) / (n - 2)) for rate in rates)
        lo, hi = (middle, hi) if owned < size else (lo, middle)
    return max(hi, size / min(rates)) * (1 + 1e-6)


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < give_up_at, threading.enumerate()
        time.sleep(0.005)


def test_who_follows_the_mean_ends_with_the_attempt_also_where_a_stream_broke_within_a_page(make):
    group = make(2)
    plan, me = group.plan(4 * PAGE, "int8"), names(2)[0]
    reduction = Reduction(plan, encoded(group, 4 * PAGE, "int8")[me], group.transports[me], group.addresses)
    for part in (Span(PAGE, 2 * PAGE), Span(0, 0)):  # what has come of the first page is no page
        reduction._note(reduction._got[me], part)

    def follow() -> None:
        with suppress(Stopped):
            list(reduction.arriving())

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    reduction.cancel("given up")
    follower.join(SOON)
    assert not follower.is_alive()


def test_who_waits_a_moment_for_more_goes_on_when_all_is_there_or_the_moment_is_over():
    counts = [Count(), Count()]
    for count in counts:
        count.add(3)
    reach_together(counts, 3, SOON)
    reach_together(counts, 4, 0.01)
    late = threading.Thread(target=reach_together, args=(counts, 4, 10 * SOON), daemon=True)
    late.start()
    for count in counts:
        count.add()
    late.join(SOON)
    assert not late.is_alive()
    counts[1].stop()
    with pytest.raises(Stopped):
        reach_together(counts, 5, 0.01)
