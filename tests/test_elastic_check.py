"""The simulator's judge: it works out anew from the records alone what a branch contains."""

from contextlib import nullcontext

import pytest
from records import GENESIS, contribution, record

from diloco.simulate.virtual.check import Checker, Violation

CALM = {"steady": set[str](), "calm": True}


def checker(*, fragments: int = 1) -> Checker:
    made = Checker(fragments)
    made.genesis(GENESIS.head.digest)
    return made


def test_progress_that_is_counted_twice():
    judge = checker()
    first = record(GENESIS, contribution("A", 0, 2))
    judge.appended("A", first, (), **CALM)
    with pytest.raises(Violation, match=r"I2: progress 0\.\.2 of A is counted twice in round 2"):
        judge.appended("A", record(GENESIS.after(first), contribution("A", 0, 2)), (), **CALM)


def test_progress_that_is_left_out():
    with pytest.raises(Violation, match=r"I3: progress 0\.\.1 of A is lost"):
        checker().appended("A", record(GENESIS, contribution("A", 1, 2)), (), **CALM)


def test_a_branch_out_of_nowhere():
    stray = record(GENESIS.after(record(GENESIS)))
    with pytest.raises(Violation, match="I1: B appended round 2 to a branch that nobody had"):
        checker().appended("B", stray, (), **CALM)


def test_fragments_out_of_turn():
    with pytest.raises(Violation, match="is of fragment 1, and 0 is due"):
        checker(fragments=2).appended("A", record(GENESIS, contribution("A", 0, 1, fragment=1)), (), **CALM)


@pytest.mark.parametrize(("island", "fragment"), [("B", 0), ("A", 1)])
def test_samples_are_used_twice_only_after_a_restart_or_a_fork(island, fragment):
    """By another island, or for another fragment, although the ledger says so."""
    judge = checker(fragments=1 + fragment)
    first = record(GENESIS, contribution("A", 0, 1, samples=((0, 8),)))
    judge.appended("A", first, (), **CALM)
    second = record(GENESIS.after(first), contribution(island, 0, 1, samples=((4, 12),), fragment=fragment))
    with pytest.raises(Violation, match=r"I5: samples \(\(4, 8\),\) are in two contributions, and nothing forked"):
        judge.appended("A", second, ((4, 8),), **CALM)


def test_samples_that_are_used_twice_must_be_on_the_books():
    judge = checker()
    judge.restarted = True  # only then, or after a fork, may it happen at all
    first = record(GENESIS, contribution("A", 0, 1, samples=((0, 8),)))
    judge.appended("A", first, (), **CALM)
    second = record(GENESIS.after(first), contribution("B", 0, 1, samples=((4, 12),)))
    judge.appended("A", second, ((4, 8),), **CALM)
    with pytest.raises(Violation, match="I5"):
        judge.appended("B", second, ((4, 7),), **CALM)


def test_two_records_of_a_round_are_never_right_after_the_latch():
    one, other = record(GENESIS, contribution("A", 0, 1)), record(GENESIS, contribution("B", 0, 1))
    judge = checker()
    judge.latch(GENESIS.head.digest)
    judge.appended("A", one, (), steady=set(), calm=False)
    judge.appended("B", other, (), steady=set(), calm=False, valid=False)  # it is in no history
    with pytest.raises(Violation, match="I1: B has another record of round 1 than A"):
        judge.appended("B", other, (), steady=set(), calm=False)


def test_two_latched_histories_are_never_right():
    judge = checker()
    judge.latch(GENESIS.head.digest)
    judge.latch(GENESIS.head.digest)
    with pytest.raises(Violation, match="I1: two latched histories"):
        judge.latch("f" * 64)


@pytest.mark.parametrize(
    ("steady", "calm", "fork"),
    [(name, False, False) for name in "ABC"] + [("B", True, True), ("C", True, True), ("D", True, False)],
)
def test_in_merge_a_fork_is_right_only_if_nobody_could_have_told(steady, calm, fork):
    """C has appended what A and B took part in; then A appends another."""
    judge = checker()
    one, other = contribution("A", 0, 1), contribution("B", 0, 1)
    judge.appended("C", record(GENESIS, one, other), (), steady={steady}, calm=calm)
    complaint = f"I1: A has a record of round 1, and {steady}, alive"
    with pytest.raises(Violation, match=complaint) if fork else nullcontext():
        judge.appended("A", record(GENESIS, one), (), steady={steady}, calm=calm)
