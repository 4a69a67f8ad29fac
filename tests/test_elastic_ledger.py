"""The ledger against plain sets: every position is free, leased once, consumed, or not handed out yet."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ranges import positions

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.ranges import first, minus, normal, size

HOLDERS = ("A#1", "B#1", "B#2")
LIMIT = 60
holders = st.sampled_from(HOLDERS)
ends = st.integers(0, LIMIT + 5)
some_ranges = st.lists(st.tuples(ends, ends), max_size=3).map(normal)


class Books(RuleBasedStateMachine):
    """The same operations on a ledger and on sets."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(epoch=25, limit=LIMIT)
        self.leased = {holder: set() for holder in HOLDERS}
        self.consumed, self.twice = set(), set()

    @rule(holder=holders, count=st.integers(0, 20))
    def grant(self, holder, count):
        free, fresh = positions(self.ledger.free), self.ledger.next
        expected = sorted(free)[:count]
        expected += range(fresh, max(fresh, min(LIMIT, fresh + count - len(expected))))
        self.ledger, granted = self.ledger.grant(holder, count)
        assert positions(granted) == set(expected)
        self.leased[holder] |= set(expected)

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
        for lease in self.leased.values():
            lease -= positions(ranges)

    @rule(holder=holders)
    @precondition(lambda self: self.ledger.leases)
    def release(self, holder):
        self.ledger = self.ledger.release(holder)
        self.leased[holder].clear()

    @invariant()
    def every_position_is_in_one_place(self):
        ledger = self.ledger
        assert {holder: positions(ledger.lease_of(holder)) for holder in HOLDERS} == self.leased
        parts = [positions(ledger.free), *self.leased.values(), self.consumed]
        assert sum(map(len, parts)) == len(set().union(*parts)) == ledger.next
        assert ledger.next - size(ledger.unconsumed) == len(self.consumed)
        assert positions(ledger.overlaps) == self.twice
        assert [holder for holder, _ in ledger.leases] == sorted(holder for holder in HOLDERS if self.leased[holder])


TestBooks = Books.TestCase


def test_what_returns_is_handed_out_first():
    ledger, _ = Ledger(epoch=100).grant("A#1", 8)
    ledger, _ = ledger.grant("B#1", 8)
    ledger = ledger.consume("A#1", ((0, 3),)).release("A#1")
    ledger, granted = ledger.grant("B#1", 6)
    assert granted == ((3, 8), (16, 17))


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
