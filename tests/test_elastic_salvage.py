"""A member is lost late in an exchange: its contribution counts, but for pages whose bytes never left it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden import digest
from records import GENESIS, contribution, record
from torch import Tensor

from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.reduce.allreduce import CHUNK_NUMBER, RESULT
from diloco.comm.reduce.pages import PageStore
from diloco.comm.transport.link import Link
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Stream, Transport
from diloco.elastic.protocol.messages import Begin, Received
from diloco.elastic.protocol.ranges import minus, normal, size
from diloco.elastic.protocol.record import Ballot, Contribution, Hole, Key, Offer, Proposal, Settings
from diloco.elastic.protocol.salvage import attempt_with
from diloco.elastic.runtime.reducing import Attempt, Outcome, plan_of, reduction_of
from diloco.elastic.runtime.work import PendingProgress, Progress, StepsDone, parts_of
from diloco.errors import PeerLost, PlanRefused, RecordInvalid

MEMBERS = ("a", "b", "c", "d")
WEIGHTS = (1, 2, 3, 4)
LOST = "c"
COUNT = 80 * PAGE + 123
CODEC = CODECS["int8"]


def begin(members: tuple[str, ...] = MEMBERS) -> Begin:
    key = Key(1, "p" * 64)
    parts = tuple(
        Contribution(member, Offer(0, 0, 1, weight, (), norm=COUNT), weight)
        for member, weight in zip(MEMBERS, WEIGHTS, strict=True)
        if member in members
    )
    proposal = Proposal(key, 0, parts, MEMBERS, (), (), Settings(codec="int8"), 1)
    return Begin(key, Ballot(1, "a", 0), proposal, members, (0,) * len(members))


def encoded(member: str) -> Tensor:
    vector = torch.randn(COUNT, generator=torch.Generator().manual_seed(ord(member)))
    return CODEC.encode(vector, NoiseKey(1, 0, member))


class Stuck:
    """A transport on which the last mean of its member never leaves: there is always a hole."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.lost = inner, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def connect(self, *args: Any, **options: Any) -> Stream:
        stream = self.inner.connect(*args, **options)
        send = stream.send

        def send_but_the_last_mean(kind: int, head: bytes, payload: Any) -> None:
            if kind == RESULT and head == CHUNK_NUMBER.pack(CHUNKS - 1):
                self.lost.wait()
                raise PeerLost("lost")
            send(kind, head, payload)

        stream.send = send_but_the_last_mean  # type: ignore[method-assign, assignment]
        return stream


class Exchange:
    """Real all-reduces of four members over links that take a while, and what each keeps of them."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        bare = {name: network.transport(name) for name in MEMBERS}
        self.addresses = {name: transport.address() for name, transport in bare.items()}
        self.transports: dict[str, Transport] = {
            name: ShapedTransport(transport, Link(4e7, 4e7)) for name, transport in bare.items()
        }
        self.pages = {name: PageStore() for name in MEMBERS}

    def start(self, asked: Begin) -> dict[str, tuple[Attempt, list[Outcome]]]:
        attempts = {}
        for name in asked.members:
            ended: list[Outcome] = []
            reduction = reduction_of(
                asked, encoded(name), COUNT, self.transports[name], self.addresses, self.pages[name]
            )
            attempts[name] = Attempt(asked, reduction, lambda _, outcome, ended=ended: ended.append(outcome)), ended
        return attempts

    def lose(self, asked: Begin, chunks: int) -> dict[str, tuple[Received, ...]]:
        """Lose a member when it has so many chunks and the others all of its contribution; return what they report."""
        stuck = self.transports[LOST] = Stuck(self.transports[LOST])
        attempts = self.start(asked)
        lost = attempts.pop(LOST)
        until = time.monotonic() + 60
        while lost[0].received < chunks or any(
            attempt.reduction.level.progress[LOST].received_chunks < CHUNKS for attempt, _ in attempts.values()
        ):
            assert time.monotonic() < until
            time.sleep(0.001)
        lost[0].cancel()
        stuck.lost.set()
        return {name: outcome.kept for name, outcome in self.ends(attempts).items()}

    @staticmethod
    def ends(attempts: dict[str, tuple[Attempt, list[Outcome]]]) -> dict[str, Outcome]:
        until = time.monotonic() + 60
        while not all(ended for _, ended in attempts.values()):
            assert time.monotonic() < until
            time.sleep(0.001)
        return {name: ended[0] for name, (_, ended) in attempts.items()}


def anew(members: tuple[str, ...]) -> Tensor:
    network, asked = MemoryNetwork(), begin(members)
    transports = {name: network.transport(name) for name in members}
    addresses = {name: transport.address() for name, transport in transports.items()}

    def take_part(name: str) -> Tensor:
        return reduction_of(asked, encoded(name), COUNT, transports[name], addresses).run()

    with ThreadPoolExecutor(len(members)) as pool:
        return next(iter(pool.map(take_part, members)))


def result_of(rest: Begin, exchange: Exchange) -> dict[str, Outcome]:
    """Run the next attempt; what it gives counts the lost member everywhere but in the hole."""
    hole = rest.proposal.hole
    assert hole is not None and rest.members == ("a", "b", "d") and rest.proposal.islands == MEMBERS
    outcomes = exchange.ends(exchange.start(replace(rest, ballot=Ballot(1, "a", 1))))
    assert len({outcome.payload for outcome in outcomes.values()} - {""}) == 1, outcomes
    found, whole, others = outcomes["a"].result, anew(MEMBERS), anew(rest.members)
    assert found is not None and outcomes["a"].payload.startswith(digest(found)), "also where it was hashed as it came"
    page = CODEC.size(PAGE)
    for number in range(-(-COUNT // PAGE)):
        expected = whole if minus(((number, number + 1),), hole.pages) else others
        part = slice(number * page, (number + 1) * page)
        assert torch.equal(found[part], expected[part]), number
    return outcomes


CHUNKS = len(plan_of(begin(), COUNT).chunks(2))  # of each member
LATE = 3 * CHUNKS + 4  # all contributions, and some means


def test_the_next_attempt_counts_the_lost_member_and_sends_little():
    exchange = Exchange()
    rest = attempt_with(begin(), LOST, exchange.lose(begin(), LATE), ())
    assert rest is not None and rest.proposal.hole is not None and 0 < size(rest.proposal.hole.pages) <= 21
    sent = sum(outcome.bytes_sent for outcome in result_of(rest, exchange).values())
    assert sent < 0.6 * 6 * len(encoded("a"))


def test_means_that_an_earlier_attempt_has_left_in_the_hole_are_not_used():
    exchange = Exchange()
    reported = exchange.lose(begin(), LATE)
    assert any(report.means for each in reported.values() for report in each if report.peer == LOST)
    forgotten = {
        name: tuple(replace(report, means=()) if report.peer == LOST else report for report in each)
        for name, each in reported.items()
    }
    rest = attempt_with(begin(), LOST, forgotten, ())
    assert rest is not None and rest.proposal.hole is not None and size(rest.proposal.hole.pages) >= 20
    result_of(rest, exchange)


@pytest.mark.parametrize("name", ["a", "b", "d"])
def test_a_member_that_has_no_page_of_the_lost_one_ends_the_attempt(name):
    exchange = Exchange()
    rest = attempt_with(begin(), LOST, exchange.lose(begin(), LATE), ())
    assert rest is not None
    exchange.pages[name] = PageStore()
    attempts = exchange.start(replace(rest, ballot=Ballot(1, "a", 1)))
    assert "pages of c are not here any more" in exchange.ends({name: attempts[name]})[name].reason
    for attempt, _ in attempts.values():
        attempt.cancel()
    assert not any(outcome.payload for outcome in exchange.ends(attempts).values())


def reports(*means: tuple[int, int], whole: bool = True) -> dict[str, tuple[Received, ...]]:
    """What a, b and d have of the pages 40 to 60 that c was to reduce, of 80."""
    names = [name for name in MEMBERS if name != LOST]
    rest = tuple(
        Received(name, ((20 * at, 20 * at + 20),), (), whole=True) for at, name in enumerate(MEMBERS) if at != 2
    )
    return {
        name: (*rest, Received(LOST, ((40, 60),), normal([had]), whole))
        for name, had in zip(names, means, strict=True)
    }  # fmt: skip


def test_pages_go_to_those_who_have_their_mean_and_the_hole_to_all():
    rest = attempt_with(begin(), LOST, reports((40, 50), (40, 48), (40, 40)), ())
    assert rest is not None and rest.proposal.hole == Hole(LOST, ((50, 60),))
    assert normal((lo, hi) for lo, hi, _ in rest.owners) == ((40, 60),)
    owners = {page: place for lo, hi, place in rest.owners for page in range(lo, hi)}
    assert {owners[page] for page in range(40, 48)} == {0, 1} and {owners[page] for page in (48, 49)} == {0}
    assert {owners[page] for page in range(50, 60)} == {0, 1, 2}
    assert rest.first == tuple((member, 0) for member in MEMBERS)


def test_one_that_has_the_whole_result_has_every_page():
    kept = reports((40, 50), (40, 48), (40, 40))
    rest = attempt_with(begin(), LOST, {name: kept[name] for name in ("a", "b")}, {"d"})
    assert rest is not None and rest.proposal.hole == Hole(LOST, ())
    assert {place for lo, hi, place in rest.owners if lo >= 50} == {2}


@pytest.mark.parametrize(
    "kept",
    [
        reports((40, 50), (40, 48), (40, 40), whole=False),
        {name: report for name, report in reports((40, 50), (40, 48), (40, 40)).items() if name != "b"},
        {**reports((40, 50), (40, 48), (40, 40)), "b": ()},
        {**reports((40, 50), (40, 48), (40, 40)), "b": (Received(LOST, ((40, 61),), (), whole=True),)},
        {**reports((40, 50), (40, 48), (40, 40)), "b": (Received(LOST, ((40, 60),), ((50, 40),), whole=True),)},
        {},
    ],
)
def test_without_all_reports_or_with_wrong_ones_the_contribution_is_dropped(kept: dict[str, tuple[Received, ...]]):
    assert attempt_with(begin(), LOST, kept, ()) is None


def test_a_hole_of_more_than_two_nths_is_not_worth_it():
    large = {
        name: (Received(name, ((0, 10),), (), whole=True), Received(LOST, ((40, 90),), (), whole=True))
        for name in "abd"
    }
    assert attempt_with(begin(), LOST, large, ()) is None


def test_a_plan_whose_hole_cannot_be_right_is_refused():
    rest = attempt_with(begin(), LOST, reports((40, 50), (40, 48), (40, 40)), ())
    assert rest is not None
    for wrong in (
        replace(rest, owners=rest.owners[:-1]),
        replace(rest, owners=((0, 20, 0), *rest.owners)),
        replace(rest, first=rest.first[:-1]),
        replace(rest, proposal=replace(rest.proposal, hole=Hole(LOST, ((0, 80),)))),
        replace(rest, proposal=replace(rest.proposal, hole=Hole("e", ((50, 60),)))),
        replace(rest, proposal=replace(rest.proposal, hole=Hole(LOST, ((0, 10),)))),
    ):
        with pytest.raises(PlanRefused):
            plan_of(wrong, COUNT)


def test_a_state_keeps_a_hole_until_the_next_contribution_covers_it():
    both = contribution("A", 0, 1), contribution("B", 0, 1)
    state = GENESIS.after(record(GENESIS, *both, hole=Hole("B", ((2, 3),))))
    assert state.hole("B", 1, 0) == (0, ((2, 3),)) and state.hole("A", 1, 0) == (0, ())
    assert state.mark("B", 1, 0) == 1, "it counts as contained"
    state = state.after(record(state, contribution("A", 1, 2)))
    assert state.holes
    assert not state.after(record(state, contribution("B", 1, 2))).holes
    assert not state.after(record(state, contribution("B", 0, 1, incarnation=2))).holes, "that life is over"
    assert not GENESIS.after(record(GENESIS, *both, hole=Hole("B", ()))).holes
    for wrong in (Hole("C", ((2, 3),)), Hole("B", ((3, 2),))):
        with pytest.raises(RecordInvalid):
            GENESIS.after(record(GENESIS, *both, hole=wrong))
    with pytest.raises(RecordInvalid):
        GENESIS.after(record(GENESIS, both[1], hole=Hole("B", ((2, 3),))))


def as_bytes(progress: Progress, hi: int) -> Tensor:
    return torch.cat(list(parts_of(progress))).view(torch.uint8)


def progress() -> PendingProgress:
    return PendingProgress(0, 1, as_bytes, lambda raw: raw.view(torch.float32))


def test_what_did_not_count_comes_with_the_next_piece():
    work, ones = progress(), torch.ones(3 * PAGE)
    in_hole = torch.zeros(3 * PAGE)
    in_hole[PAGE : 2 * PAGE] = 1.0
    work.cut(ones, StepsDone(5, ((0, 4),)))()
    owed = work.rebase(1, hole=(0, ((1, 2),)), settled=1)
    assert owed is not None and torch.equal(owed(0, 3 * PAGE), in_hole), "the island's parameters keep it"
    offer = work.cut(ones, StepsDone(5, ((4, 8),)))()
    assert torch.equal(work.payload(offer).view(torch.float32), ones + in_hole)
    assert work.rebase(2, settled=2) is None, "and now it is contained"


def test_what_did_not_count_comes_with_the_next_contribution_although_more_is_owed():
    """A state keeps the hole until then, and an offer has the two oldest pieces."""
    work, ones = progress(), torch.ones(3 * PAGE)
    in_hole = torch.zeros(3 * PAGE)
    in_hole[PAGE : 2 * PAGE] = 2.0
    for number in range(4):
        work.cut(ones, StepsDone(5, ((4 * number, 4 * number + 4),)))()
    owed = work.rebase(2, hole=(0, ((1, 2),)), settled=2)
    assert owed is not None and torch.equal(owed(0, 3 * PAGE), 2 * ones + in_hole)
    offer = work.cut(ones, StepsDone(5, ((16, 20),)))()
    assert (offer.lo, offer.hi) == (2, 4)
    assert torch.equal(work.payload(offer).view(torch.float32), 2 * ones + in_hole)
    owed = work.rebase(4, settled=4)
    assert owed is not None and torch.equal(owed(0, 3 * PAGE), ones)


def test_of_joined_pieces_what_was_offered_is_carried():
    work, ones = progress(), torch.ones(3 * PAGE)
    work.cut(ones, StepsDone(5, ((0, 4),)))()
    work.cut(ones, StepsDone(5, ((4, 8),)), usual_norm=0.1)()  # 0..2, scaled to a norm of 0.2
    again = progress()
    again.restore(work.facts(), work.payloads())
    for each in (work, again):
        owed = each.rebase(2, hole=(0, ((1, 2),)))
        assert owed is not None
        assert float(torch.linalg.vector_norm(owed(0, 3 * PAGE))) == pytest.approx(0.2 / 3**0.5, rel=1e-3)


def test_what_did_not_count_survives_a_save():
    work, ones = progress(), torch.ones(3 * PAGE)
    work.cut(ones, StepsDone(5, ((0, 4),)))()
    before = work.rebase(1, hole=(0, ((1, 2),)))
    again = progress()
    again.restore(work.facts(), work.payloads())
    owed = again.rebase(1)
    assert before is not None and owed is not None and torch.equal(owed(0, 3 * PAGE), before(0, 3 * PAGE))


def test_what_did_not_count_is_not_carried_to_a_branch_without_it():
    work, ones = progress(), torch.ones(3 * PAGE)
    work.cut(ones, StepsDone(5, ((0, 4),)))()
    work.rebase(1, hole=(0, ((1, 2),)))
    owed = work.rebase(0)
    assert owed is not None and torch.equal(owed(0, 3 * PAGE), ones), "there all of it is owed"
