import pytest

from diloco.config import InnerConfig
from diloco.schedule import Apply, Classic, Launch, fair_share, learning_rate


def test_classic_syncs_every_h_steps_and_at_the_end():
    schedule = Classic(every=3, steps=7)
    due = [step for step in range(1, 8) if schedule.after(step)]
    assert due == [3, 6, 7]
    assert schedule.after(3) == [Launch(0), Apply(0)]


def rates(**settings: object) -> list[float]:
    config = InnerConfig(lr=1.0, steps=100, warmup=10, final_lr=0.1, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(1, 101)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule):
    curve = rates(schedule=schedule)
    assert curve[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(curve) == pytest.approx(1.0)


def test_cosine_falls_all_the_way_to_the_final_rate():
    curve = rates(schedule="cosine")
    assert curve[9:] == sorted(curve[9:], reverse=True)
    assert curve[54] == pytest.approx(0.55)  # half way down at half time
    assert curve[-1] == pytest.approx(0.1)


def test_wsd_is_flat_then_falls_in_a_line():
    curve = rates(schedule="wsd", decay=0.2)
    assert set(curve[9:80]) == {1.0}
    assert curve[89] == pytest.approx(0.55)
    assert curve[-1] == pytest.approx(0.1)


def test_constant_stays():
    assert set(rates(schedule="constant")[9:]) == {1.0}


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate(InnerConfig(lr=1.0, warmup=0, schedule="constant"), 1) == 1.0


def test_a_slower_island_does_its_fair_share():
    assert fair_share(50, 100, [100, 200]) == 50  # the fastest
    assert fair_share(50, 200, [100, 200]) == 25
    assert fair_share(50, 10_000, [100]) == 1
    assert fair_share(50, 0, [100]) == fair_share(50, 100, []) == fair_share(50, 100, [0]) == 50
    assert fair_share(50, 80, [100]) == 50  # faster than the last round's fastest: never more than all
