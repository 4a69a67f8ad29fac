"""What is told of a simulation: timelines, traffic, summary, page and JSON, and the page in a real browser."""

import json
import re
from dataclasses import replace

import pytest
from events import told as event
from team import PATIENT, Team, introduced

from diloco.bench.browser import BROWSER, WHY_SKIPPED, Tab, open_browser
from diloco.bench.team import Heard
from diloco.cli.real import summary
from diloco.config.file import parse_config
from diloco.report.events import Event
from diloco.report.sinks import Events
from diloco.simulate.real import outcome
from diloco.simulate.real.outcome import (
    Computed,
    FaultOutcome,
    Flow,
    IslandOutcome,
    LossPoint,
    SimulationOutcome,
    Span,
    usual_round_s,
)
from diloco.simulate.real.page import page, write_page
from diloco.simulate.real.topology import Topology
from diloco.train.rounds import Rounds

# what is told


def test_a_timeline_joins_computes_waits_dies_and_comes_back():
    events = [event("start", 5), event("wait", 9, seconds=2), event("start", 23), event("end", 30)]
    assert outcome.timeline([[0, 12], [15, 31]], [[24, 25]], events, end=30) == [
        Span(0, 5, "joining"), Span(5, 7, "computing"), Span(7, 9, "waiting"), Span(9, 12, "computing"),
        Span(12, 15, "dead"), Span(15, 23, "joining"), Span(23, 24, "computing"), Span(24, 25, "stopped"),
        Span(25, 30, "computing"),
    ]  # fmt: skip


def test_who_dies_before_it_trains_was_joining_and_who_stays_away_is_dead():
    assert outcome.timeline([[0, 4]], [], [], end=10) == [Span(0, 4, "joining"), Span(4, 10, "dead")]


def test_who_is_killed_after_a_longer_silence_than_its_steps_take_was_waiting():
    steps = [event("start", 0), event("step", 2), event("step", 4), event("wait", 8, seconds=3), event("step", 10)]
    waited = [Span(0, 5, "computing"), Span(5, 8, "waiting")]
    lost = event("elastic", 19, what="lost")  # tells nothing of training
    assert outcome.timeline([[0, 20]], [], [*steps, lost], end=20) == [
        *waited, Span(8, 12, "computing"), Span(12, 20, "waiting")
    ]  # fmt: skip
    assert outcome.timeline([[0, 9]], [], steps[:-1], end=9) == [*waited, Span(8, 9, "computing")]
    assert outcome.timeline([[0, 11.5]], [], steps, end=11.5) == [*waited, Span(8, 11.5, "computing")]
    assert outcome.timeline([[0, 20]], [], [*steps, event("end", 20)], end=20) == [*waited, Span(8, 20, "computing")]


def test_an_island_that_ends_without_samples_tells_that_it_waited_for_them(small):
    """Its only peer never comes, and what they train on is handed out by a round of both."""
    team = Team(small(elastic=PATIENT, evaluate={"every": 0}))
    drivers, looks = team.drivers(), iter([False, False, True])
    trainer, heard = team.trainers["A"], Heard()
    trainer.events = Events([heard])
    with introduced(drivers):
        trainer.join(Rounds(drivers["A"], team.config, str))
        trainer.run(lambda: next(looks, True))
    kinds = [each.kind for each in heard.events]
    assert "step" not in kinds and kinds.index("start") < kinds.index("wait") < kinds.index("end")


def test_spans_that_cover_each_other_are_told_once():
    assert outcome.flat([Span(0, 10, "a"), Span(2, 4, "b"), Span(4, 5, "b"), Span(20, 21, "a")]) == [
        Span(0, 2, "a"), Span(2, 5, "b"), Span(5, 10, "a"), Span(20, 21, "a"),
    ]  # fmt: skip


def test_flows_are_what_counters_gained_and_a_restart_loses_nothing():
    counts = [(0, 0), (1, 1000), (2, 1000), (9, 10), (10, 510)]
    samples = [{"time": at, "sent": sent, "received": 2 * sent} for at, sent in counts]
    seen = outcome.flows(samples)
    assert [(flow.begin_s, flow.sent, flow.received) for flow in seen] == [
        (0, 1000, 2000), (1, 0, 0), (2, 10, 20), (9, 500, 1000),
    ]  # fmt: skip
    assert seen[0].up_bits_per_s == 8000 and seen[0].down_bits_per_s == 16000
    assert outcome.sending(seen, up_bits_per_s=20_000) == [(0, 1), (9, 10)]
    assert outcome.sending(seen, up_bits_per_s=100_000) == [(0, 1)]
    either = [{"time": 0, "sent": 100, "received": 5000}, {"time": 9, "sent": 300, "received": 40}]
    assert outcome.flows(either) == [Flow(0, 9, 300, 40)]


def an_outcome(name: str = "near", *, setting: str = "sync: {every: 8, codec: int8}") -> SimulationOutcome:
    flow = [Flow(t, t + 1, 10**6 * (t % 3 == 0), 5 * 10**5) for t in range(30)]
    spans = [Span(-5, 0, "joining"), Span(0, 10, "computing"), Span(10, 12, "waiting"), Span(12, 30, "computing")]
    seconds = {"joining": 0.0, "computing": 28.0, "waiting": 2.0, "stopped": 0.0, "dead": 0.0}
    island = IslandOutcome(
        "island-1", "eu", spans, [(0.0, 1.0)], flow, [(0.0, 20e6, 20e6), (15.0, 5e6, 5e6)], 3, seconds, 28 / 30,
        10**7, 10**7,
    )  # fmt: skip
    losses = [LossPoint(8 * n, 1000 * n, 10.0 * n, 10**6 * n, 5.0 - n) for n in range(4)]
    told = [
        FaultOutcome("--kill 1@5s", "kill -9 island-1", "kill", 5.0, None, ["island-1"], True),
        FaultOutcome("--cut 1|2@6s..9s", "cut <off>", "cut", 6.0, 9.0, ["island-1", "island-2"], True),
        FaultOutcome("--stop 1@90s..99s", "island-1 is stopped", "stop", 90.0, 99.0, ["island-1"], False),
    ]
    computed = Computed(0.1, 0.03, 900.0, 0.9, 1.2)
    return SimulationOutcome(
        name, setting, "tiny", 10**6, 30.0, 24, 3, True, True, losses, [island], told, 28 / 30, computed
    )


def test_the_summary_says_what_did_not_happen_and_what_was_only_computed():
    lines = list(summary(an_outcome()))
    assert lines[0] == "near: sync: {every: 8, codec: int8}; 3 rounds in 30 s"
    assert lines[1] == "  island-1 trained 93.3 % of its time: 28 s training, 2.0 s waiting; sent 9.54 MiB"
    assert lines[2].startswith("  --stop 1@90s..99s did not happen")
    assert lines[3].endswith("(computed): trains 3 % of the time, 15:00 min for as many steps")


def test_the_times_of_an_island_add_up_to_those_of_the_run():
    whole = replace(an_outcome(), seconds=31.5)  # it left before the others did
    (island,) = whole.islands
    times = whole.times(replace(island, seconds={**island.seconds, "joining": 1.0}))
    assert sum(times.values()) == whole.seconds and times["training"] == 28 and times["not in the run"] == 0.5
    assert list(summary(whole))[1].endswith("28 s training, 2.0 s waiting, 1.5 s not in the run; sent 9.54 MiB")
    assert "<th>not in the run</th>" in page([whole])


def test_the_page_needs_nothing_but_itself_and_says_the_facts_without_a_script():
    text = page([an_outcome(), an_outcome("far", setting="sync: {every: 30, codec: int4, delay: 10}")])
    sections = ["losses", "utilisation", "timeline-1", "traffic-1", "timeline-2", "traffic-2"]
    assert [name for name in re.findall(r'<section class="panel" id="([^"]+)"', text) if name in sections] == sections
    assert text.count('<figure class="chart"') == 6
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*|url\((?!#)[^)]*|@import""", markup) == []
    assert "cut &lt;off&gt;" in markup and "did not happen" in markup and "data parallel (computed)" in markup


def test_the_json_has_the_same_story(tmp_path):
    outcome.write_json([an_outcome()], tmp_path / "report.json")
    (told,) = json.loads((tmp_path / "report.json").read_text())["simulations"]
    assert told["name"] == "near" and told["islands"][0]["spans"][1] == {
        "begin_s": 0, "end_s": 10, "state": "computing",
    }  # fmt: skip
    assert [fault["happened"] for fault in told["faults"]] == [True, True, False]


# compared fairly with what was only computed

CONFIG = parse_config({"model": {"preset": "tiny"}, "data": {"sequence": 100}, "island": {"batch": 10}})
FAST = (0.0, 50e6, 50e6)


def told(*step_s: float, device: str = "cpu (2 threads)") -> list[Event]:
    return [event("start", device=device), *(event("step", tokens_per_s=1000 / seconds) for seconds in step_s)]


def computed_for(*islands: tuple[list[Event], list[tuple[float, float, float]]]) -> Computed:
    names = [f"island-{number}" for number in range(1, len(islands) + 1)]
    round_events = [
        IslandOutcome(name, "", [], [], [], capacity, 0, dict.fromkeys(outcome.STATES, 0.0), 0.0, 0, 0)
        for name, (_, capacity) in zip(names, islands, strict=True)
    ]
    heard = {name: events for name, (events, _) in zip(names, islands, strict=True)}
    found = outcome.computed(CONFIG, Topology.uniform(len(islands), 50e6, 0.02), heard, round_events, steps=100)
    assert found is not None
    return found


def test_data_parallel_goes_at_the_pace_of_the_slowest_island():
    found = computed_for((told(9, 0.1, 0.1, 0.1), [FAST]), (told(9, 0.5, 0.4, 0.4), [FAST]))
    assert found.step_s == pytest.approx(0.4)
    assert found.data_parallel_seconds == pytest.approx(100 * 0.4 / found.data_parallel_utilisation)


def test_who_told_only_of_its_start_is_not_the_slowest_unless_all_did():
    short = {"island-1": told(9, 0.1, 0.1), "island-2": told(7)}
    assert outcome.slowest_step_s(1000, short) == pytest.approx(0.1)
    assert outcome.slowest_step_s(1000, {"island-1": told(2), "island-2": told(7)}) == pytest.approx(7)
    assert outcome.slowest_step_s(1000, {"island-1": told()}) is None


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
    other = computed_for(*[([event("start", device="cpu"), event("step", tokens_per_s=1e4)], [FAST])] * 2)
    assert gpu.predicted_round_s < cpu.predicted_round_s == other.predicted_round_s


BOTH = ("island-1", "island-2")


def a_round(number: int, launched: float, applied: float | None, *contributors: str, told_at: float = 100.0) -> Event:
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
    shown = page([replace(an_outcome(), measured_round_s=2.5)])
    assert "A round took 2.5 s from its last launch" in shown and "1.2 s as computed" in shown


# in a browser

SEEN = """[...document.querySelectorAll("figure")].map((figure) => {
  const box = figure.querySelector("canvas, .main-svg, .shares").getBoundingClientRect();
  return [figure.closest("section").id, Math.round(box.width), Math.round(box.height)];
})"""


@pytest.mark.skipif(BROWSER is None, reason=WHY_SKIPPED)
def test_a_browser_without_network_shows_every_plot_and_complains_about_nothing(tmp_path):
    write_page([an_outcome(), an_outcome("far</script><b>")], tmp_path / "report.html")
    with open_browser() as browser:
        tab = Tab(browser)
        tab.open((tmp_path / "report.html").as_uri())
        seen = tab.run(SEEN)
        assert tab.complaints == []
        assert {address.partition(":")[0] for address in tab.requests} <= {"file", "data"}
        assert "far</script><b>" in tab.text("#losses") and tab.run("document.querySelectorAll('h2 b').length") == 0
    assert [name for name, *_ in seen] == [
        "losses", "utilisation", "timeline-1", "traffic-1", "timeline-2", "traffic-2",
    ]  # fmt: skip
    assert all(width > 500 and height > 50 for _, width, height in seen)
