"""The driver on streams in memory: real threads, a real all-reduce, faults made by closing, cutting and lying."""

import errno
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from islands import NAMES, SMALL, TestIsland, agree, assert_agreed, at_round, introduce, stand_still, team, wait_for
from liars import Liar
from torch import Tensor

from diloco.bench.bare import DIGEST, VECTORS
from diloco.comm.reduce.allreduce import Reduction
from diloco.comm.transport.link import Link, Paths
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.messages import Begin, Collect, Done, Heartbeat, Message, Promise, Ready
from diloco.elastic.protocol.record import NO_BALLOT, Ballot, Head, Key, Offer, Proposal, Settings
from diloco.elastic.protocol.wire import encode_message
from diloco.elastic.runtime import driver, reducing
from diloco.elastic.runtime.fetching import check_contains, fetch_state
from diloco.elastic.runtime.reducing import Outcome, stall_after
from diloco.elastic.runtime.restoring import Origin
from diloco.elastic.runtime.work import PendingProgress, Progress, StepsDone, parts_of
from diloco.errors import MessageRefused


def divide(change: Callable[[str, str], None]) -> None:
    """A and B from C and D: cut, or heal."""
    for one in "AB":
        for other in "CD":
            change(one, other)
            change(other, one)


def contributions(island: TestIsland, of: TestIsland) -> list[tuple[int, int]]:
    mine = [
        (c.offer.lo, c.offer.hi)
        for record in island.session.records()
        for c in record.proposal.contributions
        if c.island == of.name and c.offer.incarnation == of.driver.node.incarnation
    ]
    assert all(one[1] == other[0] for one, other in pairwise(mine)), "no gap, nothing twice"
    return mine


def test_islands_agree_bit_by_bit_and_every_contribution_is_in_the_log():
    with team() as (_, islands):
        at_round(islands, 12)
        wait_for(lambda: all(contributions(islands[0], island) for island in islands), islands)
        agree(islands)
        assert float(islands[0].driver.replica.vectors["parameters"].abs().sum()) > 0
        for island in islands:
            assert contributions(islands[0], island)[0][0] == 0
            assert island.phases - contributions(islands[0], island)[-1][1] <= 1  # the last may still be on offer
            assert island.driver.last_outcome.seconds and island.driver.last_outcome.result is None, "memory of a round"
        assert islands[0].state.ledger.overlaps == ()


@pytest.mark.parametrize("victim", [0, 2])
def test_rounds_go_on_without_an_island_that_is_gone(victim):
    with team() as (network, islands):
        at_round(islands, 3)
        gone = islands.pop(victim)
        network.peers.pop(gone.name).close()  # nobody reaches it, and its streams break
        agree(islands, after=5)
        assert gone.name not in islands[0].state.roster
        for island in islands:
            contributions(islands[0], island)
        gone.close()


def test_an_island_that_runs_out_of_memory_in_a_round_takes_part_in_the_next(monkeypatch):
    run, failures = Reduction.run, iter([MemoryError("no room")])

    def run_out_once(reduction):
        for failure in failures:
            raise failure
        return run(reduction)

    monkeypatch.setattr(Reduction, "run", run_out_once)
    with team() as (_, islands):
        at_round(islands, 3)
        agree(islands)
        wait_for(lambda: not any(island.driver._attempts for island in islands), islands)
        for island in islands:
            contributions(islands[0], island)


def test_patience_doubles_with_every_stall_until_a_round_works():
    assert stall_after(5.0, None, 2) == 30.0
    assert stall_after(5.0, None, 2, 3) == 240.0
    last = Outcome("digest", seconds=10.0)
    assert (stall_after(5.0, last, 4), stall_after(5.0, last, 4, 1)) == (15.0, 30.0)


def test_a_first_deadline_that_is_too_short_is_found_out(monkeypatch):
    """Over a link on which a chunk takes longer than that. Each stall keeps the two apart for twice as many rounds."""
    monkeypatch.setattr(reducing, "FIRST_STALL_S", 0.04)
    monkeypatch.setattr(driver, "stall_after", lambda silence_s, *rest: stall_after(0.04, *rest))

    def slow(plain: Transport) -> Transport:
        return ShapedTransport(plain, Link(4e6, 4e6))

    with team(("A", "B"), shape=slow, pace_s=0.3) as (_, islands):
        records = islands[0].session.records
        wait_for(lambda: any(note.kind == "cut off" for island in islands for note in island.notes), islands)
        wait_for(lambda: any(len(record.proposal.contributions) == 2 for record in records()), islands)


def test_a_refusal_at_an_address_of_long_ago_is_no_evidence_that_its_owner_is_gone():
    with team(("A", "B"), silence_s=5.0) as (_, islands):
        views, mailbox = islands[0].driver.node.peers.views, islands[0].driver.mailbox
        at_round(islands, 2)
        islands[0].driver.know({"long gone": PeerAddress("long gone")})
        wait_for(lambda: "long gone" in mailbox._lines and mailbox._lines["long gone"]._failures > 1, islands)
        assert not views["long gone"].closed and "B" in mailbox.met
        islands[1].close()
        islands[1].driver.network.plain.close()
        wait_for(lambda: views["B"].closed, islands[:1])


def test_a_newcomer_fetches_from_several_and_contributes():
    with team() as (network, islands):
        at_round(islands, 3)
        transport = network.transport("E")
        addresses = {name: PeerAddress(name) for name in NAMES}
        snapshot = fetch_state(transport, "B", addresses, DIGEST, dict.fromkeys(VECTORS, SMALL.count))
        newcomer = TestIsland(transport, Origin(snapshot.state, snapshot.vectors()))
        islands.append(newcomer)
        introduce(islands)
        newcomer.start()
        wait_for(lambda: newcomer.contained > 3, islands)
        agree(islands)
        assert "E" in islands[0].state.roster
        assert contributions(islands[0], newcomer)[0][0] == 0


def test_the_head_of_a_ticket_must_be_in_the_history_that_is_given():
    with team() as (network, islands):
        at_round(islands, 3)
        earlier = islands[0].state.head
        at_round(islands, earlier.round + 2)
        transport, peer = network.transport("E"), PeerAddress("B")
        head = islands[1].state.head
        for contained in ((0, ""), (earlier.round, earlier.digest), (head.round, head.digest)):
            check_contains(transport, peer, contained, head)
        check_contains(transport, peer, (1, "e" * 64), head)  # of so long ago that nobody can tell
        for other in ((head.round, "e" * 64), (head.round + 1, "e" * 64)):
            with pytest.raises(MessageRefused, match="somebody has another history of this run"):
                check_contains(transport, peer, other, head)
        with pytest.raises(MessageRefused, match="another history"):
            check_contains(transport, peer, (earlier.round, earlier.digest), head._replace(digest="f" * 64))


def test_after_a_cut_all_agree_within_two_rounds():
    paths = Paths()
    # a round is longer than a catch-up, as it should be
    with team(pace_s=1.0, shape=lambda plain: ShapedTransport(plain, Link(), paths)) as (_, islands):
        at_round(islands, 2)
        divide(paths.cut)
        at_round(islands, 6)
        assert islands[0].state.head.digest != islands[3].state.head.digest
        divide(paths.heal)
        seen = [max(island.state.updates for island in islands)]
        wait_for(lambda: len({island.state.head for island in islands}) == 1, islands)
        seen.append(islands[0].state.updates)
        assert_agreed(islands)
        assert seen[1] - seen[0] <= 2, seen


def test_a_cut_network_trains_on_and_merges_with_late_contributions():
    paths = Paths()
    with team(pace_s=0.2, shape=lambda plain: ShapedTransport(plain, Link(), paths)) as (_, islands):
        at_round(islands, 3)
        divide(paths.cut)
        left, right = islands[:2], islands[2:]
        wait_for(lambda: left[0].state.head.round >= 12 and right[0].state.head.round >= 12, islands)
        assert left[0].state.head.digest != right[0].state.head.digest
        divide(paths.heal)
        wait_for(lambda: all(set(island.state.roster) == set(NAMES) for island in islands), islands)
        wait_for(lambda: all(work.mark == work.hi for work in (island.session.works[0] for island in islands)), islands)
        agree(islands)
        final = islands[0].state
        for island in islands:  # both sides' progress is on the one branch that is left
            assert island.phases - final.mark(island.name, 1, 0) <= 2
        assert final.ledger.overlaps != ()  # both sides trained on the same samples, and the ledger says so


def test_work_is_kept_for_another_branch_until_all_islands_contain_it():
    def kept(island: TestIsland) -> list[int]:
        return [piece.lo for piece in list(island.session.works[0].pieces)]

    paths = Paths()
    with team(pace_s=0.1, shape=lambda plain: ShapedTransport(plain, Link(), paths)) as (_, islands):
        wait_for(lambda: all(min(kept(island), default=0) > 3 for island in islands), islands)
        divide(paths.cut)
        wait_for(lambda: all(set(island.state.roster) != set(NAMES) for island in islands), islands)
        cut_at = [island.session.works[0].mark for island in islands]
        at_round(islands, max(island.state.head.round for island in islands) + 8)
        pairs = list(zip(islands, cut_at, strict=True))
        for island, mark in pairs:
            assert set(kept(island)) >= set(range(mark, island.session.works[0].mark)), "the other side may lead"
        divide(paths.heal)
        wait_for(lambda: all(min(kept(island), default=0) > mark for island, mark in pairs), islands)


def test_damaged_vectors_are_noticed_and_healed():
    with team() as (_, islands):
        at_round(islands, 2)
        with islands[2].driver.replica.reading() as vectors:
            vectors["parameters"][17] += 1.0
        wait_for(lambda: any(note.kind == "diverged" for note in islands[2].notes), islands)
        at_round(islands, max(island.state.head.round for island in islands) + 3)
        wait_for(lambda: not islands[2].driver.node.own.diverged, islands)
        stand_still(islands)
        # it counts as healed when its new vectors are here, which is just before they are in their place
        wait_for(lambda: len({island.driver.replica.digest() for island in islands}) == 1, islands)
        assert_agreed(islands)


def test_goodbye_is_not_waited_for():
    with team(silence_s=3.0) as (_, islands):
        at_round(islands, 3)
        leaver = islands.pop(1)
        leaver.stop()
        leaver.driver.leave()
        at_round(islands, max(island.state.head.round for island in islands) + 3)
        assert any(note.kind == "left" and note.peer == leaver.name for note in islands[0].notes)
        assert [note for note in islands[0].notes if note.kind == "lost" and note.peer == leaver.name] == []
        leaver.close()


def offering(offer: Offer) -> Callable[[Head, int], bytes]:
    return lambda head, term: encode_message(Ready(Key(head.round + 1, head.digest), term, (offer,)))


CANNOT_BE = "samples or steps that cannot be right"
LIES: dict[str, tuple[Callable[[Head, int], bytes], str]] = {
    "garbage": (lambda head, term: b"\xff\x00 not JSON", "garbage"),
    "another message": (lambda head, term: b'["Begin",[]]', "garbage"),
    "no number": (lambda head, term: b'["Goodbye",[NaN]]', "garbage"),
    "progress that is not its own mark": (offering(Offer(0, 5, 9, 10, ())), "which is not its mark"),
    "more samples than tokens": (offering(Offer(0, 0, 1, 10, ((0, 1000),))), CANNOT_BE),
    "samples twice": (offering(Offer(0, 0, 1, 10, ((0, 4), (2, 6)))), CANNOT_BE),
    "more steps than tokens": (offering(Offer(0, 0, 1, 10, (), steps=1000)), CANNOT_BE),
}


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES)
def test_a_peer_that_talks_nonsense_is_excluded_by_name(lie, reason):
    with team() as (network, islands):
        at_round(islands, 2)
        liar = Liar(network, islands)

        def excluded() -> bool:
            liar.say(lie(islands[0].state.head, islands[0].driver.node.own.promise.term))
            told = [note.text for note in islands[0].notes if note.kind == "excluded" and note.peer == "Z"]
            return any(reason in text for text in told)

        wait_for(excluded, islands)
        agree(islands, after=3)


def test_a_peer_that_only_sends_heartbeats_holds_nobody_up_for_long():
    with team() as (network, islands):
        at_round(islands, 2)
        liar = Liar(network, islands)

        def excluded() -> bool:
            liar.say(encode_message(Heartbeat(islands[0].state.head, NO_BALLOT, incarnation=1, sequence=1)))
            return any(note.kind == "excluded" and note.peer == "Z" for island in islands for note in island.notes)

        wait_for(excluded, islands)
        at_round(islands, max(island.state.head.round for island in islands) + 3)


OVER = Key(1, "e" * 64)
PROPOSAL = Proposal(OVER, -1, (), ("A", "Z"), (), (), Settings(lr=1.0, codec="int8"), 0)
STALE: dict[str, Callable[[Head], Message]] = {
    "a stale ballot": lambda head: Begin(OVER, Ballot(1, "Z", 0), PROPOSAL, ("A", "Z"), ()),
    "a stale term": lambda head: Collect(Head(0, 0, "e" * 64), 1),
    "a foreign round": lambda head: Promise(Key(99, "c" * 64), 7, 1, 0, None),
    "a foreign ballot": lambda head: Done(Key(head.round + 1, head.digest), NO_BALLOT, "d" * 64),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "a stale ballot" else [pytest.mark.soak]) for kind in STALE]
)
def test_a_few_stale_messages_change_nothing_and_a_stream_of_them_is_excluded(kind):
    with team(silence_s=5.0) as (network, islands):
        at_round(islands, 2)
        liar = Liar(network, islands)

        def excluded() -> bool:
            return any(note.peer == "Z" and "of other rounds" in note.text for note in islands[0].notes)

        def keeps_on(times: int = 20) -> bool:
            for _ in range(times):  # a machine that is busy must not make a few of many
                liar.say(encode_message(STALE[kind](islands[0].state.head)))
            return excluded()

        for _ in range(5):
            assert not keeps_on(1)
        at_round(islands, max(island.state.head.round for island in islands) + 2)
        assert not excluded()
        wait_for(keeps_on, islands, pause_s=0.001)
        agree(islands, after=3)


def test_a_driver_that_dies_is_noticed_by_its_trainer():
    with team(("A",)) as (_, islands):
        at_round(islands, 1)

        def fail(now: float) -> list[object]:
            raise ZeroDivisionError("a bug")

        islands[0].driver.post(fail)  # type: ignore[arg-type]
        wait_for(lambda: islands[0].error is not None, [])
        assert "ZeroDivisionError" in str(islands[0].error)
        islands[0].error = None


def as_bytes(progress: Progress, hi: int) -> Tensor:
    return torch.cat(list(parts_of(progress))).view(torch.uint8)


def test_work_that_another_branch_lacks_is_owed_again():
    work = PendingProgress(0, 1, as_bytes, lambda raw: raw.view(torch.float32))
    one, two, nothing = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.zeros(2)
    offer = work.cut(one, StepsDone(5, ((0, 4),)))()
    assert (offer.lo, offer.hi, offer.tokens) == (0, 1, 5)
    assert work.rebase(1) is None and work.mark == work.hi  # contained
    work.cut(two, StepsDone(7, ((4, 8),)))()
    assert work.rebase(1)(0, 2).tolist() == [10.0, 20.0]  # not contained
    assert work.rebase(2) is None
    assert work.rebase(0)(0, 2).tolist() == [11.0, 22.0] and work.used(0) == ((0, 8),)  # a branch that has neither
    late = work.cut(nothing, StepsDone(0, ()))()
    assert (late.lo, late.hi, late.tokens, late.late) == (0, 2, 12, True)
    assert work.payload(late).view(torch.float32).tolist() == [11.0, 22.0]
    smaller = work.cut(nothing, StepsDone(0, ()), usual_norm=late.norm / 4)()
    assert smaller.norm == pytest.approx(late.norm / 2)
    assert work.payload(smaller).view(torch.float32).tolist() == pytest.approx([5.5, 11.0])
    assert work.rebase(1)(0, 2).tolist() == [10.0, 20.0]  # a branch that has the first only
    again = work.cut(nothing, StepsDone(0, ()))()
    assert (again.lo, again.hi) == (1, 2)


def test_offers_tell_the_mean_loss_of_the_steps_behind_them():
    work = PendingProgress(0, 1, as_bytes, lambda raw: raw.view(torch.float32))
    ones = torch.ones(2)
    assert work.cut(ones, StepsDone(8, ((0, 4),), 3, 2.0))().loss == 2.0
    assert work.cut(ones, StepsDone(8, ((4, 8),), 1, 6.0))().loss == 3.0
    assert work.cut(ones, StepsDone(8, ((8, 12),), 5))().loss == 3.0, "of those steps it is not known"


def test_with_error_feedback_late_pieces_are_joined_and_what_that_loses_comes_with_the_next():
    """Whole numbers only are sent: halves are lost, unless they come later."""
    residual, count = torch.zeros(2), 2

    def whole(progress: Progress, hi: int) -> Tensor:
        return torch.cat(list(parts_of(progress))).floor().view(torch.uint8)

    def encode(vector: Tensor, hi: int) -> Tensor:
        payload = whole(vector + residual, hi)
        residual.add_(vector - decode(payload))
        return payload

    def decode(payload: Tensor) -> Tensor:
        return payload.view(torch.float32)

    work = PendingProgress(0, 1, encode, decode, join=whole, on_loss=residual.add_)
    for number in range(3):
        work.cut(torch.tensor([0.5, 3.0]), StepsDone(5, ((number, number + 1),)))()
        work.rebase(0)  # rounds of the others
    late = work.cut(torch.zeros(count), StepsDone(0, ()), usual_norm=1.0)()
    assert (late.lo, late.hi) == (0, 2) and late.norm == 1.0
    sent = decode(work.payload(late))
    assert residual.tolist() == [0.5, 0.0], "as long as nothing contains it, nothing is lost"
    work.rebase(2)
    # of (1, 6), scaled to norm 2, (0, 1) was sent
    scaled = torch.tensor([1.0, 6.0]) * 2 / 37**0.5
    assert sent.tolist() == [0.0, 1.0] and torch.allclose(residual, torch.tensor([0.5, 0.0]) + scaled - sent)
    work.rebase(3)
    assert torch.allclose(residual, torch.tensor([0.5, 0.0]) + scaled - sent), "a single piece was fed back at once"


def test_progress_beyond_the_memory_goes_to_disk_until_nothing_can_undo_it(tmp_path):
    work = PendingProgress(
        0, 1, as_bytes, lambda raw: raw.view(torch.float32),
        keep_bytes=8, spill=tmp_path / "spilled",
    )  # fmt: skip
    for number in range(1, 4):
        work.cut(torch.tensor([float(number), 0.0]), StepsDone(5, ((number, number + 1),)))()
        assert work.rebase(number) is None  # contained
    assert len(list((tmp_path / "spilled").iterdir())) == 2  # of three pieces of 8 bytes
    assert work.rebase(0)(0, 2).tolist() == [6.0, 0.0]  # a branch that has none of them
    assert work.rebase(3, settled=3) is None
    assert work.pieces == [] and list((tmp_path / "spilled").iterdir()) == []


def test_a_file_of_progress_is_removed_by_whoever_writes_files(tmp_path):
    jobs = []
    work = PendingProgress(
        0, 1, as_bytes, lambda raw: raw.view(torch.float32),
        keep_bytes=0, spill=tmp_path / "spilled", later=jobs.append,
    )  # fmt: skip
    for number in range(1, 3):
        work.cut(torch.tensor([float(number), 0.0]), StepsDone(5, ((number, number + 1),)))()
        work.rebase(number)
    jobs.pop(0)()
    work.rebase(2, settled=2)
    assert work.pieces == [] and len(list((tmp_path / "spilled").iterdir())) == 1, "the trainer removes nothing"
    for job in jobs:
        job()
    assert list((tmp_path / "spilled").iterdir()) == [], "and what was let go meanwhile was never written"


def test_files_of_progress_leave_most_of_the_disk_to_others(tmp_path, monkeypatch):
    free = {"bytes": 1000}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free["bytes"]))
    work = PendingProgress(
        0, 1, as_bytes, lambda raw: raw.view(torch.float32),
        keep_bytes=0, spill=tmp_path / "spilled",
    )  # fmt: skip
    for number in range(1, 9):
        if number == 5:
            free["bytes"] = 8 * 8  # a quarter of it has room for two pieces
        work.cut(torch.tensor([float(number), 0.0]), StepsDone(5, ((number, number + 1),)))()
        work.rebase(number)
    assert [piece.hi for piece in work.pieces] == [7, 8] and len(list((tmp_path / "spilled").iterdir())) == 2


def test_what_a_full_disk_has_taken_of_a_piece_is_removed_and_the_piece_forgotten(tmp_path, monkeypatch):
    def full(path: Path, data: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    work = PendingProgress(
        0, 1, as_bytes, lambda raw: raw.view(torch.float32),
        keep_bytes=0, spill=tmp_path / "spilled",
    )  # fmt: skip
    for number in range(1, 3):
        work.cut(torch.tensor([float(number), 0.0]), StepsDone(5, ((number, number + 1),)))()
        work.rebase(number)
    assert [piece.hi for piece in work.pieces] == [2] and list((tmp_path / "spilled").iterdir()) == []
