"""What follows from records: marks, leases, the head. A record that cannot follow is refused whole."""

from dataclasses import replace

import pytest
from records import GENESIS, contribution, record
from tape import key_file, load_key

from diloco.elastic.protocol.record import Amendment, Grant, Latch, Record, Settings
from diloco.errors import RecordInvalid


def test_a_record_moves_head_marks_clock_and_roster():
    state = GENESIS.after(record(GENESIS, contribution("A", 0, 3), step=50, roster=("A",)))
    assert state.head[:2] == (10, 1) and state.roster == ("A",) and state.step == 50 and state.updates == 1
    assert state.mark("A", 1, 0) == 3
    assert state.mark("A", 2, 0) == 0 and state.mark("A", 1, 1) == 0, "marks are of one life and one fragment"
    assert GENESIS.mark("A", 1, 0) == 0


def test_progress_is_contained_once_and_without_gaps():
    state = GENESIS.after(record(GENESIS, contribution("A", 0, 3)))
    for lo, hi in ((0, 3), (0, 5), (2, 5), (4, 5), (3, 3)):
        with pytest.raises(RecordInvalid):
            state.after(record(state, contribution("A", lo, hi)))
    assert state.after(record(state, contribution("A", 3, 5))).mark("A", 1, 0) == 5


def test_a_record_follows_its_parent_only():
    one = GENESIS.after(record(GENESIS, contribution("A", 0, 1)))
    other = GENESIS.after(record(GENESIS, contribution("B", 0, 1)))
    assert one.head.round == other.head.round and one.key != other.key
    with pytest.raises(RecordInvalid):
        one.after(record(other, contribution("A", 1, 2)))


def test_leases_follow_consume_release_and_grant():
    first = GENESIS.after(record(GENESIS, grants=(Grant("A#1", ((0, 8),)), Grant("B#1", ((8, 16),)))))
    used, grants = contribution("A", 0, 1, samples=((0, 4),)), (Grant("A#1", ((16, 18),)),)
    second = first.after(record(first, used, releases=("B#1",), grants=grants))
    assert second.ledger.lease_of("A#1") == ((4, 8), (16, 18))
    assert second.ledger.lost == (("B#1", ((8, 16),)),)


def test_marks_of_a_life_that_is_over_are_pruned():
    """So a state does not grow with the number of lives; what those lives still offer is refused."""
    state = GENESIS.after(record(GENESIS, contribution("A", 0, 3), contribution("B", 0, 1)))
    state = state.after(record(state, contribution("A", 0, 2, incarnation=2)))
    assert [mark for mark, _ in state.marks] == [("A", 2, 0), ("B", 1, 0)]
    assert not state.fits("A", contribution("A", 0, 1).offer) and not state.fits("A", contribution("A", 3, 4).offer)
    with pytest.raises(RecordInvalid, match="not its mark"):
        state.after(record(state, contribution("A", 0, 1)))


def test_late_work_of_an_old_life_counts_until_a_later_one_is_contained():
    state = GENESIS.after(record(GENESIS, contribution("A", 0, 3)))
    state = state.after(record(state, contribution("A", 3, 4)))
    assert state.mark("A", 1, 0) == 4 and state.fits("A", contribution("A", 0, 1, incarnation=2).offer)


def test_absence_is_counted_in_a_row_and_forgotten_with_an_answer():
    state = GENESIS
    for answered, absent in (
        (("A",), (("B", 1),)),
        (("A",), (("B", 2),)),
        (("A", "B"), ()),
        ((), (("A", 1), ("B", 1))),
    ):
        state = state.after(record(state, answered=answered))
        assert state.absent == absent
    assert state.after(record(state, roster=("A",), answered=())).absent == (("A", 2),), "who left is not counted"


OWNER, OTHER = load_key(key_file(1)), load_key(key_file(2))


def test_a_latch_is_the_owners_and_names_one_head():
    latch = Latch.sign(OWNER, GENESIS.head)
    owner = OWNER.public_key.hex()
    assert latch.is_by(owner) and not latch.is_by(OTHER.public_key.hex()) and not latch.is_by("no key")
    assert not replace(latch, head=GENESIS.head._replace(round=1)).is_by(owner)
    assert not Latch(latch.head, "zz").is_by(owner)
    amended = Amendment.sign(OWNER, 1, str(list(GENESIS.head)))
    assert not Latch(latch.head, amended.signature).is_by(owner), "what is signed for one purpose is not for another"


def test_a_latch_enters_the_state_by_a_record_once():
    owned = replace(GENESIS, owner=OWNER.public_key.hex())
    latch = Latch.sign(OWNER, owned.head)
    state = owned.after(record(owned, latch=latch))
    assert state.latch == owned.head.digest and state.after(record(state)).latch == state.latch
    for before, wrong in ((state, Latch.sign(OWNER, state.head)), (owned, Latch.sign(OTHER, owned.head))):
        with pytest.raises(RecordInvalid, match="not the owner's demand"):
            before.after(record(before, latch=wrong))


def test_a_grant_out_of_turn_is_refused():
    with pytest.raises(RecordInvalid, match="not next in line"):
        GENESIS.after(record(GENESIS, grants=(Grant("A#1", ((4, 8),)),)))


def test_heavier_branches_are_greater():
    light = GENESIS.after(record(GENESIS, contribution("A", 0, 1)))
    heavy = GENESIS.after(record(GENESIS, contribution("A", 0, 1), contribution("B", 0, 1)))
    longer = light.after(record(light))
    assert light.head < longer.head < heavy.head


def test_the_digest_covers_every_field_and_the_payload():
    base = record(GENESIS, contribution("A", 0, 1))
    others = [
        record(GENESIS, contribution("A", 0, 2)),
        record(GENESIS, contribution("A", 0, 1), settings=Settings(lr=0.1)),
        record(GENESIS, contribution("A", 0, 1), step=1),
        Record(base.proposal, "f" * 64),
    ]
    assert len({each.digest for each in [base, *others]}) == 5
    assert base.digest == record(GENESIS, contribution("A", 0, 1)).digest
