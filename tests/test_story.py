"""What is told of a simulation: counted in full, and compared fairly with what was only computed."""

import pytest

from diloco.config.file import parse_config
from diloco.simulate.real.page import page
from diloco.simulate.real.story import Computed, IslandStory, Story, computed, slowest_step_s, usual_round_s
from diloco.simulate.real.timeline import STATES, Flow, flows
from diloco.simulate.real.topology import Topology


def samples(*counts: tuple[float, int, int]) -> list[dict]:
    return [{"time": at, "sent": sent, "received": received} for at, sent, received in counts]


def test_what_a_restarted_process_sent_before_its_first_sample_is_counted():
    seen = flows(samples((0, 0, 0), (1, 1000, 2000), (9, 10, 20), (10, 510, 1020)))
    assert seen == [Flow(0, 1, 1000, 2000), Flow(1, 9, 10, 20), Flow(9, 10, 500, 1000)]
    assert sum(flow.sent for flow in seen) == 1000 + 510


def test_a_restart_shows_in_either_counter():
    assert flows(samples((0, 100, 5000), (9, 300, 40))) == [Flow(0, 9, 300, 40)]


CONFIG = parse_config({"model": {"preset": "tiny"}, "data": {"sequence": 100}, "island": {"batch": 10}})
FAST = (0.0, 50e6, 50e6)


def event(kind: str, at: float = 0.0, **fields) -> dict:
    return {"event": kind, "time": at, **fields}


def told(*step_s: float, device: str = "cpu (2 threads)") -> list[dict]:
    return [event("start", device=device), *(event("step", tokens_per_s=1000 / seconds) for seconds in step_s)]


def computed_for(*islands: tuple[list[dict], list[tuple[float, float, float]]]) -> Computed:
    names = [f"island-{number}" for number in range(1, len(islands) + 1)]
    stories = [
        IslandStory(name, "", [], [], [], capacity, 0, dict.fromkeys(STATES, 0.0), 0.0, 0, 0)
        for name, (_, capacity) in zip(names, islands, strict=True)
    ]
    heard = {name: events for name, (events, _) in zip(names, islands, strict=True)}
    found = computed(CONFIG, Topology.uniform(len(islands), 50e6, 0.02), heard, stories, steps=100)
    assert found is not None
    return found


def test_data_parallel_goes_at_the_pace_of_the_slowest_island():
    found = computed_for((told(9, 0.1, 0.1, 0.1), [FAST]), (told(9, 0.5, 0.4, 0.4), [FAST]))
    assert found.step_s == pytest.approx(0.4)
    assert found.data_parallel_seconds == pytest.approx(100 * 0.4 / found.data_parallel_utilisation)


def test_who_told_only_of_its_start_is_not_the_slowest_unless_all_did():
    short = {"island-1": told(9, 0.1, 0.1), "island-2": told(7)}
    assert slowest_step_s(1000, short) == pytest.approx(0.1)
    assert slowest_step_s(1000, {"island-1": told(2), "island-2": told(7)}) == pytest.approx(7)
    assert slowest_step_s(1000, {"island-1": told()}) is None


def test_data_parallel_has_the_slowest_link_at_its_slowest():
    steady = computed_for((told(9, 0.1), [FAST]), (told(9, 0.1), [(0.0, 5e6, 50e6)]))
    changing = computed_for((told(9, 0.1), [FAST]), (told(9, 0.1), [FAST, (60.0, 5e6, 50e6), (90.0, 50e6, 50e6)]))
    always_fast = computed_for((told(9, 0.1), [FAST]), (told(9, 0.1), [FAST]))
    assert changing == steady
    assert changing.data_parallel_utilisation < always_fast.data_parallel_utilisation


def test_data_parallel_has_all_who_came_to_train_and_nobody_else():
    two, one = (told(9, 0.1), [FAST]), (told(9, 0.1), [FAST])
    slow = [(0.0, 1e6, 1e6)]
    pair, three = computed_for(two, one), computed_for(two, one, (told(), [FAST]))
    assert computed_for(two, one, ([], slow)) == pair
    assert three.data_parallel_utilisation < pair.data_parallel_utilisation
    late = computed_for(two, one, (told(), slow))
    assert late.data_parallel_utilisation < pair.data_parallel_utilisation / 10


def test_what_islands_computed_on_is_what_they_told():
    cpu, gpu = (
        computed_for(*[(told(9, 0.1, device=device), [FAST])] * 2) for device in ("cpu (1 thread)", "NVIDIA H200")
    )
    untold = computed_for(*[([event("start"), event("step", tokens_per_s=1e4)], [FAST])] * 2)
    assert gpu.predicted_round_s < cpu.predicted_round_s == untold.predicted_round_s


BOTH = ("island-1", "island-2")


def a_round(number: int, launched: float, applied: float | None, *contributors: str, told_at: float = 100.0) -> dict:
    told_of = {"digest": f"of round {number}", "contributors": contributors, "applied_at": applied}
    return event("round", told_at, round_s=told_at - launched, **told_of)


def test_a_round_is_measured_from_the_last_launch_until_all_have_applied_it():
    early = [a_round(1, 10.0, 19.0, *BOTH), a_round(2, 20.0, 23.0, *BOTH), a_round(3, 30.0, 36.0, *BOTH)]
    late = [a_round(1, 12.0, 18.0, *BOTH), a_round(2, 21.0, 23.5, *BOTH), a_round(3, 29.0, 35.0, *BOTH)]
    assert usual_round_s({"island-1": early, "island-2": late}) == 6.0


def test_only_rounds_of_several_count_as_those_who_were_in_them_tell_it():
    seen = [a_round(1, 10.0, 13.0, *BOTH), a_round(2, 20.0, 20.1, "island-1"), a_round(3, 30.0, None, *BOTH)]
    newcomer = [a_round(1, 12.9, 40.0, *BOTH)]
    assert usual_round_s({"island-1": [*seen, a_round(4, 50.0, 50.0)], "island-3": newcomer}) == 3.0
    assert usual_round_s({"island-1": seen[1:]}) is None


def test_the_page_shows_the_measured_round_beside_the_computed_one():
    found = computed_for((told(9, 0.1), [FAST]), (told(9, 0.1), [FAST]))
    island = IslandStory("island-1", "", [], [], [], [FAST], 1, dict.fromkeys(STATES, 1.0), 0.5, 0, 0)
    story = Story("near", "", "tiny", 1, 9.0, 1, 1, True, True, [], [island], [], 0.5, found, measured_round_s=2.5)
    planned = f"{found.predicted_round_s:.1f} s as computed"
    shown = page([story])
    assert "A round took 2.5 s from its last launch" in shown and planned in shown
