from itertools import pairwise

import pytest

from diloco.config.schema import InnerConfig, SyncConfig
from diloco.elastic.protocol.record import Contribution, Offer
from diloco.train.schedule import (
    Action,
    Apply,
    Launch,
    Schedule,
    Since,
    TimedSchedule,
    fair_share,
    learning_rate,
    schedule_of,
    usual_steps,
)


def schedule(steps: int = 100, **sync: object) -> Schedule:
    inner = InnerConfig(lr=1.0, steps=steps, warmup=0, schedule="constant")
    return Schedule.of(SyncConfig(**sync), inner)  # type: ignore[arg-type]


def timetable(plan: Schedule) -> dict[int, list[Action]]:
    return {step: works for step in range(1, plan.steps + 1) if (works := plan.after(step))}


def test_classic_syncs_every_h_steps_and_at_the_end():
    due = timetable(schedule(7, every=3))
    assert list(due) == [3, 6, 7]
    assert due[3] == [Launch(0), Apply(0)]
    assert due[7][-2:] == [Launch(0), Apply(0)]


def test_fragments_are_launched_in_turn_and_applied_later():
    due = timetable(schedule(30, every=10, fragments=3, delay=2))
    assert [step for step in due if Launch(0) in due[step]][:2] == [3, 13]
    assert due[3] == [Launch(0)] and due[5] == [Apply(0)]
    assert due[7] == [Launch(1)] and due[10] == [Launch(2)] and due[12] == [Apply(2)]
    launched = [work.fragment for works in due.values() for work in works if isinstance(work, Launch)]
    assert launched == [0, 1, 2] * 3 + [0, 1]  # at the end, those whose last launch was earlier


def test_a_fragment_is_never_launched_again_before_it_was_applied():
    for fragments, delay, steps in [(1, 9, 33), (3, 0, 30), (3, 9, 31), (4, 5, 38)]:
        flying: set[int] = set()
        for works in timetable(schedule(steps, every=10, fragments=fragments, delay=delay)).values():
            for work in works:
                if isinstance(work, Launch):
                    assert work.fragment not in flying
                    flying.add(work.fragment)
                else:
                    flying.discard(work.fragment)
        assert not flying


def test_eager_takes_the_last_result_before_it_launches():
    due = timetable(schedule(30, every=10, apply="eager"))
    assert due[10] == [Apply(0), Launch(0)] and due[30][-2:] == [Launch(0), Apply(0)]


def test_the_clock_follows_the_launches_and_the_run_ends_when_every_fragment_had_its_turn():
    plan = schedule(30, every=10, fragments=3)
    clock, updates = [0], 0
    while not plan.is_over(clock[-1], updates):
        clock.append(plan.next(clock[-1]))
        updates += 1
    assert clock == [0, 3, 7, 10, 13, 17, 20, 23, 27, 30, 30, 30]
    assert all(plan.is_over(30, updates + more) for more in range(7))  # for whoever looks late, too
    assert not any(plan.is_over(30, updates - back) for back in (1, 2)) and plan.is_over(30, updates - 3)


def test_phases_grow_as_the_learning_rate_falls():
    inner = InnerConfig(lr=1.0, steps=100, warmup=0, schedule="cosine", final_lr=0.1)
    launches = Schedule.of(SyncConfig(every=5, growth=3.0), inner).launches
    lengths = [hi - lo for lo, hi in pairwise((0, *launches))]
    assert lengths[0] == 9 and lengths[:-1] == sorted(lengths[:-1]) and lengths[-2] == 20
    warm = Schedule.of(SyncConfig(every=5, growth=3.0), inner.model_copy(update={"warmup": 20})).launches
    assert warm[0] == 9


def test_a_learning_rate_of_zero_makes_the_last_phase_not_endless():
    inner = InnerConfig(lr=1.0, steps=51, warmup=0, schedule="cosine", final_lr=0.0)
    assert Schedule.of(SyncConfig(every=50, growth=1e-3), inner).launches == (50, 51)


def test_by_time_a_round_is_due_when_the_last_one_was_long_ago():
    plan = schedule_of(SyncConfig(every="2min"), InnerConfig(steps=1000))
    assert plan == TimedSchedule(120.0, 1000)
    assert plan.after(500, Since(119.9, None)) == []
    assert plan.after(500, Since(120.0, None)) == [Launch(0), Apply(0)]
    assert plan.after(1000, Since(0.0, None))[-2:] == [Launch(0), Apply(0)]


def test_by_time_a_result_is_applied_by_steps():
    plan = TimedSchedule(60.0, 1000, delay=3)
    assert plan.after(500, Since(60.0, None)) == [Launch(0)]
    assert plan.after(502, Since(90.0, 2)) == []
    assert plan.after(503, Since(90.0, 3)) == [Apply(0)]


def test_by_time_eager_takes_the_last_result_before_it_launches():
    plan = schedule_of(SyncConfig(every="60s", apply="eager"), InnerConfig(steps=1000))
    assert isinstance(plan, TimedSchedule)
    assert plan.after(500, Since(60.0, 40)) == [Apply(0), Launch(0)] and plan.after(501, Since(1.0, 1)) == []


def test_by_time_the_clock_follows_what_was_trained():
    plan = TimedSchedule(60.0, 1000)
    assert plan.next(500, 80) == 580 and plan.next(990, 80) == 1000
    assert plan.next(500, 0) == 501  # it never stands still
    assert plan.is_over(1000, 7) and not plan.is_over(999, 7)


def test_what_a_round_counts_as_is_not_for_a_few_to_say():
    def round_of(*offers: tuple[int, bool]) -> list[Contribution]:
        return [Contribution("x", Offer(0, 0, 1, 9, (), late=late, steps=steps), 1) for steps, late in offers]

    assert usual_steps(round_of((30, False), (50, False))) == 50
    assert usual_steps(round_of((30, False), (50, False), (10**6, False))) == 50
    assert usual_steps(round_of((30, False), (90, True))) == 30  # late: of two phases
    assert usual_steps(round_of((90, True))) == 90


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
