"""Many members reduce in two levels: the same bytes for all, whatever the timing, and the mean of the butterfly."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
from golden import RESULT_KEY, digest
from groups import Group, direct_group, encoded, jittery, memory_group, wrapped
from torch import Tensor

from diloco.comm.codec.noise import PAGE
from diloco.comm.codec.registry import result_codec_for
from diloco.comm.reduce.grid import TwoLevelPlan, grid_of
from diloco.comm.reduce.two_level import TwoLevelReduction
from diloco.errors import PlanRefused, ReduceCancelled, ReduceFailed

COUNT = 9 * PAGE + 1234
SOON = 30.0


def plan_for(group: Group, codec: str = "int8", count: int = COUNT, rates: tuple[float, ...] = ()) -> TwoLevelPlan:
    members = tuple(group.transports)
    weights, rates = tuple(range(1, len(members) + 1)), rates or (1.0,) * len(members)
    return TwoLevelPlan(
        "reduce/1", members, weights, rates, count, codec, RESULT_KEY, result_codec_for(codec, len(members))
    )


PATIENT = partial(TwoLevelReduction, patience_s=SOON)
IMPATIENT = partial(TwoLevelReduction, patience_s=1.0)  # who starts last on a busy machine may be given up


def mean_of(group: Group, plan: TwoLevelPlan) -> Tensor:
    return group.reduce(plan, encoded(group, plan.count, plan.codec_name), PATIENT)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 12, 17])
def test_everybody_has_the_same_bytes_and_the_butterflys_mean(size: int) -> None:
    group = memory_group(size)
    result = mean_of(group, plan := plan_for(group))
    flat = memory_group(size)
    whole = flat.reduce(flat.plan(COUNT, "int8"), encoded(flat, COUNT, "int8"))
    values, expected = (plan.result_codec.decode(payload, COUNT) for payload in (result, whole))
    step = expected.abs().max() / 127
    assert (values - expected).abs().max() <= step * 1.01, "more than one step of rounding apart"
    other = (values - expected).abs() > step / 100
    assert other.float().mean() < 0.001, "sums that differ in their last bits are rounded alike, nearly always"


@pytest.mark.parametrize("codec", ["fp32", "int4", "sign", "sparse"])
def test_every_kind_of_codec(codec: str) -> None:
    group = memory_group(7)
    mean_of(group, plan_for(group, codec))


def test_bytes_do_not_depend_on_the_transport_or_its_timing() -> None:
    kinds: list[Callable[[], Group]] = [
        lambda: memory_group(8), lambda: wrapped(memory_group(8), jittery), lambda: direct_group(8)
    ]  # fmt: skip
    digests = set()
    for make in kinds:
        group = make()
        digests.add(digest(mean_of(group, plan_for(group))))
        group.close()
    assert len(digests) == 1


def test_slow_links_own_less_and_vectors_may_be_short() -> None:
    group = memory_group(9)
    plan = plan_for(group, rates=(4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 2.8, 2.8, 2.8))
    lengths = [part.hi - part.lo for part in plan.parts]
    assert lengths[0] > lengths[1] > lengths[2]
    mean_of(group, plan)
    mean_of(memory_group(9), plan_for(memory_group(9), count=100))


@pytest.mark.parametrize("count", [2, 5, 16, 30, 1000])
def test_the_grid_has_everybody_once_and_few_streams(count: int) -> None:
    grid = grid_of([float(1 + member % 3) for member in range(count)])
    assert sorted(chain(*grid.groups)) == list(range(count))
    assert len(set(chain(*grid.columns))) == sum(map(len, grid.columns))
    for row, group in enumerate(grid.groups):
        assert [column[row] for column in grid.columns] == list(group[: len(grid.columns)])
    assert max(map(len, grid.groups)) + max(map(len, grid.columns)) <= 2 * count**0.5 + 3


def test_who_does_not_come_is_named_and_the_others_can_be_cancelled() -> None:
    group = memory_group(8)
    plan = plan_for(group)
    missing = plan.members[0]
    mates = next([plan.members[m] for m in members] for members in plan.grid.groups if 0 in members)
    group.begin(plan, encoded(group, COUNT, "int8"), plan.members[1:], IMPATIENT)
    for name, reduction in group.reductions.items():
        if name in mates:
            group.threads[list(group.reductions).index(name)].join(SOON)
        else:
            reduction.cancel("somebody is missing")
    outcomes = group.finish()
    assert all(isinstance(outcome, ReduceFailed) for outcome in outcomes.values()), outcomes
    assert missing in [outcomes[name].hung_up for name in mates if name != missing]  # type: ignore[union-attr]
    assert any(isinstance(outcome, ReduceCancelled) for outcome in outcomes.values())


def test_plans_that_cannot_be_right_are_refused() -> None:
    good = plan_for(memory_group(4))
    twice, rates = ("a", "a", "b", "c"), (1.0, 1.0, 1.0, 0.0)
    for wrong in ({"members": twice}, {"weights": (1,)}, {"bytes_per_s": rates}, {"count": 0}, {"codec_name": "no"}):
        with pytest.raises(PlanRefused):
            replace(good, **wrong)  # type: ignore[arg-type]
