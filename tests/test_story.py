"""What is told of a simulation: counted in full, and compared fairly with what was only computed."""

import pytest

from diloco.configfile import parse_config
from diloco.simulation.story import Computed, IslandStory, computed, slowest_step_s
from diloco.simulation.timeline import STATES, Flow, flows
from diloco.simulation.topology import Topology


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
    assert computed_for(two, one, ([], slow)) == computed_for(two, one)
    late = computed_for(two, one, (told(), slow))
    assert late.data_parallel_utilisation < computed_for(two, one).data_parallel_utilisation / 10


def test_what_islands_computed_on_is_what_they_told():
    cpu, gpu = (
        computed_for(*[(told(9, 0.1, device=device), [FAST])] * 2) for device in ("cpu (1 thread)", "NVIDIA H200")
    )
    untold = computed_for(*[([event("start"), event("step", tokens_per_s=1e4)], [FAST])] * 2)
    assert gpu.predicted_round_s < cpu.predicted_round_s == untold.predicted_round_s
