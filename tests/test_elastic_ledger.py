"""The ledger against plain sets: every position is free, lost, leased once, consumed, or not handed out yet."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ranges import positions

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.ranges import first, minus, normal, size

HOLDERS = ("A#1", "B#1", "B#2")
LIMIT, EPOCH = 60, 25
holders = st.sampled_from(HOLDERS)
ends = st.integers(0, LIMIT + 5)
some_ranges = st.lists(st.tuples(ends, ends), max_size=3).map(normal)


class Books(RuleBasedStateMachine):
    """The same operations on a ledger and on sets."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(EPOCH, limit=LIMIT)
        self.leased = {holder: set() for holder in HOLDERS}
        self.lost = {holder: set() for holder in HOLDERS}
        self.consumed, self.twice = set(), set()

    @rule(holder=holders, count=st.integers(0, 20))
    def grant(self, holder, count):
        ledger, mine, others = self.ledger, sorted(self.lost[holder]), set().union(*self.lost.values())
        epoch_end = -(-ledger.next // EPOCH) * EPOCH
        fresh = range(ledger.next, min(LIMIT, epoch_end))
        used = sorted((positions(ledger.free) | others) - set(mine))
        later = range(epoch_end, LIMIT)
        expected = set([*mine, *fresh, *used, *later][:count])
        self.ledger, granted = ledger.grant(holder, count)
        assert positions(granted) == expected
        self.leased[holder] |= expected
        for lost in self.lost.values():
            lost -= expected

    @rule(holder=holders, count=st.integers(1, 20))
    def consume_own(self, holder, count):
        self.consume(holder, first(self.ledger.lease_of(holder), count))

    @rule(holder=holders, ranges=some_ranges)
    def consume_what_another_branch_leased(self, holder, ranges):
        self.consume(holder, ranges)

    def consume(self, holder, ranges):
        self.ledger = self.ledger.consume(holder, ranges)
        self.twice |= positions(ranges) & self.consumed
        self.consumed |= positions(ranges)
        for lease in (*self.leased.values(), *self.lost.values()):
            lease -= positions(ranges)

    @rule(holder=holders)
    @precondition(lambda self: self.ledger.leases)
    def release(self, holder):
        self.ledger = self.ledger.release(holder)
        self.lost[holder] |= self.leased[holder]
        self.leased[holder].clear()

    @invariant()
    def every_position_is_in_one_place(self):
        ledger = self.ledger
        assert {holder: positions(ledger.lease_of(holder)) for holder in HOLDERS} == self.leased
        assert {holder: positions(lost) for holder, lost in ledger.lost} == {h: s for h, s in self.lost.items() if s}
        parts = [positions(ledger.free), *self.leased.values(), *self.lost.values(), self.consumed]
        assert sum(map(len, parts)) == len(set().union(*parts)) == ledger.next
        assert ledger.next - size(ledger.unconsumed) == len(self.consumed)
        assert positions(ledger.overlaps) == self.twice
        assert [holder for holder, _ in ledger.leases] == sorted(holder for holder in HOLDERS if self.leased[holder])


TestBooks = Books.TestCase


def test_leases_of_the_lost_come_last_in_their_epoch():
    ledger, _ = Ledger(epoch=20).grant("A#1", 8)
    ledger = ledger.consume("A#1", ((0, 3),)).release("A#1")
    ledger, fresh = ledger.grant("B#1", 6)
    assert fresh == ((8, 14),), "A may come back"
    ledger, rest = ledger.grant("B#1", 8)
    assert rest == ((3, 5), (14, 20)), "nothing fresh is left in this epoch"
    assert ledger.grant("B#1", 5)[1] == ((5, 8), (20, 22)), "and before the next one begins all are handed out"


def test_one_that_was_only_thought_dead_finds_its_lease():
    ledger, _ = Ledger(epoch=100).grant("A#1", 8)
    ledger, granted = ledger.release("A#1").grant("A#1", 10)
    assert granted == ((0, 10),) and ledger.lost == ()
    another = ledger.release("A#1").grant("A#2", 4)[1]
    assert another == ((10, 14),), "another life of it is another holder"


def test_what_the_lost_had_and_trained_on_after_all_is_consumed_once():
    ledger, _ = Ledger(epoch=100).grant("A#1", 8)
    ledger = ledger.release("A#1").consume("A#1", ((0, 4),))
    assert ledger.lost == (("A#1", ((4, 8),)),) and ledger.overlaps == ()


def test_a_run_does_not_end_while_the_lost_have_samples():
    ledger, _ = Ledger(epoch=10, limit=10).grant("A#1", 10)
    assert not ledger.release("A#1").exhausted()


def test_the_run_ends_when_everything_below_the_limit_is_consumed():
    ledger, granted = Ledger(epoch=10, limit=10).grant("A#1", 30)
    assert granted == ((0, 10),) and not ledger.exhausted()
    ledger = ledger.consume("A#1", granted)
    assert ledger.exhausted()
    assert ledger.grant("B#1", 5)[1] == ()


def test_a_sample_of_two_branches_is_an_overlap_only_when_it_was_trained_on_twice():
    ledger, mine = Ledger(epoch=100).grant("A#1", 8)
    ledger = ledger.consume("B#1", ((4, 12),))  # leased to B on another branch
    assert ledger.overlaps == () and ledger.lease_of("A#1") == ((0, 4),)
    ledger = ledger.consume("A#1", mine)
    assert ledger.overlaps == ((4, 8),)


@given(st.lists(st.tuples(holders, st.integers(0, 9)), max_size=12))
def test_leases_never_overlap(wishes):
    ledger = Ledger(epoch=1000)
    for holder, count in wishes:
        ledger, granted = ledger.grant(holder, count)
        assert size(granted) == count
    leases = [ledger.lease_of(holder) for holder in HOLDERS]
    assert sum(map(size, leases)) == size(normal(part for lease in leases for part in lease)) == ledger.next
    assert minus(((0, ledger.next),), ledger.unconsumed) == ()
