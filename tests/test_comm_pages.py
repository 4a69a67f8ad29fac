"""An attempt that follows a failed one sends only what is missing, and its bytes are those of one that starts anew."""

import time
from random import Random

import pytest
import torch
from groups import Group, encoded, memory_group, names, wrapped
from torch import Tensor

from diloco.comm.codec.noise import PAGE
from diloco.comm.reduce.allreduce import CHUNK_NUMBER, LACKING, Reduction
from diloco.comm.reduce.pages import PageStore, joined, overlap, pack_spans, unpack_spans, without
from diloco.comm.reduce.spans import ReducePlan, Span, spans_after_losses, spans_by_bandwidth
from diloco.comm.transport.link import Link
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Transport
from diloco.errors import FrameError, ReduceFailed

COUNT = 60 * PAGE + 77


def named(group: Group, members: list[str], channel: str, **changes: object) -> ReducePlan:
    """A plan whose contributions and mean have names, with the spans of four members of whom some may be gone."""
    first = [(name, 1.0) for name in names(4)]
    spans, owners = spans_after_losses(COUNT, first, members, [1.0] * len(members))
    fields = {
        "channel": channel, "members": tuple(members), "weights": tuple(range(1, len(members) + 1)), "spans": spans,
        "owners": owners, "chunk_pages": 4, "names": tuple(f"of {name}" for name in members),
        "result_name": f"mean of {members}",
    }  # fmt: skip
    return group.plan(COUNT, "int8", **(fields | changes))


def begin(group: Group, plan: ReducePlan, contributions: dict[str, Tensor], stores: dict[str, PageStore]) -> None:
    def reduction(plan, contribution, transport, addresses) -> Reduction:
        return Reduction(plan, contribution, transport, addresses, pages=stores[transport.identity])

    group.begin(plan, contributions, kind=reduction)


def finish(group: Group) -> Tensor:
    outcomes = list(group.finish().values())
    for outcome in outcomes:
        assert isinstance(outcome, Tensor), outcome
        assert torch.equal(outcome, outcomes[0])
    return outcomes[0]


def chunks_received(group: Group) -> int:
    return sum(p.received_chunks for r in group.reductions.values() for p in r.progress.values())


def stop_after(group: Group, chunks: int) -> None:
    until = time.monotonic() + 20
    while chunks_received(group) < chunks:
        assert time.monotonic() < until
        time.sleep(0.0005)


def paced(transport: Transport) -> Transport:
    """Behind a link that cuts chunks into pieces: some have come when an attempt breaks off."""
    return ShapedTransport(transport, Link(2e7, 2e7))


@pytest.mark.parametrize("seed", range(16))
def test_an_attempt_that_resumes_gives_the_bytes_of_one_that_starts_anew(seed: int) -> None:
    random, group = Random(seed), memory_group(4)
    if seed % 4 == 0:
        group = wrapped(group, paced)
    contributions, stores = encoded(group, COUNT, "int8"), {name: PageStore() for name in names(4)}
    gone = random.choice([None, *names(4)])
    begin(group, named(group, names(4), "first"), contributions, stores)
    stop_after(group, random.randrange(90))
    group.reductions[gone or random.choice(names(4))].cancel()
    group.finish()
    members = [name for name in names(4) if name != gone]
    resumed = named(group, members, "second", resumes=True)
    begin(group, resumed, contributions, stores)
    found = finish(group)
    fresh = memory_group(4)
    anew = named(fresh, members, "anew", owners=(), spans=spans_by_bandwidth(COUNT, [1.0] * len(members)))
    begin(fresh, anew, contributions, {name: PageStore() for name in members})
    assert torch.equal(found, finish(fresh))


def test_after_a_late_loss_only_the_lost_span_and_the_means_travel_again() -> None:
    group = memory_group(4)
    contributions, stores = encoded(group, COUNT, "int8"), {name: PageStore() for name in names(4)}
    begin(group, named(group, names(4), "first"), contributions, stores)
    finish(group)
    vector = len(contributions["m00"])
    sent = {}
    for resumes in (True, False):
        begin(group, named(group, names(3), f"again {resumes}", resumes=resumes), contributions, stores)
        finish(group)
        sent[resumes] = sum(group.reductions[name].bytes_sent for name in names(3))
    assert sent[True] == pytest.approx(2.5 * vector, rel=0.02)  # (n - 2) (1 + 1/n)
    assert sent[False] == pytest.approx(4 * vector, rel=0.02)


def test_with_the_same_contributions_nothing_is_sent_that_all_hold() -> None:
    group = memory_group(4)
    contributions, stores = encoded(group, COUNT, "int8"), {name: PageStore() for name in names(4)}
    begin(group, named(group, names(4), "first"), contributions, stores)
    expected = finish(group).clone()
    begin(group, named(group, names(4), "second", resumes=True), contributions, stores)
    assert torch.equal(finish(group), expected)
    assert sum(reduction.bytes_sent for reduction in group.reductions.values()) < 4000


def test_one_that_has_lost_its_pages_asks_for_all_of_them() -> None:
    group = memory_group(4)
    contributions, stores = encoded(group, COUNT, "int8"), {name: PageStore() for name in names(4)}
    begin(group, named(group, names(4), "first"), contributions, stores)
    expected = finish(group).clone()
    stores["m02"].clear()
    begin(group, named(group, names(4), "second", resumes=True), contributions, stores)
    assert torch.equal(finish(group), expected)


def test_pages_of_another_name_are_never_used() -> None:
    group = memory_group(4)
    contributions, stores = encoded(group, COUNT, "int8"), {name: PageStore() for name in names(4)}
    begin(group, named(group, names(4), "first"), contributions, stores)
    finish(group)
    contributions["m01"] = contributions["m03"].clone()
    changed = {"names": ("of m00", "another", "of m02", "of m03"), "result_name": "another mean"}
    begin(group, named(group, names(4), "second", resumes=True, **changed), contributions, stores)
    found = finish(group)
    begin(group, named(group, names(4), "third"), contributions, stores)
    assert torch.equal(found, finish(group))


def test_a_store_that_was_cleared_keeps_nothing_of_attempts_before() -> None:
    store, page = PageStore(), torch.zeros(8, dtype=torch.uint8)
    age = store.age
    store.clear()
    store.keep("of m00", Span(0, PAGE), page, age=age)
    assert store.take("of m00") == []


@pytest.mark.parametrize(
    "raw", [b"1", pack_spans([Span(PAGE, 2 * PAGE), Span(0, PAGE)]), pack_spans([Span(0, 99 * PAGE)])]
)
def test_what_a_peer_says_it_lacks_is_checked(raw: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_spans(raw, 9 * PAGE)


@pytest.mark.parametrize("kind, head", [(LACKING, b""), (1, CHUNK_NUMBER.pack(0)), (LACKING, CHUNK_NUMBER.pack(5))])
def test_a_stream_that_does_not_say_first_what_is_lacking_ends_the_attempt(kind: int, head: bytes) -> None:
    group = memory_group(2)
    contributions = encoded(group, COUNT, "int8")
    plan = group.plan(COUNT, "int8", names=("a", "b"), result_name="mean", resumes=True)
    honest = Reduction(plan, contributions["m00"], group.transports["m00"], group.addresses, pages=PageStore())
    stream = group.transports["m01"].connect(group.addresses["m00"], plan.channel, timeout_s=5)
    stream.send(kind, head, bytes(7))
    with pytest.raises(ReduceFailed) as failed:
        honest.run()
    assert failed.value.hung_up == "m01"


def test_spans_are_joined_cut_and_left_out() -> None:
    assert joined([Span(4, 6), Span(0, 2), Span(2, 3)]) == [Span(0, 3), Span(4, 6)]
    assert overlap([Span(0, 3), Span(5, 9)], Span(2, 6)) == [Span(2, 3), Span(5, 6)]
    assert without(Span(0, 10), [Span(5, 7), Span(0, 2), Span(6, 8)]) == [Span(2, 5), Span(8, 10)]


def test_survivors_keep_their_spans_and_divide_those_of_the_lost() -> None:
    first = [(name, 1.0) for name in names(4)]
    before = spans_by_bandwidth(COUNT, [1.0] * 4)
    spans, owners = spans_after_losses(COUNT, first, ["m00", "m02", "m03"], [1.0] * 3)
    assert (spans[0], owners[0]) == (before[0], 0) and (spans[4], owners[4]) == (before[2], 1)
    assert owners == (0, 0, 1, 2, 1, 2) and spans[1].lo == before[1].lo and spans[3].hi == before[1].hi
