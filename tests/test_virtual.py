"""Many islands in virtual time: the protocol's own nodes, modelled times, invariants at every commit."""

import json
from dataclasses import replace

import pytest

from diloco.bench import virtual_newcomers
from diloco.bench.newcomers import Cell
from diloco.cli.app import app
from diloco.elastic.runtime.reducing import FLAT_UP_TO
from diloco.errors import ConfigError
from diloco.plan.predict import Host, LinkModel
from diloco.simulate.virtual import modelled
from diloco.simulate.virtual.allreduce import flat, two_level
from diloco.simulate.virtual.faults import both_ways
from diloco.simulate.virtual.modelled import VirtualConfig, name_of
from diloco.simulate.virtual.outcome import COUNTS, Churn, rows, simulate
from diloco.simulate.virtual.reductions import Reductions

FEW = VirtualConfig(
    4, LinkModel(100e6, 100e6, 0.04), values=25_000_000, phase_s=60.0, spread=0.0, jitter=0.0, seconds=600.0
)
CHURN = VirtualConfig(70, FEW.line, values=25_000_000, phase_s=40.0, mtbf_s=25.0, back_s=60.0, seconds=220.0, seed=3)


def test_a_period_is_steps_encoding_agreement_reduction_and_applying():
    host = Host()
    outcome = simulate(replace(FEW, host=host))
    encode_ns, decode_ns = host.codec_ns["int8"]
    own_s = 1e-9 * FEW.values * (host.cut_ns + encode_ns + decode_ns + host.apply_ns + host.digest_ns)
    expected_s = FEW.phase_s + own_s + flat(4, FEW.values, "int8").seconds(FEW.line, 1.0) + 4 * FEW.line.delay_s
    assert outcome.period_s == pytest.approx(expected_s, abs=0.15)
    assert outcome.utilisation == pytest.approx(60 / expected_s, abs=0.02)
    assert (outcome.contributors, outcome.at_newest_head, outcome.failed_attempts) == (1.0, 1.0, 0)
    assert outcome.bytes_a_round == flat(4, FEW.values, "int8").sent


def test_a_slower_link_costs_what_it_should():
    slow = simulate(replace(FEW, line=LinkModel(10e6, 10e6, 0.04)))
    fast = simulate(FEW)
    assert slow.reduce_s == pytest.approx(10 * fast.reduce_s, rel=0.05)
    night = simulate(replace(FEW, diurnal=0.5))
    assert night.reduce_s > 1.3 * fast.reduce_s


def test_many_that_come_and_go_keep_every_invariant_and_the_same_seed_tells_the_same():
    first, again = simulate(CHURN), simulate(CHURN)
    assert first.failures > 5 and first.rounds > 2
    assert replace(first, wall_s=0.0) == replace(again, wall_s=0.0)
    assert first.at_newest_head > 0.9 and first.branches == 0


def test_heartbeats_that_are_no_news_change_nothing(monkeypatch):
    """Taken in without asking the node, or by the node: the run is the same to the last figure."""
    setting = replace(CHURN, seconds=120.0)
    quick = simulate(setting)
    monkeypatch.setattr(modelled, "hears_no_news", lambda *heard: False)
    assert replace(simulate(setting), wall_s=0.0) == replace(quick, wall_s=0.0)


def test_a_lost_coordinator_is_followed_by_the_next():
    churn = Churn(replace(CHURN, mtbf_s=None))
    churn.timeline.at(20.0, lambda: churn.world.crash(name_of(0), silent=True))
    churn.timeline.at(21.0, lambda: churn.world.crash(name_of(1)))
    churn.run()
    assert churn.leader == name_of(2)
    assert len(churn.commits) > 3 and set(churn.contributors[1:]) == {68}


def test_links_can_be_cut_and_islands_stopped_in_virtual_time_too():
    churn = Churn(replace(FEW, seconds=900.0))
    first, second, *others = FEW.names
    churn.timeline.at(100.0, lambda: churn.world.sever(both_ways([first], [second, *others])))
    churn.timeline.at(300.0, churn.world.heal)
    churn.timeline.at(400.0, lambda: churn.world.stop(second))
    churn.timeline.at(500.0, lambda: churn.world.resume(second))
    churn.run()
    assert {3, 4} <= set(churn.contributors) and churn.contributors[-1] == 4
    assert len({life.node.state.head for life in churn.world.lives.values()}) == 1


@pytest.mark.parametrize(
    "setting", [FEW, pytest.param(replace(CHURN, mtbf_s=60.0, seconds=800.0), marks=pytest.mark.soak)]
)
def test_a_run_that_stands_still_is_told_of_whoever_fails_meanwhile(setting, monkeypatch):
    monkeypatch.setattr(Reductions, "_finish", lambda reductions, reduction, member: None)
    assert "no round from 0 s" in simulate(setting).standstill


def test_a_command_on_a_run_that_stands_still_fails(monkeypatch, capsys):
    monkeypatch.setattr(Reductions, "_finish", lambda reductions, reduction, member: None)
    with pytest.raises(SystemExit, match="1"):
        virtually("--minutes", "10")
    assert "I4 does not hold" in capsys.readouterr().out


def test_a_run_may_end_with_nobody_left():
    outcome = simulate(replace(FEW, mtbf_s=1.0, back_s=1e6, seconds=60.0))
    assert outcome.failures == FEW.islands and outcome.at_newest_head == 0


def test_two_levels_have_few_streams_and_nearly_the_same_bytes():
    whole, parts = flat(1000, 150_000_000, "int8"), two_level(1000, 150_000_000, "int8")
    assert whole.connections == 2 * 999 and parts.connections < 130
    assert parts.sent < 1.1 * whole.sent
    assert sum(level.frames for level in parts.levels) < whole.levels[0].frames / 10
    line = LinkModel(100e6, 100e6, 0.04)
    assert parts.seconds(line, 1.0) < 1.1 * whole.seconds(line, 1.0)
    many_whole, many_parts = (plan(10_000, 150_000_000, "int8").seconds(line, 1.0) for plan in (flat, two_level))
    assert many_parts < many_whole


def test_many_reduce_in_two_levels_unless_told_otherwise():
    usual = simulate(replace(CHURN, mtbf_s=None))
    assert usual.rounds > 3 and usual.connections < CHURN.islands
    whole = simulate(replace(CHURN, mtbf_s=None, two_level=False))
    assert whole.connections > 2 * (FLAT_UP_TO - 1)
    assert FEW.reduces_in_two_levels(FLAT_UP_TO + 1) and not FEW.reduces_in_two_levels(FLAT_UP_TO)


def test_what_is_computed_says_where_flat_ends():
    computed = {row.islands: row for row in rows(FEW)}
    assert computed[1000].flat is not None and computed[3000].flat is None
    assert computed[1000].heartbeats_s == 1_000_000 and computed[1000].front_heartbeats_s == 8000


def test_hosts_that_need_longer_wait_longer():
    assert simulate(replace(FEW, host=Host())).period_s > simulate(FEW).period_s


def virtually(*changes: str) -> None:
    """Of an option that is given twice the last one counts."""
    usual = "--islands 8 --link 50mbit,20ms --params 10M --phase 30s --minutes 5 --mtbf 1min --back 1min --diurnal 30%"
    app(["simulate", "virtual", *usual.split(), *changes], standalone_mode=False)


def test_the_command_tells_people_and_machines(capsys):
    virtually()
    told = capsys.readouterr().out
    assert "invariants hold" in told and "where one butterfly" in told
    virtually("--two-level", "--json")
    plain = json.loads(capsys.readouterr().out)
    assert plain["islands"] == 8 and len(plain["computed"]) == len(COUNTS)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("--islands 20000", "2 to 10000"),
        ("--islands 1025 --one-level", "at most 1024"),
        ("--link 0mbit", "carries nothing"),
        ("--link=-5mbit", "--link -5mbit"),
        ("--mtbf 0s", "--mtbf 0s: must be above 0"),
        ("--diurnal 50", "--diurnal 50"),
        ("--codec int5", "choose one of"),
        ("--phase soon", "--phase soon"),
    ],
)
def test_what_cannot_be_is_refused(wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        virtually(*wrong.split())


def test_the_command_line_leads_there(command):
    assert "2 to 10000" in command.refused("simulate", "virtual", "--islands", "1")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["virtual", "some.yaml"], "unexpected extra argument"),
        (["virtual", "--kill", "1@5s"], "No such option: --kill"),
        (["protocol", "--link", "5mbit"], "No such option: --link"),
        (["some.yaml", "--mtbf", "1min"], "No such option: --mtbf"),
        (["islands", "some.yaml", "--one-level"], "No such option: --one-level"),
    ],
)
def test_options_of_another_mode_are_refused(command, words, reason):
    said = command("simulate", *words)
    assert said.code == 2 and reason in said.err


@pytest.mark.parametrize("kill", virtual_newcomers.KILLS)
def test_a_newcomer_is_in_soon_and_stays(kill):
    joined = virtual_newcomers.joined(Cell(250_000, 2e6), 1.0, kill)
    assert joined["rounds_until_in"] <= 3 and joined["share_after"] >= 0.8


def test_a_newcomer_alone_on_a_slow_link_costs_the_others_little():
    """It fetches every result while rounds go on without it, and nobody waits for that."""
    alone = virtual_newcomers.slow_alone(Cell(250_000, 2e7), 1.0)
    assert alone["ratio"] <= 1.1 and alone["rounds_with_it"] > 0
