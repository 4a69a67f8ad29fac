"""The published model of bandwidth, and `diloco plan` as people ask it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.bench.plan import TARGETS, against_table
from diloco.cli.plan import plan
from diloco.errors import ConfigError
from diloco.plan.utilisation import GRID_GBIT, METHODS, Training, bandwidth_for, utilisation
from diloco.units import parse_share

GIVEN = {"layers": "24", "step_time": "0.1s", "params": "1B", "every": "100", "method": "overlap", "bits": "4"}
ISLANDS = {"islands": 4, "link": "1gbit,40ms"}


# the published model


def test_the_published_table_comes_out():
    checks, figures = against_table()
    assert [check.name for check in checks] == ["plan.cells_exact", "plan.cells_within_one"]
    assert all(check.holds for check in checks), figures
    assert sum(len(row) for row in figures["grid steps off"].values()) == 50


trainings = st.builds(
    Training,
    layers=st.integers(1, 40),
    step_s=st.floats(0.01, 10),
    params=st.integers(10**6, 10**11),
    every=st.integers(1, 200),
    method=st.sampled_from(METHODS),
    bits=st.sampled_from([1.0, 4.0, 16.0]),
)


@settings(max_examples=60, deadline=None)
@given(training=trainings)
def test_more_bandwidth_never_lowers_utilisation(training):
    found = utilisation(training, GRID_GBIT)
    assert np.all(np.diff(found) >= -1e-9)
    assert np.all(found > 0) and np.all(found <= 1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(training=trainings, more=st.integers(1, 300))
def test_synchronising_less_often_or_in_fewer_bits_never_needs_more(training, more):
    def need(**changed):
        other = Training(**{**vars(training), **changed})
        return [rate or math.inf for rate in bandwidth_for(other, TARGETS)]

    now = need()
    assert all(a <= b for a, b in zip(need(every=training.every + more), now, strict=True))
    assert all(a <= b for a, b in zip(need(bits=training.bits / 2), now, strict=True))


def test_what_no_rate_of_the_grid_reaches_is_not_a_number():
    assert bandwidth_for(Training(24, 0.001, 10**12, 1, "data-parallel"), [0.99]) == [None]


def test_long_phases_are_not_gone_through_step_by_step():
    (rate,) = bandwidth_for(Training(24, 0.1, 10**9, 10**12, "overlap", 4), [0.99])
    assert rate == GRID_GBIT[0]


# the command line


def test_the_bare_question_is_answered_as_published(capsys):
    plan(**GIVEN, target="50%,80%,90%,95%,99%", json=True)
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["gbit_per_s"]
    assert [round(rate, 1) for rate in answer["gbit_per_s"]] == [0.4, 1.0, 1.7, 2.0, 2.9]


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: tiny}\nisland: {device: cpu}\nsync: {every: 2}\n")
    return path


WRONG = {
    "nothing": ({}, "plan: give a CONFIG, or --layers, --step-time and --params"),
    "half": ({**GIVEN, "params": None}, "--params is missing: without a CONFIG give"),
    "both": ({"config": "x.yaml", **GIVEN, **ISLANDS}, "--layers is for a plan without CONFIG: leave it out"),
    "links": ({**GIVEN, **ISLANDS}, "--islands belongs to a CONFIG: name one"),
    "layers": ({**GIVEN, "layers": "0"}, "--layers 0: write a whole number from 1 to 10000"),
    "time": ({**GIVEN, "step_time": "fast"}, "--step-time fast: write a duration such as 80ms"),
    "no time": ({**GIVEN, "step_time": "0s"}, "--step-time 0s: must be above 0"),
    "params": ({**GIVEN, "params": "1.5"}, "--params 1.5: '1.5' is not a whole number"),
    "too many": ({**GIVEN, "params": "1e300T"}, "--params 1e300T: must be finite"),
    "every": ({**GIVEN, "every": "-1"}, "--every -1: write a whole number"),
    "method": ({**GIVEN, "method": "magic"}, "--method magic: there are data-parallel, diloco"),
    "bits": ({**GIVEN, "bits": "nan"}, "--bits nan: must be above 0"),
    "target": ({**GIVEN, "target": "95"}, "--target 95: write a share above 0% and below 100%, such as 95%"),
    "all": ({**GIVEN, "target": "100%"}, "--target 100%: write a share above 0%"),
    "no file": ({"config": "nowhere.yaml", **ISLANDS}, "nowhere.yaml: no such file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_name_the_option(case):
    asked, complaint = WRONG[case]
    with pytest.raises(ConfigError, match="^" + re.escape(complaint)) as caught:
        plan(**asked)
    assert "\n" not in str(caught.value)


def test_without_a_link_the_rate_that_is_needed_is_told_in_lines_that_no_pipe_wraps(command, tiny):
    said = command("plan", tiny)
    assert said.code == 0 and "2 islands, no link given" in said.out and "needs for 95 %" in said.out
    assert "not reachable" in command("plan", tiny, "--link", "10mbit,10s", "--set", "sync.every=1").out
    rows = [line for line in said.out.splitlines() if line.startswith("│")]
    assert rows and all(row.split("│")[2].strip() for row in rows), "each row is one line"


WRONG_LINKS = {
    "link": ({"link": "20"}, "--link 20: the unit is missing"),
    "no such link": ({"link": "1e300gbit"}, "--link 1e300gbit: must be finite"),
    "rate": ({"max_up": "0mbit"}, "--max-up 0mbit: must be above 0"),
    "accelerator": ({"accelerator": "abacus"}, "--accelerator abacus: there are h200, "),
    "profile": ({"profile": [Path("nowhere.json")]}, "--profile nowhere.json: no such file; make one with"),
}


@pytest.mark.parametrize("case", WRONG_LINKS)
def test_mistakes_about_links_name_the_option(case, tiny):
    changed, complaint = WRONG_LINKS[case]
    with pytest.raises(ConfigError, match="^" + re.escape(complaint)):
        plan(tiny, **ISLANDS | changed)


def test_a_plan_for_people(command, tiny):
    told = command("plan", tiny, "--islands", "4", "--link", "50mbit,20ms", "--max-up", "10mbit")
    assert told.code == 0, told.err
    assert "4 islands, 10 mbit/s up, 50 mbit/s down, 20 ms one way" in told.out
    assert told.out.splitlines()[-1].startswith("take sync: {")


def test_a_plan_for_programs(tiny, capsys):
    plan(tiny, ["sync.codec=int4"], **ISLANDS, target="90%,95%", json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["given"]["sync"] == {"every": 2, "codec": "int4", "fragments": 1, "delay": 0, "apply": "rebase"}
    assert len(answer["gbit_per_s"]) == 2
    assert answer["chosen"]["utilisation"] >= 0.9 > answer["given"]["utilisation"]
    memory = answer["memory_bytes"]
    assert memory["accelerator"] > memory["parameters"] == 4 * answer["model"]["parameters"]
    assert answer["why"].startswith("take sync: {")


def test_without_a_link_the_answer_is_which_one_is_needed(tiny, capsys):
    plan(tiny, ["sync.every=50"], islands=4, target="80%", json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["link"] is None and answer["chosen"] is None
    assert f"needs {1000 * answer['gbit_per_s'][0]:.3g} mbit/s up and down for 80 %" in answer["why"]


@pytest.mark.parametrize(("text", "share"), [("95%", 0.95), (" 99.5% ", 0.995), ("0.1%", 0.001)])
def test_shares(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "0%", "100%", "-5%", "95", "0.95", "nan%", "1e3%", "five%"])
def test_no_shares(text):
    with pytest.raises(ValueError, match="a share"):
        parse_share(text)
