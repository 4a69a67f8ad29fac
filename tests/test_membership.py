"""When islands launch, wait and go on: fragments, phases by wall time, the end of the data. Over real rounds."""

import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from alone import train
from team import HERE, PATIENT, Team, deadline, introduced, one_step_done, own_folder, side_by_side, wait_until

from diloco.bench.team import Heard, driver_for
from diloco.comm.transport.memory import MemoryNetwork
from diloco.elastic.protocol.ranges import size
from diloco.elastic.runtime.work import StepsDone
from diloco.report.sinks import Events
from diloco.train.rounds import Rounds
from diloco.train.sync import SyncLoop
from diloco.train.trainer import Trainer


@contextmanager
def two_islands(config):
    """Of islands that hold the same model: by name, with their drivers."""
    network, names = MemoryNetwork(), ("A", "B")
    trainers = {name: Trainer(own_folder(config, name), HERE, Events([Heard()])) for name in names}
    drivers = {name: driver_for(trainers[name], names, network.transport(name)) for name in names}
    rounds = {name: Rounds(driver, config, str) for name, driver in drivers.items()}
    yield {n: SyncLoop(trainers[n].shards, HERE, config, rounds[n], lambda: None) for n in names}, drivers
    for each in rounds.values():
        each.session.close()


def contribute(island: SyncLoop, fragment: int, late: Callable[[], bool]) -> bool:
    """Whether it was launched, and its round is over."""
    return island.policy.launch(fragment) and island.wait_out(island.policy.finish(fragment), late)


def test_an_island_that_waits_for_one_fragment_takes_part_in_the_rounds_of_others(small):
    """A has launched fragment 1 only, and 0 is due: without its offer for that, both would wait for ever."""
    config = small(sync={"every": 6, "fragments": 2}, elastic=PATIENT)
    late, orders = deadline(60), {"A": [1], "B": [0, 1]}

    def take_part(name: str, island: SyncLoop) -> list[bool]:
        island.trained((), 100)
        return [contribute(island, fragment, late) for fragment in orders[name]]

    with two_islands(config) as (islands, drivers):
        over = side_by_side(drivers, lambda name: take_part(name, islands[name]))
        assert over == {"A": [True], "B": [True, True]}


def test_left_behind_with_one_fragment_an_island_finishes_its_phase(small):
    """What it has trained counts on top of the others' clock: it is not made to launch at once, and wait."""
    config = small(sync={"every": 6}, inner={"steps": 60}, elastic={"silence_s": 2.0})
    with two_islands(config) as (islands, drivers), introduced(drivers):
        slow, fast = islands["A"], islands["B"]
        for _ in range(2):
            slow.trained((), 10)
        for _ in range(6):
            fast.trained((), 10)
        assert contribute(fast, 0, lambda: False) and fast.policy.step == 6
        wait_until(lambda: slow.policy.follow() and slow.policy.step != 2)
        assert slow.policy.step == 6 + 2


def test_progress_that_a_later_round_contains_counts_once(small):
    """Its own round went by without it, so nothing is in flight when it is contained after all."""
    config = small(sync={"every": 6}, inner={"steps": 60}, elastic={"silence_s": 2.0})
    with two_islands(config) as (islands, drivers), introduced(drivers):
        island = islands["A"]
        for _ in range(6):
            island.trained((), 10)
        island.policy.launch(0)
        island.policy.in_flight.clear()
        for _ in range(2):
            island.trained((), 10)
        wait_until(lambda: island.policy.follow() and drivers["A"].applied.updates == 1)
        assert island.policy.step == 6 + 2


def test_samples_behind_late_progress_are_held_besides_those_asked_for(small):
    config = small(sync={"every": 6}, elastic=PATIENT)
    with two_islands(config) as (islands, drivers), introduced(drivers):
        island, node = islands["A"].rounds, drivers["A"].node
        for samples in (((0, 8),), ((8, 16),)):  # two phases that no round contains
            island.session.start(0, torch.zeros(island.fragments.count), StepsDone(8, samples))
        island.refresh()
        island.session.request_samples(40)
        wait_until(lambda: node.own.want == 40 + 16)
        island.session.request_samples(50)
        wait_until(lambda: node.own.want == 50 + 16)


def test_an_island_without_samples_waits_no_longer_than_it_has_none(small):
    """A gives what it has. When the round of fragment 0 brings it new samples, it goes on with them: the round of 1,
    which waits for B, is not to be waited for, or B might wait for what A would train."""
    config = small(sync={"every": 6, "fragments": 2}, inner={"steps": 60}, elastic=PATIENT, evaluate={"every": 0})
    team, late = Team(config), deadline(30)
    drivers = team.drivers()

    def live(name: str) -> int:
        membership = one_step_done(team, drivers, name, late)
        if name == "A":
            while membership.draw(8, 8):
                pass
            membership.without_samples(8, late)
        else:
            contribute(membership, 0, late)
        return size(membership.pool)

    assert side_by_side(drivers, live)["A"] == 2 * 6 * 8
    assert not late()


def test_at_the_end_of_the_data_nobody_waits_for_rounds_that_cannot_come(small, tmp_path):
    """B has done the rounds of 1 and 2 without A, which owes them now, and 0 is due, of which nobody has anything."""
    (tmp_path / "a.txt").write_text("x" * (97 * 32))
    data = {"source": "text", "path": str(tmp_path / "a.txt"), "epochs": 1, "validation": 0.0}
    elastic = {**PATIENT, "min_islands": 1}
    config = small(data=data, sync={"every": 3, "fragments": 3}, elastic=elastic, evaluate={"every": 0})
    team, late, done = Team(config), deadline(30), threading.Event()
    drivers = team.drivers()

    def live(name: str) -> bool:
        membership = one_step_done(team, drivers, name, late)
        while membership.draw(8, 8):
            pass
        for fragment in (0,) if name == "A" else (0, 1, 2):
            assert contribute(membership, fragment, late)
        if name == "B":
            done.set()
        else:
            assert done.wait(60)
            membership.without_samples(8, late)
            assert membership.policy.owes(1) and membership.policy.owes(2)
        return membership.finished

    assert side_by_side(drivers, live)["A"]
    assert not late()


def test_at_the_end_of_the_data_every_fragment_has_all_of_it(small, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 300)
    data = {"source": "text", "path": str(tmp_path / "a.txt"), "epochs": 1, "validation": 0.0}
    elastic, sync = {**PATIENT, "grace_s": 60.0}, {"every": 4, "fragments": 3}
    team = Team(small(data=data, sync=sync, inner={"steps": 1000}, elastic=elastic, evaluate={"every": 0}))
    team.run()
    for trainer in team.trainers.values():
        assert trainer.finished and trainer.step_count < 1000
        assert not any(trainer.rounds.session.owes(fragment) for fragment in range(3))
        assert not any(trainer.sync.policy.owes(fragment) for fragment in range(3))


@pytest.mark.parametrize("sync", [{}, {"delay": 2}, {"apply": "eager"}], ids=str)
def test_by_time_islands_of_any_speed_come_to_each_round_and_end_together(small, sync):
    config = small(sync={"every": "300ms", **sync}, inner={"steps": 60}, elastic=PATIENT, evaluate={"every": 0})
    team = Team(config, pauses_s=(0.01, 0.04))  # 30 and 7 steps in a phase, at most
    team.run()
    assert all(proposal.islands == ("A", "B") for proposal in team.rounds)
    clock = [proposal.step for proposal in team.rounds]
    assert clock == sorted(set(clock)) and clock[-1] == 60 and len(clock) > 1
    for before, proposal in zip([0, *clock], team.rounds, strict=False):  # what most of them have done, up to the end
        steps = max(contribution.offer.steps for contribution in proposal.contributions)
        assert proposal.step == min(60, before + steps)
    fast, slow = (team.trainers[name].sync for name in team.names)
    assert fast.finished and slow.finished
    assert fast.policy.steps >= slow.policy.steps >= len(clock)


def test_by_time_whoever_comes_last_does_not_wait_for_those_who_are_gone(small):
    """A does all steps. B's result of the last round comes when it has trained on: that is not launched any more."""
    sync = {"every": "1h", "apply": "eager"}
    config = small(sync=sync, inner={"steps": 5}, elastic=PATIENT, evaluate={"every": 0})
    team, late = Team(config), deadline(30)
    drivers = team.drivers()

    def live(name: str) -> bool:
        membership = one_step_done(team, drivers, name, late)
        if name == "B":
            membership.policy.launch(0)
        for _ in range(4):
            assert membership.draw(8, 8)
        membership.sync_if_due(late)
        return membership.finished

    assert side_by_side(drivers, live) == {"A": True, "B": True}
    assert not late()


def test_by_time_islands_lease_what_they_can_train_in_a_phase(small, monkeypatch):
    """A guess that was far too small ends the first phases early; then they know better."""
    monkeypatch.setattr("diloco.config.schema.GUESSED_STEPS", 1)
    config = small(sync={"every": "2s"}, inner={"steps": 30}, elastic=PATIENT, evaluate={"every": 0})
    team = Team(config)
    team.run()
    steps = [max(contribution.offer.steps for contribution in proposal.contributions) for proposal in team.rounds]
    assert steps[0] == 2 and max(steps) > 2
    assert team.rounds[-1].step == 30


def test_by_time_whoever_comes_back_in_a_phase_ends_it_with_the_others(small):
    config = small(sync={"every": "1h"}, elastic=PATIENT)
    with two_islands(config) as (islands, drivers):
        models = {name: Trainer(own_folder(config, name), HERE, Events([Heard()])).shards for name in islands}

        def come_back(name: str) -> None:
            stayed = islands[name]
            stayed.trained((), 100)
            assert contribute(stayed, 0, deadline(60))
            wait_until(lambda: stayed.facts()["since_s"] > 0.2)
            before = stayed.facts()["since_s"]
            back = SyncLoop(models[name], HERE, config, stayed.rounds, lambda: None)
            assert before <= back.facts()["since_s"] < 3600
            saved = {**back.facts(), "since_s": 0.0}
            back.set_facts({**saved, "updates": 0})  # of a phase before
            assert before <= back.facts()["since_s"] < 3600
            back.set_facts(saved)  # of this one: a pause, in which nobody trains
            assert back.facts()["since_s"] < before

        side_by_side(drivers, come_back)


def test_alone_by_time_a_run_ends_where_it_should(small):
    life = train(small(sync={"every": "50ms"}, inner={"steps": 25}))
    trainer = life.trainer
    assert trainer.finished and trainer.step_count == trainer.sync.policy.steps == 25
    rounds = [event["step"] for event in life.events("round") if event["contributors"]]
    assert rounds == sorted(set(rounds)) and rounds[-1] == 25
