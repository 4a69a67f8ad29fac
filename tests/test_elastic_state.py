"""What follows from records: marks, leases, the head. A record that cannot follow is refused whole."""

import pytest
from records import GENESIS, contribution, record

from diloco.elastic.protocol.record import Grant, Record, Settings
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
    used, grants = contribution("A", 0, 1, samples=((0, 4),)), (Grant("A#1", ((8, 10),)),)
    second = first.after(record(first, used, releases=("B#1",), grants=grants))
    assert second.ledger.lease_of("A#1") == ((4, 10),)
    assert second.ledger.free == ((10, 16),)


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
