"""Ranges against sets of integers."""

from hypothesis import given
from hypothesis import strategies as st
from ranges import positions

from diloco.elastic.protocol.ranges import both, first, is_normal, minus, normal, size

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)
ranges = pairs.map(normal)


@given(pairs)
def test_normal_is_the_union_in_its_one_form(some):
    joined = normal(some)
    assert is_normal(joined)
    assert positions(joined) == positions(tuple(some))
    assert normal(joined) == joined


@given(ranges, ranges)
def test_differences_and_common_parts(one, other):
    assert positions(minus(one, other)) == positions(one) - positions(other)
    assert positions(both(one, other)) == positions(one) & positions(other)
    assert is_normal(minus(one, other)) and is_normal(both(one, other))


@given(ranges, st.integers(-2, 50))
def test_the_first_few(some, count):
    taken = first(some, count)
    assert sorted(positions(taken)) == sorted(positions(some))[: max(0, count)]
    assert size(taken) == len(positions(taken))


def test_what_is_not_normal():
    assert not is_normal(((3, 3),))
    assert not is_normal(((0, 2), (2, 4)))
    assert not is_normal(((4, 6), (0, 2)))
    assert not is_normal(((-1, 2),))
