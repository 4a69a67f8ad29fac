"""What is read from the events of simulated islands, to compare planner and virtual time with."""

import pytest
from events import a_round, told

from diloco.bench.simulated import EVERY, PHASES, WARM_UP, seen_in
from diloco.report.events import Event

STEP_S, ROUND_S = 0.1, 1.5


def events_of(*, late_s: float, step_s: float = STEP_S, blocking: bool) -> list[Event]:
    """Of one that launches each round so much later than the other, and trains on meanwhile unless it is blocking."""
    now, events = 1000.0, [told("start", 1000.0, parameters=7)]
    for number in range(WARM_UP + PHASES):
        for _ in range(EVERY):
            now += step_s
            events.append(told("step", now))
        launched, applied = now + late_s, now + ROUND_S
        round_s = applied - launched if blocking else 2 * ROUND_S  # an overlapped one is taken in later than applied
        events.append(a_round(number, at=launched, step=0, applied_at=launched))
        events.append(a_round(number, "a", "b", at=launched + round_s, step=0, round_s=round_s, applied_at=applied))
        now += ROUND_S if blocking else 0.0
    return events


def test_a_round_lasts_from_the_last_launch_until_all_have_applied_it():
    seen = seen_in({"a": events_of(late_s=0.0, blocking=True), "b": events_of(late_s=0.5, blocking=True)})
    assert seen.round_s == pytest.approx(ROUND_S - 0.5)
    assert seen.step_s == pytest.approx(STEP_S)
    assert seen.utilisation == pytest.approx(EVERY * STEP_S / (EVERY * STEP_S + ROUND_S))
    assert seen.parameters == 7


def test_an_overlapped_round_costs_no_time_and_has_a_length_nevertheless():
    seen = seen_in(dict.fromkeys("ab", events_of(late_s=0.0, blocking=False)))
    assert (seen.round_s, seen.utilisation) == (pytest.approx(ROUND_S), pytest.approx(1.0))
