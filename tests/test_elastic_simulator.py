"""The protocol under seeded disasters and hand-written ones (tests/scenarios), with every rule, and without each."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from disasters import commits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_cuts import PAIR_CUTS, share_with_first_pair_cut

from diloco.simulate.virtual import faults, scenario
from diloco.simulate.virtual.campaign import Campaign, rule_names
from diloco.simulate.virtual.chances import DisasterConfig
from diloco.simulate.virtual.faults import FIRST_STREAMING, PARTITIONS, Disaster, Fault, pace_of
from diloco.simulate.virtual.trainer import USUAL, SyncPace
from diloco.simulate.virtual.world import World

ROOT = Path(__file__).parent.parent
SCENARIOS = sorted((ROOT / "tests/scenarios").glob("*.txt"))
BATCH = 100
STREAMING = [seed for seed in range(FIRST_STREAMING, FIRST_STREAMING + 40) if pace_of(seed) != USUAL]

# A coordinator that adopted its own earlier attempt, from itself; one that committed two rounds at a stroke; one that
# was ready with the next fragment at once, and waited for nobody.
ONCE_WRONG = (17875, 1004276, 1003167)

HARSH_ONCE_WRONG = [
    ("merge", 50051),  # a disk that takes twice silence_s: everybody was said to be mute
    ("merge", 50460),  # an attempt that its coordinator had given up was followed for ever
    ("merge", 50294),  # the same disk: two went on alone
    ("auto", 50072),  # one that came back led at once, because its roster was empty
    ("auto", 50188),  # nobody of the roster was left, and so nobody might lead
    ("auto", 50029),  # a result that was about to come was fetched instead, for longer than a round takes
    ("quorum", 52935),  # two that did not confirm in time were banned for ever, and their confirmations ignored
    ("auto", 651),  # the only one that had the result was dead
    ("auto", 783),  # who led in place of a roster that was gone gave up, and nobody else might
    ("auto", 1397),  # one that could not get a result to store it ended the attempt of all
    ("quorum", 10394),  # every pair was kept apart, for no round came about that would end it
    ("quorum", 10228),  # one that did not hear whose bytes moved took over from the coordinator
    ("merge", 61750),  # two signs of life in a row got lost, and the simulator counted nobody as suspected wrongly
    ("auto", 10347),  # one whose result was about to come led a round that was committed already
    ("auto", 786),  # of several that were late, rounds waited for one at a time, and one was late for ever
    ("quorum", 2773),  # what records without work took was counted as waiting, and nobody was waited for again
    ("quorum", 2991),  # a member whose last bytes came a second later was left out, and late from then on
    ("quorum", 8474),  # a coordinator told itself *done*, on *halt*, before its disk had the result
    ("quorum", 8666),  # who was to store a result could not reach the one that had made it
    ("quorum", 1325),  # the only one that trained was never ready, and late progress waited for it
    ("auto", 1183),  # a coordinator fetched the result and hung up, and others had not its bytes yet
    ("auto", 40037),  # a change of settings that an island had which was always a round behind
    ("auto", 143),  # one that had fetched a record after the latch no longer knew that it counts, and went back
    ("auto", 9266),  # rounds of one fragment waited for an island that had work of the other one only
    ("auto", 17501),  # who had promised too late to be asked to store a result was never asked
    ("auto", 8685),  # a defect of the simulator: a member joined the attempt of a dead life under the same ballot
    ("auto", 15242),  # who had a record by hearsay took it for one without a quorum, and led nothing after the latch
    ("quorum", 14913),  # all had waited too long when the quorum came back, but those who had nothing to wait with
    ("quorum", 8873),  # one without samples, so with nothing to wait with, promised to nobody but an idle coordinator
    ("quorum", 12711),  # a result was spoilt when the faults were over: of two islands, one was excluded for 40 s
]
LONG = {  # three to ten seconds each
    ("merge", 50460), ("auto", 50188), ("auto", 50029), ("quorum", 52935), ("auto", 10347), ("quorum", 2991),
    ("auto", 40037), ("auto", 1183), ("auto", 9266), ("quorum", 10228), ("quorum", 8666), ("quorum", 2773),
}  # fmt: skip

# Seeds whose disaster shows what a rule is for. The others have scenarios only.
CAUGHT = {
    "done_is_durable": ("harsh", 7),
    "marks_decide": ("usual", 0),
    "wait_for_everybody": ("usual", 126),
    "anybody_may_lead": ("usual", 2),
    "yield_to_higher_promises": ("usual", 33),
    "leave_out_stuck_pairs": ("usual", 5),
    "follow_the_linked": ("harsh", 15),
    "marks_are_pruned": ("usual", 2),
}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_go_as_written(path):
    scenario.check(path)


def test_every_rule_has_a_scenario_or_a_seed_that_shows_what_it_is_for():
    holes = {scenario.parse(path.read_text()).rule for path in SCENARIOS}
    assert holes | CAUGHT.keys() >= set(rule_names())


def test_the_docs_name_what_catches_each_rule():
    docs = (ROOT / "docs/protocol.md").read_text()
    for path in SCENARIOS:
        script = scenario.parse(path.read_text())
        if rule := script.rule:
            expected = " ".join(script.told[rule].splitlines()[-1].split()[:2])  # expect …
            caught_by = script.violation or f"`{expected}`"
            assert f"| `{rule}` | `{path.relative_to(ROOT)}` | {caught_by} |" in docs


@pytest.mark.parametrize(
    "first", [pytest.param(i * BATCH, marks=pytest.mark.soak, id=f"{i * BATCH}-") for i in range(5)]
)  # `make test` runs the first hundred from the command line (tests/prove.py)
def test_random_disasters_violate_nothing(first):
    commits = commits_of(range(first, first + BATCH))
    assert commits > 50 * BATCH, "disasters in which nothing is ever committed show nothing"


def test_what_was_once_wrong_is_right():
    assert commits_of(ONCE_WRONG) > 0


@pytest.mark.parametrize(
    ("partition", "seed"),
    [pytest.param(*each, marks=pytest.mark.soak) if each in LONG else each for each in HARSH_ONCE_WRONG],
)
def test_what_was_once_wrong_in_harsh_times_is_right(partition, seed):
    outcome = Campaign(kind="harsh", partition=partition).run_one(seed)
    assert not outcome.violation and outcome.commits


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_streaming_disasters_violate_nothing(part):
    """Fragments in turn, some in flight while training goes on, some islands short of samples."""
    seeds = STREAMING[part::3]
    assert commits_of(seeds) > 50 * len(seeds)


def test_a_third_of_the_seeds_have_fragments_or_overlap():
    paces = [pace_of(seed) for seed in range(FIRST_STREAMING, FIRST_STREAMING + 3000)]
    assert 900 < sum(pace != USUAL for pace in paces) < 1100
    assert {(pace.fragments, pace.overlap) for pace in paces} == {(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1)}
    assert all(pace_of(seed) == USUAL for seed in range(FIRST_STREAMING))


@pytest.mark.parametrize("rule", CAUGHT)
def test_chance_finds_what_a_rule_is_for(rule):
    kind, seed = CAUGHT[rule]
    assert Campaign(without=rule, kind=kind).run_one(seed).violation
    assert not Campaign(kind=kind).run_one(seed).violation


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("first", [0, *(pytest.param(i * 50, marks=pytest.mark.soak) for i in range(1, 7))])
def test_harsh_disasters_violate_nothing(partition, first):
    """Long exchanges, disks that lag, lost and overtaken messages."""
    count = 50 if first else 3
    assert commits_of(range(first, first + count), Campaign(kind="harsh", partition=partition)) > 10 * count


def test_rounds_go_on_wherever_a_quorum_of_linked_islands_is():
    assert commits_of(range(3), Campaign(kind="cuts")) > 0


@pytest.mark.soak
def test_rounds_go_on_in_many_cut_networks():
    assert commits_of(range(3, 30), Campaign(kind="cuts")) > 0


@pytest.mark.parametrize("cut", PAIR_CUTS)
@pytest.mark.parametrize(
    ("islands", "exchanges"),
    [(4, 5), *(pytest.param(n, x, marks=pytest.mark.soak) for n, x in ((4, 1), (4, 15), (8, 1), (8, 5), (8, 15)))],
)
def test_a_cut_between_the_first_two_costs_little_more_than_one_between_the_last(islands, exchanges, cut):
    assert share_with_first_pair_cut(islands, exchanges, cut) >= 0.8


names = st.sampled_from("ABCDE")
times = st.floats(1, faults.FAULTY_S, allow_nan=False)
some = st.sets(names, min_size=1, max_size=4).map(lambda some: tuple(sorted(some)))
one = names.map(lambda name: (name,))
blows = st.sampled_from(["crash at", "stop at", "crash coordinator at", "power cut"])
any_fault = st.one_of(
    st.builds(Fault, times, st.just("crash"), one, number=st.integers(1, 12)),
    st.builds(Fault, times, st.sampled_from(["start", "stop", "resume"]), one),
    st.builds(Fault, times, st.sampled_from(["split", "one way", "three"]), some),
    st.builds(Fault, times, st.sampled_from(["heal", "all back", "orphan"])),
    st.builds(Fault, times, blows, moment=st.sampled_from(sorted(faults.MOMENTS)), number=st.integers(0, 3)),
)


paces = st.sampled_from([USUAL, USUAL, SyncPace(2), SyncPace(3, overlap=1), SyncPace(3, scarce=True)])
any_disaster = st.builds(
    lambda seed, partition, pace, schedule, all_return: Disaster(
        DisasterConfig(5, partition, seed, pace=pace), "drawn", (),
        tuple(sorted(schedule, key=lambda fault: fault.at)), all_return=all_return,
    ),
    seed=st.integers(10**6, 10**9), partition=st.sampled_from(PARTITIONS), pace=paces,
    schedule=st.lists(any_fault, max_size=8), all_return=st.booleans(),
)  # fmt: skip


@settings(max_examples=8)
@given(any_disaster)
def test_any_list_of_faults_violates_nothing(disaster):
    faults.run(disaster)


@pytest.mark.soak
@settings(max_examples=200)
@given(any_disaster)
def test_any_of_many_lists_of_faults_violates_nothing(disaster):
    faults.run(disaster)


def test_a_violation_says_what_where_and_how_to_see_it_again():
    campaign, (_, seed) = Campaign(without="marks_decide"), CAUGHT["marks_decide"]
    said = campaign.describe(seed).splitlines()
    assert said[0].startswith(f"seed {seed}: I")
    assert "of the faults" in said[1]
    assert any(" begin " in line for line in said)
    assert said[-1] == f"again: diloco simulate protocol --first {seed} --seeds 1 --without marks_decide"


def test_shortening_keeps_the_violation_and_leaves_out_what_is_not_needed():
    plan = Campaign(without="marks_decide").disaster(CAUGHT["marks_decide"][1])
    harmless = Fault(39.0, "heal")
    short, violation = faults.shorten(replace(plan, faults=(*plan.faults, harmless)))
    assert harmless not in short.faults
    assert faults.violation_of(short) is not None
    assert isinstance(violation.args[1], World)


def test_the_same_seed_is_the_same_disaster_in_every_process():
    script = (
        "from diloco.simulate.virtual import faults\n"
        "for seed in (1, 2, 3, 5): print(*faults.run(faults.disaster(seed)).transcript.lines(), sep='\\n')"
    )
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    one, other = (subprocess.check_output([sys.executable, "-c", script], env=each) for each in environments)
    assert one == other and len(one) > 10_000


def test_a_scenario_that_goes_otherwise_says_how(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("islands A B\nrun 9\nexpect round 2 of A,B\n---\n   0.02  something else\n")
    with pytest.raises(scenario.Unmet, match="A,B commit round 2 of A,B = 2a"):
        scenario.check(path)
    scenario.main(["--write", str(path)])
    scenario.check(path)
    path.write_text(path.read_text().replace("of A,B\n---", "of A\n---"))
    with pytest.raises(scenario.Unmet, match="expect round 2 of A: it is A,B"):
        scenario.check(path)


def test_a_scenario_whose_rule_is_not_needed_is_no_scenario(tmp_path):
    path = tmp_path / "needless.txt"
    path.write_text("islands A B\nwithout done_is_durable violation I1\nrun 5\n---\n")
    with pytest.raises(scenario.Unmet, match="I1 should be violated"):
        scenario.check(path)


def test_from_the_command_line(command):
    good = command("simulate", "protocol", "--seeds", "3", "--islands", "3", "--jobs", "2")
    assert good.code == 0, good.err
    assert "3 seeds from 0:" in good.out and "0 violations" in good.out
    _, seed = CAUGHT["marks_decide"]
    bad = command("simulate", "protocol", "--first", seed, "--seeds", "1", "--without", "marks_decide")
    assert bad.code == 1
    assert f"again: diloco simulate protocol --first {seed} --seeds 1 --without marks_decide" in bad.out
    assert "1 violations" in bad.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run.yaml"], "how are the islands connected? Add --link 20mbit,80ms, or --topology FILE"),
        (["protocol", "--without", "gravity"], "the rules are adoption_survives_retries"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(command, arguments, complaint):
    assert complaint in command.refused("simulate", *arguments)
