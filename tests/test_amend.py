"""Settings that change while a run goes on: signed by its owner, contained in one record, heeded by all from there."""

import json
import threading
from dataclasses import replace

import pytest
from alone import HERE
from nodes import OFFER, beat, begin, from_disk, options, said
from records import record as any_record
from team import PATIENT, Team, side_by_side

from diloco.bench.team import Heard, driver_for
from diloco.comm.peers.identity import Identity
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import (
    Append,
    Begin,
    Collect,
    Done,
    Failed,
    FetchResult,
    Heartbeat,
    Note,
    Promise,
)
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.record import EMPTY, Amendment, Ballot, Head, Record
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode_message, encode_message
from diloco.elastic.runtime.driver import check as check_driver
from diloco.elastic.runtime.fetching import FetchedState
from diloco.errors import ConfigError, RecordInvalid, SaveError, TransferFailed
from diloco.report import events as reported
from diloco.report.board import Board
from diloco.report.events import Step, of_kind
from diloco.report.sinks import Events
from diloco.report.terminal import sentence
from diloco.run.join import options_for
from diloco.simulate.virtual.check import Checker, Violation
from diloco.simulate.virtual.faults import FIRST_STREAMING, amendments_of
from diloco.simulate.virtual.world import owner
from diloco.train import amend
from diloco.train.rounds import Rounds
from diloco.train.schedule import learning_rate
from diloco.train.trainer import Trainer

OWNER = owner().public_key.hex()
STATE = RunState(Head(0, 0, "0" * 64), ("A", "B"), Ledger(epoch=1000), owner=OWNER)
FIRST, SECOND = (Amendment.sign(owner(), number, json.dumps({"inner.lr": number})) for number in (1, 2))
BEAT = beat(hears=(0, 1))
FORGED = replace(FIRST, changes='{"inner.lr": 9}')


def record(state: RunState, amendment: Amendment | None) -> Record:
    return any_record(state, amendment=amendment)


# records and states


def test_amendments_are_folded_in_order():
    once = STATE.after(record(STATE, FIRST))
    twice = once.after(record(once, SECOND))
    assert twice.amendments == (FIRST, SECOND) and twice.is_of(OWNER)
    assert record(STATE, FIRST).digest != record(STATE, None).digest


@pytest.mark.parametrize(
    "amendment", [SECOND, FORGED, replace(FIRST, signature="no hex"), replace(FIRST, signature="")], ids=str
)
def test_a_record_with_any_other_amendment_is_refused(amendment):
    with pytest.raises(RecordInvalid, match="not the owner's next change"):
        STATE.after(record(STATE, amendment))


def test_only_the_key_of_the_run_signs(tmp_path):
    somebody = Identity.load(tmp_path / "other.key")
    assert FIRST.is_by(OWNER) and not Amendment.sign(somebody, 1, FIRST.changes).is_by(OWNER)


def test_where_nobody_owns_the_run_nobody_changes_it():
    ownerless = replace(STATE, owner="")
    with pytest.raises(RecordInvalid):
        ownerless.after(record(ownerless, FIRST))


@pytest.mark.parametrize(
    "wrong", [{"amendments": (FORGED,)}, {"amendments": (SECOND,)}, {"amendments": (FIRST, FIRST)}, {"owner": "ab"}]
)
def test_a_state_from_a_peer_is_not_taken_if_somebody_else_has_amended_it(wrong):
    state = replace(STATE, amendments=(FIRST,))
    assert FetchedState(state, {}, "", {}).of(OWNER).state == state
    with pytest.raises(TransferFailed, match="somebody else than the run's owner"):
        FetchedState(replace(state, **wrong), {}, "", {}).of(OWNER)


# one node


def coordinator(heeding: Options | None = None, **changes) -> Node:
    made = Node("A", STATE, heeding or options(**changes), now=0.0, incarnation=1)
    made.receive("B", BEAT, 0.0)
    made.tick(0.0)
    return made


def member(heeding: Options | None = None) -> Node:
    made = Node("B", STATE, heeding or options(), now=0.0, incarnation=1)
    made.receive("A", BEAT, 0.0)
    return made


def promise(amendment: Amendment | None) -> Promise:
    return Promise(STATE.key, 1, 1, 0, None, amendment)


def test_a_change_is_begun_at_once_without_waiting_for_a_round():
    leads = coordinator()
    assert said(leads.receive("B", promise(None), 0.1), Begin) == []
    effects = leads.receive("B", promise(FIRST), 0.2)
    (begun,) = said(effects, Begin)
    assert begun.proposal.amendment == FIRST and begun.proposal.contributions == ()
    from_disk(leads, effects, 0.3)
    effects = leads.receive("B", Done(STATE.key, begun.ballot, EMPTY), 0.3)
    assert [effect.record.proposal.amendment for effect in effects if isinstance(effect, Append)] == [FIRST]
    assert leads.state.amendments == (FIRST,)


def test_when_the_clock_is_at_its_end_nothing_changes_but_the_end():
    """Others may have seen the run end, and be gone."""
    assert said(coordinator(steps=0).receive("B", promise(FIRST), 0.1), Begin) == []
    assert said(coordinator(steps=1).receive("B", promise(FIRST), 0.1), Begin) != []

    def amended(now: Options, state: RunState) -> Options:
        return replace(now, steps=len(state.amendments))

    (begun,) = said(coordinator(options(steps=0, amended=amended)).receive("B", promise(FIRST), 0.1), Begin)
    assert begun.proposal.amendment == FIRST, "it prolongs the run"


@pytest.mark.parametrize("amendment", [FORGED, SECOND])
def test_who_brings_a_change_that_is_not_the_owners_next_one_is_excluded(amendment):
    effects = coordinator().receive("B", promise(amendment), 0.1)
    assert [effect.peer for effect in effects if isinstance(effect, Note) and effect.kind == "excluded"] == ["B"]
    assert said(effects, Begin) == []


def test_a_coordinator_that_proposes_a_forged_change_is_excluded():
    island = member()
    good = replace(begin(Ballot(1, "A", 0)), key=STATE.key, proposal=record(STATE, FIRST).proposal)
    assert said(island.receive("A", good, 0.1), Done)
    bad = replace(good, ballot=Ballot(2, "A", 0), proposal=record(STATE, FORGED).proposal)
    effects = island.receive("A", bad, 0.2)
    assert not said(effects, Done, to="A") and [note.peer for note in notes(effects, "excluded")] == ["A"]


def test_an_island_brings_what_comes_next_and_refuses_what_its_owner_has_not_signed():
    island = member()
    island.receive("A", Collect(STATE.head, 1), 0.1)
    assert [note.kind for note in island.amend(FORGED, 0.2) if isinstance(note, Note)] == ["refused"]
    assert said(island.amend(SECOND, 0.2), Promise)[0].amendment is None
    assert said(island.amend(FIRST, 0.3), Promise)[0].amendment == FIRST
    later = STATE.after(record(STATE, FIRST))
    island.receive("A", beat(later.head, hears=(0, 1)), 0.35)
    island.caught_up(later, 0.4)
    assert said(island.receive("A", Collect(later.head, 2), 0.5), Promise)[0].amendment == SECOND


def test_what_a_peer_has_is_brought_along_by_those_that_are_at_the_head():
    """One that is always behind could not bring it to a round itself."""
    island = member(options())
    island.receive("A", Collect(STATE.head, 1), 0.1)
    (promised,) = said(island.receive("C", beat(sequence=2, amendment=FIRST), 0.2), Promise)
    assert promised.amendment == FIRST
    assert not said(island.receive("C", beat(sequence=3, amendment=FIRST), 0.3), Promise), "once is enough"
    assert said(island.tick(5.0), Heartbeat)[0].amendment == FIRST
    forged = replace(FIRST, changes='{"inner.lr":1}')
    other = member(options())
    other.receive("A", Collect(STATE.head, 1), 0.1)
    assert not said(other.receive("C", beat(sequence=2, amendment=forged), 0.2), Promise)
    stubborn = member(options(objection=lambda state, amendment: "cannot"))
    stubborn.receive("A", Collect(STATE.head, 1), 0.1)
    assert not said(stubborn.receive("C", beat(sequence=2, amendment=FIRST), 0.2), Promise)


def test_options_follow_the_state(small):
    config = small()
    changes = {"elastic.min_islands": 3, "elastic.straggler": 9.0, "inner.steps": 99, "outer.lr": 0.25}
    state = replace(STATE, amendments=(Amendment(1, json.dumps(changes)),))
    node = Node("A", STATE, options_for(config), now=0.0)
    node.caught_up(replace(state, head=Head(1, 1, "1" * 64)), 0.1)
    assert (node.own.options.min_islands, node.own.options.straggler, node.own.options.steps) == (3, 9.0, 99)
    assert node.own.options.want == options_for(config).want


# changes that an island's diloco does not know

UNKNOWN = [
    '{"inner.lr":-1}', '{"inner.newer":1}', '{"sync.codec":"int4"}', '{"seed":1}', '["inner.lr"]', '"inner.lr"', "1",
    "no JSON", "[" * 8000, '{"inner.\\u0000":1}',
]  # fmt: skip


def signed(changes: str) -> Amendment:
    return Amendment.sign(owner(), 1, changes)


def begun_by(*effects) -> list[Amendment | None]:
    return [message.proposal.amendment for message in said(list(effects), Begin)]


def notes(effects, kind: str) -> list[Note]:
    return [effect for effect in effects if isinstance(effect, Note) and effect.kind == kind]


@pytest.mark.parametrize("changes", UNKNOWN, ids=lambda changes: changes[:20])
def test_a_change_that_does_not_work_here_is_not_brought_proposed_or_confirmed(small, changes):
    amendment, heeding = signed(changes), options_for(small())
    island = member(heeding)
    island.receive("A", Collect(STATE.head, 1), 0.1)
    effects = island.amend(amendment, 0.2)
    assert "use the same diloco" in notes(effects, "refused")[0].text and said(effects, Promise)[0].amendment is None

    ballot = replace(begin(Ballot(2, "A", 0)), key=STATE.key, proposal=record(STATE, amendment).proposal)
    effects = island.receive("A", ballot, 0.3)
    (failed,) = said(effects, Failed)
    assert "change 1 of the run's settings" in failed.reason and failed.amendment and not said(effects, Done)
    assert decode_message(encode_message(failed)) == failed
    assert not notes(effects, "excluded")

    leads = coordinator(heeding)
    first, again = (leads.receive("B", promise(amendment), at) for at in (0.1, 0.2))
    assert begun_by(*first, *again) in ([], [None])  # to give samples; never with it
    assert [note.peer for note in notes([*first, *again], "refused")] == ["A"]
    assert not notes([*first, *again], "excluded")


def test_a_change_waits_while_somebody_cannot_follow_it_and_rounds_go_on():
    leads = coordinator(min_islands=1)
    (begun,) = said(leads.receive("B", promise(FIRST), 0.1), Begin)
    refusal = Failed(STATE.key, begun.ballot, "", "change 1: use the same diloco", amendment=True)
    effects = [*leads.receive("B", refusal, 0.2), *leads.receive("B", refusal, 0.2)]
    assert [(note.peer, note.kind) for note in effects if isinstance(note, Note)] == [("B", "refused")]
    later = [effect for at in range(3, 30) for effect in leads.tick(at / 10)]
    assert FIRST not in begun_by(*later) and not notes(later, "excluded")
    again = leads.receive("B", replace(promise(FIRST), incarnation=2, term=leads.own.term.number), 3.0)
    assert begun_by(*again) == [FIRST]  # it has come back, perhaps with another diloco


def test_all_who_have_promised_are_asked_not_only_who_contributes():
    leads = coordinator()
    leads.receive("B", promise(None), 0.1)
    leads.offer(OFFER, 0.2)  # and B trains on: from 0.3 on it is not waited for
    (begun,) = said(leads.receive("B", promise(FIRST), 0.4), Begin)
    assert begun.members == ("A", "B") and begun.proposal.contributions == ()


@pytest.mark.parametrize("changes", UNKNOWN, ids=lambda changes: changes[:20])
def test_a_chain_with_a_change_that_does_not_work_here_ends_the_island_with_one_error(small, changes):
    amendment, error = signed(changes), "change 1 of the run's settings does not work here .*: use the same diloco"
    state = STATE.after(record(STATE, amendment))
    with pytest.raises(ConfigError, match=error):
        Node("B", state, options_for(small()), now=0.0, incarnation=1)
    with pytest.raises(ConfigError, match=error):
        Node("B", STATE, options_for(small()), now=0.0, incarnation=1).caught_up(state, 0.1)
    assert amend.in_words(amendment)  # `diloco log` shows it


def test_what_may_be_decided_already_is_confirmed(small):
    island = member(options_for(small()))
    proposal = record(STATE, signed('["newer"]')).proposal
    adopted = replace(begin(Ballot(2, "A", 0)), key=STATE.key, proposal=proposal, adopted=EMPTY, holder="A")
    effects = island.receive("A", adopted, 0.1)
    assert not said(effects, Failed) and any(isinstance(effect, FetchResult) for effect in effects)


def test_an_island_whose_driver_cannot_follow_says_only_that(small, caplog):
    config = small()
    trainer = Trainer(config, HERE, Events([Heard()]))
    driver = driver_for(trainer, ("A",), Amended(config, {}).network.transport("A"), owner=OWNER)
    try:
        state = driver.node.state.after(record(driver.node.state, signed('["newer"]')))
        driver.post(lambda now: driver.node.caught_up(state, now))
        with driver.changed:
            driver.changed.wait_for(lambda: driver.failure is not None)
        with pytest.raises(ConfigError, match="use the same diloco"):
            check_driver(driver)
        assert not caplog.records
    finally:
        driver.close()


# what a chain may hold


def test_the_checker_counts_amendments():
    checker = Checker()
    checker.genesis(STATE.head.digest)
    once = STATE.after(record(STATE, FIRST))
    checker.appended("A", record(STATE, FIRST), (), set(), calm=True)
    twice = Record(replace(record(once, None).proposal, amendment=FIRST), EMPTY)
    with pytest.raises(Violation, match="I6: amendment 1 comes after 1 others"):
        checker.appended("A", twice, (), set(), calm=True)


def test_half_of_the_seeds_have_amendments():
    names = ("A", "B", "C")
    made = [amendments_of(seed, names) for seed in range(FIRST_STREAMING, FIRST_STREAMING + 400)]
    assert 0.4 < sum(map(bool, made)) / len(made) < 0.6
    assert max(map(len, made)) == 5 and not any(amendments_of(seed, names) for seed in range(FIRST_STREAMING))


# settings


def test_a_configuration_follows_its_amendments(small):
    config, force = small(), amend.AmendedConfig(small())
    both = (Amendment(1, '{"inner.lr":0.5,"outer.lr":0.1}'), Amendment(2, '{"inner.lr":0.25}'))
    assert amend.amended(config, both) == amend.changed(config, {"inner.lr": 0.25, "outer.lr": 0.1})
    assert force.at(both).inner.lr == force.now.inner.lr == 0.25 and force.at(()) == config
    assert amend.in_words(both[0]) == "inner.lr=0.5, outer.lr=0.1"
    with pytest.raises(ConfigError, match=r"change 1 of the run's settings does not work here .*inner.lr"):
        amend.amended(config, (Amendment(1, '{"inner.lr":-1}'),))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("inner.lr=-1", "inner.lr=-1"),
        ("inner.leer=1", "did you mean inner.lr"),
        ("inner.lr", "section.key=value"),
        ("inner.lr=3e-3", "inner.lr is 0.003 already"),
        ("inner.warmup=12", "must be below inner.steps"),
        ("model.width=64", "model.width is part of what the run is"),
        ("data.epochs=2", "data.epochs cannot change while the run continues: diloco rewind"),
        ("seed=1", "seed is part of what the run is"),
        ("data.tokenizer=x", "data.tokenizer is each island's own business"),
        ("island.batch=16", "island.batch is each island's own business"),
        ("evaluate.every=3", "evaluate.every is each island's own business"),
        ("sync.codec=int4", "cannot change while the run continues: diloco rewind"),
        ("sync.fragments=2", "cannot change while the run continues"),
        ("inner.optimizer=muon", "cannot change while the run continues"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(small, change, reason):
    with pytest.raises(ConfigError) as refused:
        amend.check(small(), [change], own_loop=False)
    assert reason in str(refused.value)


def test_some_changes_depend_on_the_run(small):
    both = amend.check(small(), ["inner.lr=1e-4", "inner.steps=2k"], own_loop=False)
    assert both == {"inner.lr": 1e-4, "inner.steps": 2000}
    assert amend.check(small(), ["inner.steps=20"], own_loop=True) == {"inner.steps": 20}
    with pytest.raises(ConfigError, match="the program that trains"):
        amend.check(small(), ["inner.lr=1e-4"], own_loop=True)
    growing = small(sync={"growth": 1e-3, "fragments": 2})
    with pytest.raises(ConfigError, match="when each fragment takes its turn"):
        amend.check(growing, ["inner.lr=1e-4"], own_loop=False)


@pytest.mark.parametrize("spelling", ["outer.beta2", "outer.second"])
def test_a_renamed_key_is_signed_by_its_new_name_and_read_by_both(small, spelling):
    assert amend.check(small(), [f"{spelling}=0.5"], own_loop=False) == {"outer.beta2": 0.5}
    assert amend.amended(small(), [Amendment(1, f'{{"{spelling}":0.5}}')]).outer.beta2 == 0.5
    with pytest.raises(ConfigError, match=r"outer\.beta2 is 0.99 already"):
        amend.check(small(), [f"{spelling}=0.99"], own_loop=False)


# how they get to an island


def test_changes_wait_in_a_folder_each_number_once(tmp_path):
    key = Identity.load(tmp_path / "owner.key")
    inbox = amend.Inbox(tmp_path)
    assert list(inbox.new()) == []
    one = amend.write_amendment(tmp_path, key, 1, {"outer.lr": 0.5, "inner.lr": 1e-4})
    assert one is not None and one.is_by(key.public_key.hex()) and one.changes == '{"inner.lr":0.0001,"outer.lr":0.5}'
    assert amend.write_amendment(tmp_path, key, 1, {"inner.lr": 9.0}) is None
    assert list(inbox.new()) == [one] and list(inbox.new()) == []
    damaged = tmp_path / amend.FOLDER / "000002.json"
    damaged.write_text("[2]")
    (refused,) = inbox.new()
    assert isinstance(refused, SaveError) and "000002.json is no change" in str(refused)
    with pytest.raises(SaveError, match="remove it"):
        amend.read_amendment(damaged)
    assert [path.name for path in (tmp_path / amend.FOLDER).iterdir() if path.name.startswith(".")] == []


def test_one_line_tells_it_whoever_tells_it():
    event = reported.Amended(time=1.0, number=1, text="inner.lr=0.1", steps=40)
    assert sentence(event) == "by the run's owner: inner.lr=0.1"
    board = Board.of(["one", "two"])
    lines = [board.hear("one", event), board.hear("two", event), board.hear("two", replace(event, number=2))]
    assert lines == [["by the run's owner: inner.lr=0.1"], [], ["by the run's owner: inner.lr=0.1"]]


# among islands


class Amended(Team):
    """The owner changes settings when A has seen its second round."""

    def __init__(self, config, changes) -> None:
        super().__init__(config)
        self.amendment = Amendment.sign(owner(), 1, json.dumps(changes))
        self.heard = {name: Heard() for name in self.names}
        for name, trainer in self.trainers.items():
            trainer.events.attach(self.heard[name])

    def _driver(self, name):
        driver = driver_for(self.trainers[name], self.names, self.network.transport(name), owner=OWNER)
        if name == "A":
            threading.Thread(target=self._amend, args=(driver,), daemon=True).start()
        return driver

    def _amend(self, driver) -> None:
        with driver.changed:
            driver.changed.wait_for(lambda: driver.applied.updates >= 2)
        driver.amend(self.amendment)

    def lived(self) -> tuple[dict, list]:
        drivers = self.drivers()
        side_by_side(drivers, lambda name: self._train(name, drivers[name]))
        assert len({driver.applied.head for driver in drivers.values()}) == 1
        return drivers, [record.proposal for record in drivers["B"].records]


def test_every_island_heeds_a_change_from_its_record_on(small):
    config = small(inner={"steps": 60, "weight_decay": 0.1}, sync={"every": 4}, elastic=PATIENT)
    changes = {"inner.lr": 1e-4, "inner.steps": 40, "inner.weight_decay": 0.0, "inner.clip": 0.5, "outer.lr": 0.125}
    team = Amended(config, changes)
    drivers, proposals = team.lived()
    at = next(index for index, proposal in enumerate(proposals) if proposal.amendment == team.amendment)
    rates = [[p.settings.lr for p in part if p.contributions] for part in (proposals[: at + 1], proposals[at + 1 :])]
    assert 0.125 not in rates[0] and set(rates[1]) == {0.125}
    assert [proposal.step for proposal in proposals][-1] == 40 == drivers["A"].applied.step
    new = amend.changed(config, changes).inner
    for name, trainer in team.trainers.items():
        steps = {e.step: e.lr for e in of_kind(team.heard[name].events, Step)}
        assert max(steps) == 40
        assert steps[4] == learning_rate(config.inner, 4) and steps[40] == learning_rate(new, 40)
        told = [e.text for e in of_kind(team.heard[name].events, reported.Amended)]
        assert told == [amend.in_words(team.amendment)]
        assert {group["weight_decay"] for group in trainer.island.optimizer.param_groups} == {0.0}


def test_who_comes_later_finds_the_changed_settings(small):
    """A state says by itself what was changed."""
    config = small(inner={"steps": 60})
    trainer = Trainer(config, HERE, Events([Heard()]))
    driver = driver_for(trainer, ("A",), Amended(config, {}).network.transport("A"), owner=OWNER)
    try:
        amendment = Amendment.sign(owner(), 1, '{"inner.lr":0.125,"inner.clip":0.25,"inner.steps":50}')
        state = replace(driver.node.state, amendments=(amendment,))
        driver.applier.applied = state
        trainer.join(Rounds(driver, config, str))
        assert trainer.sync.config.inner.lr == 0.125 and trainer.sync.policy.schedule.steps == 50
        assert trainer.island._clip == 0.25
    finally:
        driver.close()
